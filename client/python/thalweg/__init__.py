"""Thalweg: gradient aggregation for data-parallel PyTorch training.

    import thalweg.ddp
    state = thalweg.ddp.attach(ddp_model, codec="fp16")

Importing `thalweg` itself loads neither torch nor native code.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("thalweg")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
