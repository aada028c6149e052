"""Installs the module `apex` for scripts that import it: mixed precision, optimizers, DDP helper.

    import thalweg.compat.apex
    thalweg.compat.apex.install()       # or THALWEG_COMPAT=apex in the environment
    from apex import amp                # now thalweg.amp

An installed apex is never hidden, unless that is requested. `_apex_map` says what there is.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from thalweg.compat._apex_map import PROGRAMS, PROVIDED, names_of, parts_of, why_missing

_TOP = ("apex", "amp_C", "apex_C")


class _Part(ModuleType):
    """A module of apex, whose names are loaded from ours when a script asks for them.

    `import torch` itself may call install(), also while a part of thalweg is being imported.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, f"What Thalweg provides of {name}.")
        self.__path__: list[str] = []  # so that `from … import` asks our finder for what is missing
        self.__all__ = sorted(name for name in names_of(name) if not name.startswith("_"))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        source = names_of(self.__name__).get(name)
        if source is not None:
            value = getattr(importlib.import_module(source), name)
        elif name in parts_of(self.__name__):
            return importlib.import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(why_missing(f"{self.__name__}.{name}"))
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # The import of a module sets its name in the one that contains it. apex lets names win.
        if not (isinstance(value, _Part) and name in names_of(self.__name__)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names_of(self.__name__), *parts_of(self.__name__)})


class _Parts(MetaPathFinder, Loader):
    """Finds the modules of the table as long as `apex` is ours, and says what else to use."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not isinstance(sys.modules.get("apex"), _Part):
            return None
        if fullname in PROVIDED:
            return ModuleSpec(fullname, self, is_package=fullname not in PROGRAMS)
        if fullname.partition(".")[0] in _TOP and "__" not in fullname:
            raise ModuleNotFoundError(why_missing(fullname))
        return None

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns what `python -m` runs; None for all that is no program."""
        source = PROGRAMS.get(fullname)
        spec = importlib.util.find_spec(source) if source else None
        if source is None or spec is None:
            return None
        # Loaders of editable installations are no InspectLoader, but pass on what is asked of them.
        code: CodeType | None = getattr(spec.loader, "get_code")(source)  # noqa: B009
        return code

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Part(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: names are loaded when they are asked for."""


def install(*, replace: bool = False) -> bool:
    """Makes `import apex` find thalweg.amp; may be called again.

    Args:
        replace: hide an apex that is installed or has been imported.

    Returns:
        Whether `apex` is ours; False, with a warning, if there is another one.
    """
    present = sys.modules.get("apex")
    if isinstance(present, _Part):
        return True
    if not replace and (present is not None or _is_installed()):
        logging.getLogger("thalweg").warning(
            "apex is installed and stays what it is: remove it, or call "
            "thalweg.compat.apex.install(replace=True)"
        )
        return False
    for name in list(sys.modules):
        if name.partition(".")[0] in _TOP:
            del sys.modules[name]
    package = _Part("apex")
    finder = next((f for f in sys.meta_path if isinstance(f, _Parts)), None)
    if finder is None:
        finder = _Parts()
        sys.meta_path.insert(0, finder)
    package.__spec__ = ModuleSpec("apex", finder, is_package=True)  # libraries look for it
    package.__loader__ = finder
    sys.modules["apex"] = package
    return True


def _is_installed() -> bool:
    """Returns whether another apex can be imported; a folder of this name alone is none."""
    spec = importlib.util.find_spec("apex")
    return spec is not None and spec.origin is not None
