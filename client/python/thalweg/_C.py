"""Becomes the native part that was built for the torch that runs; _C.pyi states its contract."""

import sys

from thalweg import _native

sys.modules[__name__] = _native.load(__name__)
# Threads that began to import it meanwhile have this module.
globals().update(vars(sys.modules[__name__]))
