"""Lets scripts import apex before torch, and `python -m apex.parallel.multiproc` start.

thalweg_apex.pth runs it when Python starts, if THALWEG_COMPAT is apex. It loads no torch: only who
imports apex waits for that, and `import torch` then makes the module (_autoload.py).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TOP = ("apex", "amp_C", "apex_C")


class _TorchFirst(MetaPathFinder):
    """Imports torch when a module of apex is looked for, and leaves the rest to other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _TOP or "torch" in sys.modules:
            return None
        import torch  # noqa: F401 - importing it is all

        return importlib.util.find_spec(fullname)


def install() -> None:
    """Puts the finder before others: a folder called apex must not be found first."""
    sys.meta_path.insert(0, _TorchFirst())
