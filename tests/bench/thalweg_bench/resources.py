"""Measures the resources that processes have used."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thalweg_bench.lab import INTERFACE


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    kind: str  # aggregator, sidecar or worker


@dataclass(frozen=True)
class _Counters:
    cpu_seconds: float = 0.0
    sent_bytes: int = 0

    @classmethod
    def of(cls, pid: int) -> _Counters:
        return cls(cpu_seconds(pid), sent_bytes(pid))

    def plus(self, later: _Counters, earlier: _Counters) -> _Counters:
        return _Counters(
            self.cpu_seconds + later.cpu_seconds - earlier.cpu_seconds,
            self.sent_bytes + later.sent_bytes - earlier.sent_bytes,
        )


@dataclass
class Usage:
    """CPU time of processes, and bytes sent over their links, between start() and stop()."""

    processes: Sequence[Process]
    rounds: int = 0
    _used: dict[int, _Counters] = field(default_factory=dict)
    _before: dict[int, _Counters] = field(default_factory=dict)

    def start(self) -> None:
        self._before = {process.pid: _Counters.of(process.pid) for process in self.processes}

    def stop(self, rounds: int = 1) -> None:
        self.rounds += rounds
        for pid, before in self._before.items():
            self._used[pid] = self._used.get(pid, _Counters()).plus(_Counters.of(pid), before)

    def report(
        self,
        case: str,
        round_bytes: Mapping[str, float],
        memory: Callable[[int], float] | None = None,
    ) -> list[dict[str, object]]:
        """Returns maximum and mean of each kind; `round_bytes` is payload in and out of one, by
        kind.

        `memory` gives a process's megabytes, by default peak_rss_mb(). `sent_mb` is what left the
        link of a server in a round, headers included; workers share their sidecar's link.
        """
        memory = memory or peak_rss_mb
        result = []
        for kind, moved in round_bytes.items():
            members = [process.pid for process in self.processes if process.kind == kind]
            if not members or not self.rounds:
                continue
            gigabytes = moved * self.rounds / 1e9
            costs = [self._used[pid].cpu_seconds / gigabytes for pid in members]
            sizes = [memory(pid) for pid in members]
            sent = [self._used[pid].sent_bytes / self.rounds / 1e6 for pid in members]
            for how, pick in (("max", max), ("mean", _mean)):
                result.append(
                    {
                        "case": case,
                        "process": f"{kind} {how}",
                        "cpu_s_per_gb": round(pick(costs), 4),
                        "rss_mb": round(pick(sizes), 1),
                        "sent_mb": None if kind == "worker" else round(pick(sent), 3),
                    }
                )
        return result

    def per_node(self, case: str, system: str, size: int, nodes: int) -> dict[str, object]:
        """Returns what all sidecars and workers have used together, for each node.

        `cpu_s_per_gb` counts gigabytes of one worker's gradient, so systems can be compared
        whatever they send. Memory that a sidecar shares with its workers counts for each of them.
        """
        members = [process.pid for process in self.processes if process.kind != "aggregator"]
        used = sum(self._used[pid].cpu_seconds for pid in members)
        links = [process.pid for process in self.processes if process.kind == "sidecar"]
        sent = sum(self._used[pid].sent_bytes for pid in links)
        return {
            "case": case,
            "process": f"node, {system}",
            "cpu_s_per_gb": round(used / nodes / (size * self.rounds / 1e9), 4),
            "rss_mb": round(sum(peak_rss_mb(pid) for pid in members) / nodes, 1),
            "sent_mb": round(sent / nodes / self.rounds / 1e6, 3),
        }


@dataclass(frozen=True)
class Memory:
    """Bytes that a process has in memory: its own, and what it shares with others."""

    own: int
    shared: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
        return cls(int(sizes["RssAnon"]) << 10, int(sizes["RssShmem"]) << 10)

    def minus(self, before: Memory) -> Memory:
        return Memory(self.own - before.own, self.shared - before.shared)


def cpu_seconds(pid: int) -> float:
    """Returns utime + stime of /proc/PID/stat, in nanoseconds instead of hundredths of a second."""
    clock = (~pid << 3) | 2  # the process's CPUCLOCK_SCHED, as clock_getcpuclockid() makes it
    return time.clock_gettime(clock)


def sent_bytes(pid: int) -> int:
    """Returns the bytes sent over the link of the process's network namespace."""
    lines = Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines()
    counts = [line.split(":")[1].split() for line in lines if line.strip().startswith(INTERFACE)]
    return sum(int(of_link[8]) for of_link in counts)  # the 8 before count what was received


def peak_rss_mb(pid: int) -> float:
    """Returns the peak with shared memory, in millions of bytes."""
    return _status_mb(pid, "VmHWM")


def rss_mb(pid: int) -> float:
    """Returns the present value."""
    return _status_mb(pid, "VmRSS")


def _status_mb(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 / 1e6 if match else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def write_json(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    path.write_text(json.dumps(list(entries), indent=1) + "\n", encoding="utf-8")
