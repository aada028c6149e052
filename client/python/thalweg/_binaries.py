"""Finds the server programs of this installation, and runs them in place of this process."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

SIDECAR = "thalweg-sidecar"
AGGREGATOR = "thalweg-aggregator"


def find(name: str) -> Path:
    """Returns the path of a server program; FileNotFoundError names the places that were searched.

    An editable installation keeps Python files in the source tree and programs in site-packages.
    """
    folders = [Path(__file__).parent / "bin"]
    folders += [Path(sysconfig.get_path(key)) / "thalweg" / "bin" for key in ("platlib", "purelib")]
    for folder in dict.fromkeys(folders):
        if os.access(folder / name, os.X_OK):
            return folder / name
    places = ", ".join(str(folder) for folder in dict.fromkeys(folders))
    raise FileNotFoundError(f"{name} is not installed (searched {places}): install thalweg again")


def aggregator(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command `thalweg-aggregator`; the default arguments are this process's."""
    _become(AGGREGATOR, arguments)


def sidecar(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command `thalweg-sidecar`; the default arguments are this process's."""
    _become(SIDECAR, arguments)


def _become(name: str, arguments: Sequence[str] | None) -> NoReturn:
    """Replaces this process by a server program, so that signals reach the program itself."""
    try:
        program = str(find(name))
    except FileNotFoundError as error:
        sys.exit(f"thalweg: {error}")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python's own setting would outlive it
    os.execv(program, [name, *(sys.argv[1:] if arguments is None else arguments)])
