"""What processes hold when no job runs, and whether that has grown."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from fleet import Fleet

THREADS, MEMORY_MB = 4, 48  # that a process may have more than others of its kind had
_QUIET = 2.0  # seconds without a change
_RETURN = 60.0  # seconds in which what a job has left must be given back: seats have 45


@dataclass(frozen=True)
class Held:
    """What a process has."""

    descriptors: int
    threads: int
    memory_mb: float

    @classmethod
    def by(cls, pid: int) -> Held:
        folder = Path("/proc", str(pid))
        status = (folder / "status").read_text(encoding="ascii", errors="replace")
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        descriptors, threads = (len(list((folder / each).iterdir())) for each in ("fd", "task"))
        return cls(descriptors, threads, int(lines["RssAnon"].split()[0]) * 1024 / 1e6)

    def is_beyond(self, limit: Held) -> bool:
        return (
            self.descriptors > limit.descriptors
            or self.threads > limit.threads + THREADS
            or self.memory_mb > limit.memory_mb + MEMORY_MB
        )


class Ledger:
    """Compares what the fleet's processes hold with what they held after their first job."""

    def __init__(self, fleet: Fleet) -> None:
        """Call it when a job has ended."""
        self._fleet = fleet
        self._limits: dict[str, Held] = {}  # by kind of process, the most
        for name, held in self._settled().items():
            kind = self._kind(name)
            most = self._limits.get(kind, held)
            self._limits[kind] = Held(
                max(most.descriptors, held.descriptors),
                max(most.threads, held.threads),
                max(most.memory_mb, held.memory_mb),
            )

    def leaks(self) -> list[str]:
        """Says which processes hold more, some time after a job."""
        deadline = time.monotonic() + _RETURN
        while True:
            found = [
                f"{name} has {held}, and a {self._kind(name)} had {self._limits[self._kind(name)]}"
                for name, held in self._settled().items()
                if held.is_beyond(self._limits[self._kind(name)])
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
            before, counts = counts, {n: (h.descriptors, h.threads) for n, h in held.items()}
            since = since if counts == before else now
            if now - since > _QUIET or now - begin > _RETURN:
                return held
            signal.sigtimedwait([], 0.1)
