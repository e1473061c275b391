"""`python -m megatrain.cli`, the same as `megatrain`."""

from megatrain.cli import main

main()
