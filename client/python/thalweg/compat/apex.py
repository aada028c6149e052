"""Installs the module `apex` for scripts that import it: mixed precision, optimizers, DDP helper.

    import thalweg.compat.apex
    thalweg.compat.apex.install()       # or THALWEG_COMPAT=apex in the environment
    from apex import amp                # now thalweg.amp

An installed apex is never hidden, unless that is requested.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Imported only when a script asks for them: `import torch` itself may call install(), also while a
# part of thalweg is being imported.
_PARTS = {
    "amp": "thalweg.amp",
    "fp16_utils": "thalweg.amp.fp16_utils",
    "optimizers": "thalweg.compat._apex_optimizers",
    "parallel": "thalweg.compat._apex_parallel",
}


class _Apex(ModuleType):
    """The module `apex`; its parts are modules of Thalweg."""

    def __getattr__(self, name: str) -> ModuleType:
        if name not in _PARTS:
            raise AttributeError(f"module 'apex' has no attribute {name!r}")
        return importlib.import_module(f"apex.{name}")


class _Parts(MetaPathFinder, Loader):
    """Finds `apex.amp` and the others as long as `apex` is ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, part = fullname.partition(".")
        if part not in _PARTS or not isinstance(sys.modules.get(package), _Apex):
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        part = module.__name__.partition(".")[2]
        sys.modules[module.__name__] = importlib.import_module(_PARTS[part])


def install(*, replace: bool = False) -> bool:
    """Makes `import apex` find thalweg.amp; may be called again.

    Args:
        replace: hide an apex that is installed or has been imported.

    Returns:
        Whether `apex` is ours; False, with a warning, if there is another one.
    """
    present = sys.modules.get("apex")
    if isinstance(present, _Apex):
        return True
    if not replace and (present is not None or importlib.util.find_spec("apex") is not None):
        logging.getLogger("thalweg").warning(
            "apex is installed and stays what it is: remove it, or call "
            "thalweg.compat.apex.install(replace=True)"
        )
        return False
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    package = _Apex("apex", __doc__)
    package.__path__ = []
    sys.modules["apex"] = package
    if not any(isinstance(finder, _Parts) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Parts())
    return True
