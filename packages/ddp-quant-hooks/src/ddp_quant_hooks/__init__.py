"""DistributedDataParallel communication hooks that average gradients in 8 or 4 bits."""

__version__ = "0.1.0"
