"""Where the server programs of this installation are."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

SIDECAR = "thalweg-sidecar"
AGGREGATOR = "thalweg-aggregator"


def find(name: str) -> Path:
    """The path of a server program; FileNotFoundError names the places that were searched.

    An editable installation keeps Python files in the source tree and programs in site-packages.
    """
    folders = [Path(__file__).parent / "bin"]
    folders += [Path(sysconfig.get_path(key)) / "thalweg" / "bin" for key in ("platlib", "purelib")]
    for folder in dict.fromkeys(folders):
        if os.access(folder / name, os.X_OK):
            return folder / name
    places = ", ".join(str(folder) for folder in dict.fromkeys(folders))
    raise FileNotFoundError(f"{name} is not installed (searched {places}): install thalweg again")
