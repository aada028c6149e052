"""Loads the extension that was built for the torch that runs.

torch's classes have other members in each minor version, and the extension reads them directly.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from thalweg import _binaries

_FILE = f"_C{EXTENSION_SUFFIXES[0]}"  # such as _C.cpython-311-x86_64-linux-gnu.so


def load(name: str) -> ModuleType:
    """Returns the extension as the module `name`; ImportError says for which torches."""
    import torch  # its libraries must be loaded before the extension

    built = _built()
    path = built.get(_series(torch.__version__))
    if path is None:
        raise ImportError(_none_fits(sorted(built), torch.__version__))
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not an extension module")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _series(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _built() -> dict[tuple[int, int], Path]:
    """Returns the extensions of this installation, by torch's major and minor version."""
    found: dict[tuple[int, int], Path] = {}
    for folder in _binaries.folders():
        for path in sorted(folder.glob(f"torch_*/{_FILE}")):
            _, major, minor = path.parent.name.split("_")
            found.setdefault((int(major), int(minor)), path)
    return found


def _none_fits(built: list[tuple[int, int]], running: str) -> str:
    if not built:
        return f"no {_FILE} of thalweg is installed for torch {running}: install thalweg again"
    names = ", ".join(f"{major}.{minor}" for major, minor in built)
    return (
        f"this thalweg works with torch {names}, and torch {running} is installed: install another "
        "torch, or build thalweg with this one (docs/install.md)"
    )
