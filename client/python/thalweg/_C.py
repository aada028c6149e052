"""Becomes the native part that was built for the torch that runs; _C.pyi states its contract."""

import sys

from thalweg import _native

sys.modules[__name__] = _native.load(__name__)
