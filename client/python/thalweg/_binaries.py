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


def folders() -> list[Path]:
    """Returns the folders that may have what was compiled of this installation.

    An editable installation keeps Python files in the source tree and the rest in site-packages.
    """
    found = [Path(__file__).parent]
    found += [Path(sysconfig.get_path(key)) / "thalweg" for key in ("platlib", "purelib")]
    return list(dict.fromkeys(found))


def find(name: str) -> Path:
    """Returns the path of a server program; FileNotFoundError names the places searched."""
    for folder in folders():
        if os.access(folder / "bin" / name, os.X_OK):
            return folder / "bin" / name
    places = ", ".join(str(folder / "bin") for folder in folders())
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
    from thalweg._settings import _variables

    words = sys.argv[1:] if arguments is None else arguments
    os.execve(program, [name, *words], {**os.environ, **_variables.absolute_folders()})
