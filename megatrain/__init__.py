"""Full-precision training of large language models, streamed from host memory."""

__version__ = "0.1.0"
