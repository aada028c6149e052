"""Reads the files that THALWEG_TRACE leaves: one for each process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from thalweg._settings._config import ConfigError

Event = dict[str, Any]


class Offset(NamedTuple):
    """The offset of another clock from this process's clock, in nanoseconds."""

    at: int  # on this process's clock
    clock: str
    nanos: int
    error: int  # upper bound


@dataclass
class TraceFile:
    """One file. Times are nanoseconds of the process's steady clock; `events` has microseconds."""

    path: Path
    program: str
    host: str
    pid: int
    clock: str
    steady: int  # read at the same time as `wall`
    wall: int
    events: list[Event] = field(default_factory=list)  # spans, and the names of threads
    offsets: list[Offset] = field(default_factory=list)
    dropped: int = 0  # number of spans that were dropped
    truncated: bool = False  # the process was killed while it wrote the file

    def place(self) -> tuple[str, dict[str, int]]:
        """Returns this process's side and place in the job, as far as its spans say.

        A sidecar that contains an aggregator counts as a sidecar.
        """
        sides: dict[str, dict[str, int]] = {}
        for event in self.events:
            if "cat" in event and "args" in event:
                sides.setdefault(event["cat"], event["args"])
        for side in ("worker", "sidecar", "shard"):
            if side in sides:
                return side, sides[side]
        return self.program, {}


def find(paths: Iterable[Path]) -> list[Path]:
    """Returns the files among `paths` and in the folders among them. Raises ConfigError."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("thalweg-*.json"))
            if not inside:
                raise ConfigError(f"{path} has no traces: no file is named thalweg-*.json")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(f"{path} does not exist")
    return list(dict.fromkeys(found))


def read(path: Path) -> TraceFile:
    """Reads a file. Raises ConfigError that names the file unless it is a trace of Thalweg.

    An incomplete last line is ignored: the process was killed or is still running.
    """
    try:
        return _read(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _read(path: Path) -> TraceFile:
    trace: TraceFile | None = None
    for event, is_last in _events(path):
        name = event.get("name") if event else None
        args = event.get("args", {}) if event else {}
        if event is None and is_last and trace is not None:
            trace.truncated = True
        elif event is None:
            raise ConfigError(f"{path} is damaged: a line in its middle is no event")
        elif name == "thalweg_process":
            trace = _process(path, args)
        elif trace is None:
            continue  # process_name: merging makes a new one
        else:
            _add(path, trace, event, args)
    if trace is None:
        raise ConfigError(f"{path} is no trace of Thalweg: it does not say of which process")
    return trace


def _add(path: Path, trace: TraceFile, event: Event, args: dict[str, Any]) -> None:
    name = event.get("name")
    try:
        if name == "thalweg_offset":
            trace.offsets.append(
                Offset(args["at_ns"], args["clock"], args["offset_ns"], args["error_ns"])
            )
        elif name == "thalweg_dropped":
            trace.dropped = args["spans"]
        else:
            trace.events.append(event)
    except KeyError as missing:
        raise ConfigError(f"{path} is damaged: a line {name!r} has no {missing}") from None


def _events(path: Path) -> Iterator[tuple[Event | None, bool]]:
    """Yields each line's event, None if it is not one, and whether it is the last line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        if file.readline() != "[\n":
            raise ConfigError(f"{path} is no trace of Thalweg: its first line is not '['")
        line = file.readline()
        while line:
            following = file.readline()
            yield _event(line), not following
            line = following


def _event(line: str) -> Event | None:
    if not line.endswith(",\n"):
        return None
    try:
        event = json.loads(line[:-2])
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _process(path: Path, args: dict[str, Any]) -> TraceFile:
    try:
        return TraceFile(
            path=path,
            program=args["program"],
            host=args["host"],
            pid=args["pid"],
            clock=args["clock"],
            steady=args["steady_ns"],
            wall=args["wall_ns"],
        )
    except KeyError as error:
        raise ConfigError(f"{path} is of another release: its process has no {error}") from None
