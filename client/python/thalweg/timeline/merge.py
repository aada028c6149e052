"""Merges traces into one, on the first shard's clock: a track per process, and flows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg._settings._config import ConfigError
from thalweg.timeline import clocks, torch_profile
from thalweg.timeline.files import Event, TraceFile
from thalweg.timeline.torch_profile import TorchProfile

_ORDER = ("worker", "sidecar", "shard")


@dataclass
class Process:
    """A process of the merged trace."""

    trace: TraceFile
    name: str
    number: int  # the pid in the merged trace: pids of several hosts may be equal
    way: clocks.Way

    @property
    def error_us(self) -> float | None:
        return None if self.way.error is None else self.way.error / 1e3


@dataclass
class Merged:
    processes: list[Process]
    events: list[Event]
    warnings: list[str]

    def write(self, path: Path) -> None:
        """Writes the file, as a whole or not at all. Raises ConfigError."""
        unfinished = _unfinished(path)
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
                file.write(",\n".join(json.dumps(event) for event in self.events))
                file.write("\n]}\n")
            if unfinished != path:
                unfinished.replace(path.resolve())
        except OSError as error:
            if unfinished != path:
                unfinished.unlink(missing_ok=True)
            raise _cannot_write(path, error) from None


def check_is_no_input(path: Path, inputs: Iterable[Path]) -> None:
    """Raises ConfigError if writing the file would replace one of `inputs`."""
    if path.resolve() in {one.resolve() for one in inputs}:
        raise ConfigError(f"{path} is one of the files to merge: give another --output")


def check_output(path: Path) -> None:
    """Raises ConfigError unless the file can be written, which it leaves as it is."""
    unfinished = _unfinished(path)
    if unfinished == path and not path.is_dir():
        return  # a pipe's reader would take this for the end
    try:
        with unfinished.open("a"):
            pass
        unfinished.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def _unfinished(path: Path) -> Path:
    """Returns where to write what will be `path`: that itself if it is a pipe or a device."""
    if path.exists() and not path.is_file():
        return path
    path = path.resolve()
    return path.with_name(f"{path.name}.unfinished")


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror}")


def merge(traces: Sequence[TraceFile], profiles: Iterable[TorchProfile] = ()) -> Merged:
    """Merges the traces. Raises ConfigError for a profile whose worker is unknown."""
    root, ways = clocks.ways(traces)
    ordered = sorted(traces, key=_rank)
    processes = [
        Process(trace, _name(trace), number, ways[trace.clock])
        for number, trace in enumerate(ordered, start=1)
    ]
    merged = Merged(processes, [], _warnings(processes, root))
    for process in processes:
        merged.events += _metadata(process)
        merged.events += (_aligned(event, process) for event in process.trace.events)
    number = len(processes)
    for profile in profiles:
        worker = torch_profile.worker_of(profile, [process.trace for process in processes])
        owner = next(process for process in processes if process.trace is worker)
        events = profile.events(owner.trace, owner.way, owner.name, number)
        number = max([number, *(int(event["pid"]) for event in events)])
        merged.events += events
    _begin_at_zero(merged.events)
    merged.events += _flows(merged.events)
    return merged


def _rank(trace: TraceFile) -> tuple[int, int, int, str]:
    """Sorts nodes in order, each with its workers and its sidecar; then the shards."""
    side, place = trace.place()
    is_shard = side == "shard"
    position = _ORDER.index(side) if side in _ORDER else len(_ORDER)
    first = place.get("shard", 0) if is_shard else place.get("node", 0)
    return (is_shard or not place, first, 100_000 * position + place.get("rank", 0), trace.host)


def _name(trace: TraceFile) -> str:
    side, place = trace.place()
    who = f"{trace.host} {trace.pid}"
    if not place:
        return f"{trace.program} without spans ({who})"
    if side == "worker":
        return f"node {place['node']} worker {place['rank']} ({who})"
    if side == "sidecar":
        return f"node {place['node']} sidecar ({who})"
    return f"shard {place['shard']} ({who})"


def _warnings(processes: Sequence[Process], root: str) -> list[str]:
    said = []
    for process in processes:
        trace = process.trace
        if trace.dropped:
            said.append(f"{process.name}: {trace.dropped} spans were dropped and are missing")
        if trace.truncated:
            said.append(f"{process.name}: the last line of {trace.path.name} is not whole")
        if process.way.error is None:
            said.append(
                f"{process.name}: nobody has compared its host's clock with that of the first "
                f"shard's ({root}); the wall clocks are taken, wrong by an unknown amount"
            )
    return said


def _metadata(process: Process) -> list[Event]:
    trace = process.trace
    known = {"clock": trace.clock, "error_us": process.error_us, "dropped": trace.dropped}
    names: list[tuple[str, dict[str, Any]]] = [
        ("process_name", {"name": process.name}),
        ("process_sort_index", {"sort_index": process.number}),
        ("thalweg_process", known),
    ]
    return [
        {"ph": "M", "name": name, "pid": process.number, "tid": 0, "args": args}
        for name, args in names
    ]


def _aligned(event: Event, process: Process) -> Event:
    event = {**event, "pid": process.number}
    if "ts" in event:
        begin = event["ts"] * 1e3
        event["ts"] = process.way(begin) / 1e3
        if "dur" in event:
            event["dur"] = process.way(begin + event["dur"] * 1e3) / 1e3 - event["ts"]
    return event


def _begin_at_zero(events: Sequence[Event]) -> None:
    first = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
        if "dur" in event:
            event["dur"] = round(event["dur"], 3)


# An arrow leads from the phase on the left to the phase on the right that waits for it.
_ARROWS = {"send": "fold", "deliver": "decode"}


def _flows(events: Sequence[Event]) -> list[Event]:
    """Returns arrows from each node's sending of a chunk to the fold, and on to the decoding."""
    slices: dict[tuple[Any, ...], list[Event]] = {}
    for event in events:
        args = event.get("args", {})
        if (
            event.get("name") in {*_ARROWS, *_ARROWS.values()}
            and event.get("cat") in _ORDER
            and "collective" not in args
        ):
            keys = ("job", "bucket", "layout", "part", "part_round", "chunk")
            chunk = tuple(args[key] for key in keys)
            slices.setdefault((event["name"], *chunk), []).append(event)
    flows: list[Event] = []
    for (name, *what), begins in slices.items():
        for begin in begins:
            for end in slices.get((_ARROWS.get(name, ""), *what), []):
                common = {"cat": "chunk", "name": name, "id": len(flows) // 2 + 1}
                flows.append({"ph": "s", **common, **_at(begin)})
                flows.append({"ph": "f", "bp": "e", **common, **_at(end)})
    return flows


def _at(event: Event) -> dict[str, Any]:
    return {key: event[key] for key in ("pid", "tid", "ts")}
