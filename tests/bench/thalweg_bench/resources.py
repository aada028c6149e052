"""Measures the resources that processes have used."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thalweg_bench.lab import INTERFACE


@dataclass
class Usage:
    """CPU time of processes, and bytes sent over their links, between start() and stop().

    The processes are given by their kinds: aggregator, sidecar or worker.
    """

    pids: Mapping[str, Sequence[int]]
    rounds: int = 0
    _used: dict[int, Counter[str]] = field(default_factory=dict)

    def start(self) -> None:
        for pid, counters in self._now().items():
            self._used.setdefault(pid, Counter()).subtract(counters)

    def stop(self, rounds: int = 1) -> None:
        self.rounds += rounds
        for pid, counters in self._now().items():
            self._used[pid].update(counters)

    def _now(self) -> dict[int, Mapping[str, float]]:
        everyone = (pid for of_kind in self.pids.values() for pid in of_kind)
        return {pid: {"cpu": cpu_seconds(pid), "sent": sent_bytes(pid)} for pid in everyone}

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
        result: list[dict[str, object]] = []
        for kind, moved in round_bytes.items():
            pids = self.pids.get(kind, ())
            gigabytes = moved * self.rounds / 1e9
            costs = [self._used[pid]["cpu"] / gigabytes for pid in pids]
            sizes = [(memory or peak_rss_mb)(pid) for pid in pids]
            sent = [self._used[pid]["sent"] / self.rounds / 1e6 for pid in pids]
            picks: dict[str, Callable[[list[float]], float]] = {"max": max, "mean": statistics.mean}
            result += [
                {
                    "case": case,
                    "process": f"{kind} {how}",
                    "cpu_s_per_gb": round(pick(costs), 4),
                    "rss_mb": round(pick(sizes), 1),
                    "sent_mb": None if kind == "worker" else round(pick(sent), 3),
                }
                for how, pick in picks.items()
                if pids
            ]
        return result

    def per_node(self, case: str, system: str, size: int, nodes: int) -> dict[str, object]:
        """Returns what all sidecars and workers have used together, for each node.

        `cpu_s_per_gb` counts gigabytes of one worker's gradient, so systems can be compared
        whatever they send. Memory that a sidecar shares with its workers counts for each of them.
        """
        members = [*self.pids["sidecar"], *self.pids["worker"]]
        used = sum(self._used[pid]["cpu"] for pid in members)
        sent = sum(self._used[pid]["sent"] for pid in self.pids["sidecar"])
        return {
            "case": case,
            "process": f"node, {system}",
            "cpu_s_per_gb": round(used / nodes / (size * self.rounds / 1e9), 4),
            "rss_mb": round(sum(peak_rss_mb(pid) for pid in members) / nodes, 1),
            "sent_mb": round(sent / nodes / self.rounds / 1e6, 3),
        }


def cpu_seconds(pid: int) -> float:
    """Returns utime + stime of /proc/PID/stat, in nanoseconds instead of hundredths of a second."""
    clock = (~pid << 3) | 2  # the process's CPUCLOCK_SCHED, as clock_getcpuclockid() makes it
    return time.clock_gettime(clock)


def sent_bytes(pid: int) -> int:
    """Returns the bytes sent over the link of the process's network namespace."""
    lines = Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines()
    counts = [line.split(":")[1].split() for line in lines if line.strip().startswith(INTERFACE)]
    return sum(int(of_link[8]) for of_link in counts)  # the 8 before count what was received


def memory_of(pid: int) -> dict[str, int]:
    """Returns bytes by the kernel's names, such as RssAnon, of its own, and RssShmem."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    return {
        name: int(kib) << 10
        for name, kib in re.findall(r"^(\w+):\s*(\d+) kB$", status, re.MULTILINE)
    }


def peak_rss_mb(pid: int) -> float:
    """Returns the peak with shared memory, in millions of bytes."""
    return memory_of(pid)["VmHWM"] / 1e6


def rss_mb(pid: int) -> float:
    """Returns the present value."""
    return memory_of(pid)["VmRSS"] / 1e6
