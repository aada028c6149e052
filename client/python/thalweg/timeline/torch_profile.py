"""Converts a trace of torch.profiler to the common time axis.

In the format of torch 2.11, `ts` is in microseconds since `baseTimeNanoseconds`, which is Unix
time, and `pid` is the process, or a GPU's number, or a name. Unix time is the wall clock of the
worker's host; the worker's trace records the steady clock at the same moment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg._settings._config import ConfigError
from thalweg.timeline.clocks import Way
from thalweg.timeline.files import Event, TraceFile


@dataclass
class TorchProfile:
    path: Path
    base: int  # nanoseconds of Unix time
    rank: int | None  # set if the process group was known
    raw: list[Event]

    def pids(self) -> list[Any]:
        """Returns the pids of the events that have a time."""
        return list(dict.fromkeys(event["pid"] for event in self.raw if "pid" in event))

    def events(self, worker: TraceFile, way: Way, name: str, last_pid: int) -> list[Event]:
        """Yields all events in microseconds of the common clock; pids start after `last_pid`."""
        numbers = {pid: last_pid + i for i, pid in enumerate(self.pids(), start=1)}
        to_steady = self.base - worker.wall + worker.steady
        events: list[Event] = []
        for raw in self.raw:
            if raw.get("name") in ("process_name", "process_sort_index"):
                continue
            event = {**raw, "pid": numbers.get(raw.get("pid"), last_pid + 1)}
            if "ts" in raw:
                event["ts"] = way(raw["ts"] * 1e3 + to_steady) / 1e3
            events.append(event)
        for pid, number in numbers.items():
            what = "torch" if pid == worker.pid else f"torch, {pid or 'marks'}"
            args = {"name": f"{name}: {what}"}
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": args})
        return events


def read(path: Path) -> TorchProfile:
    """Reads a profile. ConfigError names a file that is no trace of torch.profiler."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(trace, dict) or "baseTimeNanoseconds" not in trace:
        raise ConfigError(
            f"{path} is no trace of torch.profiler: it has no baseTimeNanoseconds (torch writes "
            "that since 2.2)"
        )
    try:
        rank = trace.get("distributedInfo", {}).get("rank")
        base, events = int(trace["baseTimeNanoseconds"]), trace["traceEvents"]
        if not all(isinstance(event, dict) for event in events):
            raise TypeError("an event of it is no object")
    except KeyError as error:
        raise ConfigError(f"{path} is no trace of torch.profiler: it has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no trace of torch.profiler: {error}") from None
    return TorchProfile(path, base, rank, events)


def worker_of(profile: TorchProfile, traces: Sequence[TraceFile]) -> TraceFile:
    """Returns the profiled worker. Raises ConfigError unless there is exactly one.

    The worker has the profile's process number; where workers of several hosts have it, also its
    rank.
    """
    pids = profile.pids()
    found = [trace for trace in traces if trace.place()[0] == "worker" and trace.pid in pids]
    if len(found) > 1:
        found = [trace for trace in found if trace.place()[1]["rank"] == profile.rank]
    if len(found) != 1:
        raise ConfigError(
            f"{profile.path} is of rank {profile.rank}, processes {pids}: expected one worker's "
            f"trace to match, found {len(found)}"
        )
    return found[0]
