"""Finds the folders of a data set."""

from __future__ import annotations

from pathlib import Path

from thalweg.examples.swin import SwinError

PREPARE = "python -m thalweg.examples.swin.prepare --folder"
PARTS = ("train", "val")


def folder_of(data: str | Path, part: str) -> Path:
    """Returns the folder of one of PARTS. Raises SwinError if it is missing."""
    folder = Path(data, part)
    if not folder.is_dir():
        raise SwinError(
            f"there is no folder {folder}: DATA.PATH (--data) must have {' and '.join(PARTS)}, "
            f"which {PREPARE} {data} makes"
        )
    return folder
