"""What processes hold when no job runs, and whether that has grown."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleet import Fleet
from waiting import pass_time

THREADS, MEMORY_MB = 4, 48  # that a process may have more than others of its kind had
_QUIET = 2.0  # seconds without a change
_RETURN = 60.0  # seconds in which what a job has left must be given back: seats have 45


@dataclass(frozen=True)
class Held:
    """What a process has."""

    descriptors: tuple[str, ...]  # what each of them is
    threads: tuple[str, ...]  # their names
    memory_mb: float

    @classmethod
    def by(cls, pid: int) -> Held:
        folder = Path("/proc", str(pid))
        status = (folder / "status").read_text(encoding="ascii", errors="replace")
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        sockets = _sockets(folder)
        links = _each(folder / "fd", lambda link: str(link.readlink()))
        return cls(
            tuple(sorted(sockets.get(link) or re.sub(r"\d+", "", link) for link in links)),
            tuple(_each(folder / "task", lambda task: (task / "comm").read_text("ascii").strip())),
            int(lines["RssAnon"].split()[0]) * 1024 / 1e6,
        )

    def most(self, other: Held) -> Held:
        return Held(
            max(self.descriptors, other.descriptors, key=len),
            max(self.threads, other.threads, key=len),
            max(self.memory_mb, other.memory_mb),
        )

    def is_beyond(self, limit: Held) -> bool:
        return (
            len(self.descriptors) > len(limit.descriptors)
            or len(self.threads) > len(limit.threads) + THREADS
            or self.memory_mb > limit.memory_mb + MEMORY_MB
        )

    def more_than(self, limit: Held) -> str:
        descriptors = Counter(self.descriptors) - Counter(limit.descriptors)
        threads = Counter(self.threads) - Counter(limit.threads)
        return (
            f"{len(self.descriptors)} descriptors, {len(self.threads)} threads and "
            f"{self.memory_mb:.0f} MB, at first {len(limit.descriptors)}, {len(limit.threads)} and "
            f"{limit.memory_mb:.0f} MB; new are {[*descriptors.elements(), *threads.elements()]}"
        )


def _each(folder: Path, read: Callable[[Path], str]) -> list[str]:
    """Returns what is read of each that does not end meanwhile."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            found.append(read(path))
    return sorted(found)


def _sockets(process: Path) -> dict[str, str]:
    """Returns what sockets are, by the link in /proc/PID/fd."""
    found = {}
    for line in (process / "net" / "tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, _, remote, state, *rest = line.split()
        host, port = (int(part, 16) for part in remote.split(":"))
        peer = f"{socket.inet_ntoa(struct.pack('=I', host))}:{port}"
        found[f"socket:[{rest[5]}]"] = f"TCP to {peer} in state {state}"
    for line in (process / "net" / "unix").read_text(encoding="utf-8").splitlines()[1:]:
        *_, inode, path = (*line.split(maxsplit=7), "")[:8]
        found[f"socket:[{inode}]"] = f"Unix socket {path}"
    return found


class Ledger:
    """Compares what the fleet's processes hold with what they held after their first job."""

    def __init__(self, fleet: Fleet) -> None:
        """Call it when a job has ended."""
        self._fleet = fleet
        self._limits: dict[str, Held] = {}  # by kind of process, the most
        for name, held in self._settled().items():
            kind = self._kind(name)
            self._limits[kind] = self._limits.get(kind, held).most(held)

    def leaks(self) -> list[str]:
        """Says which processes hold more, some time after a job."""
        deadline = time.monotonic() + _RETURN
        while True:
            found = [
                f"{name} has {held.more_than(limit)}"
                for name, held in self._settled().items()
                if held.is_beyond(limit := self._limits[self._kind(name)])
            ]
            if not found or time.monotonic() > deadline:
                return found

    def _kind(self, name: str) -> str:
        return next(member.kind for member in self._fleet.members if member.name == name)

    def _settled(self) -> dict[str, Held]:
        """Returns what each process holds once that has not changed for a while."""
        counts: dict[str, tuple[int, int]] = {}
        since = begin = time.monotonic()
        while True:
            running = [member for member in self._fleet.members if self._fleet.is_running(member)]
            held = {member.name: Held.by(member.pid) for member in running}
            now = time.monotonic()
            before, counts = (
                counts,
                {name: (len(each.descriptors), len(each.threads)) for name, each in held.items()},
            )
            since = since if counts == before else now
            if now - since > _QUIET or now - begin > _RETURN:
                return held
            pass_time(0.1)
