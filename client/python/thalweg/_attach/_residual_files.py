"""Writes and reads files of what a node's codec carries, one for each job, step and node.

A file is a header (magic, length and CRC-32 of the rest) and the bytes of
Session.save_codec_state().
"""

from __future__ import annotations

import os
import re
import struct
import threading
import weakref
import zlib
from pathlib import Path

_HEADER = struct.Struct("<8sQI")
_MAGIC = b"TWRESID1"
_KEPT = 3  # files of a node and module: those of two checkpoints, and of the end of a job


class ResidualFiles:
    """The files of one node in a folder, which may have those of other nodes, too."""

    def __init__(self, folder: str, node: int) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._node = node
        self._resumed: set[Path] = set()  # what the job has gone on from
        _alive.add(self)

    def write(self, job: str, step: int, state: bytes) -> None:
        """Writes a file as a whole or not at all, and removes the oldest of this node's. Raises
        OSError. Thread-safe.
        """
        with _writing:
            self._write(job, step, state)

    def _write(self, job: str, step: int, state: bytes) -> None:
        # What is held back tells about the data, so that it is no business of other users.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(job, step)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            unfinished.unlink(missing_ok=True)  # an old one would keep its mode
            with open(unfinished, "xb", opener=_private) as file:
                file.write(_HEADER.pack(_MAGIC, len(state), zlib.crc32(state)))
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)  # the disk may be full
            raise
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        _written[path] = max(_written.values(), default=0) + 1
        self._remove_old(path)

    def read(self, job: str, step: int) -> bytes:
        """Returns what was written for the step, or else for the next one. Raises OSError; it is
        FileNotFoundError where neither is there.
        """
        for path in (self._path(job, step), self._path(job, step + 1)):
            if path.exists():
                return _read(path)
        raise FileNotFoundError(f"no file {self._path(job, step)}")

    def hold(self, job: str, step: int) -> None:
        """Leaves the files that read() takes for this step where they are, until release()."""
        self._resumed = {self._path(job, step), self._path(job, step + 1)}

    def release(self) -> None:
        self._resumed = set()

    def _path(self, job: str, step: int) -> Path:
        plain = re.sub(r"[^\w.-]", "_", job)
        return self.folder / f"{plain}-{step}-node{self._node}.residuals"

    def _remove_old(self, newest: Path) -> None:
        mine = f"*-node{self._node}.residuals"
        kept = {newest}.union(*(each._resumed for each in _alive))
        others = [path for path in self.folder.glob(mine) if path not in kept]
        # Clocks may have been ahead when an earlier process wrote.
        others.sort(key=lambda p: (_written.get(p, 0), p.stat().st_mtime_ns), reverse=True)
        # Modules of this process may have jobs of their own, whose files are here, too.
        modules = sum((each.folder, each._node) == (self.folder, self._node) for each in _alive)
        for path in [*others[_KEPT * modules - 1 :], *self.folder.glob(f"{mine}.unfinished")]:
            path.unlink(missing_ok=True)
            _written.pop(path, None)


_writing = threading.Lock()
_written: dict[Path, int] = {}  # files that this process has written, numbered in their order
_alive: weakref.WeakSet[ResidualFiles] = weakref.WeakSet()


def _private(path: str, flags: int) -> int:
    """Opens a file that, if it is new, only its user can read."""
    return os.open(path, flags, 0o600)


def _read(path: Path) -> bytes:
    whole = path.read_bytes()
    state = whole[_HEADER.size :]
    expected = _HEADER.pack(_MAGIC, len(state), zlib.crc32(state))
    if whole[: _HEADER.size] != expected:
        raise OSError(f"{path} is damaged, or no file of residuals")
    return state
