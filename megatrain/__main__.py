"""`python -m megatrain`, the same as `megatrain`."""

from megatrain.cli import main

main()
