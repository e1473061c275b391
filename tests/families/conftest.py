"""What tests of families share with those of parity."""

from tests.parity.conftest import one_thread

__all__ = ["one_thread"]
