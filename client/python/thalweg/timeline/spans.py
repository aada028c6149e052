"""Reads a merged trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thalweg._settings._config import ConfigError

SIDES = ("worker", "sidecar", "shard")


class Span(NamedTuple):
    """One span. Times are in microseconds."""

    side: str
    phase: str
    begin: float
    end: float
    process: int
    args: dict[str, Any]

    @property
    def bucket_round(self) -> tuple[str, int, int, int]:
        """Returns job, bucket, layout and round, for a span of a worker or sidecar."""
        return (self.args["job"], self.args["bucket"], self.args["layout"], self.args["round"])

    @property
    def chunk_round(self) -> tuple[Any, ...]:
        """Returns job, bucket, layout, part, its round and the chunk; also for a shard's span."""
        names = ("job", "bucket", "layout", "part", "part_round", "chunk")
        return tuple(self.args[name] for name in names)


@dataclass
class Timeline:
    spans: list[Span]
    names: dict[int, str]  # by process
    clocks: dict[int, tuple[str, float | None]]  # clock and its maximal error; None: not known
    dropped: int


def read(path: Path) -> Timeline:
    """Reads the trace. ConfigError names a file that `thalweg trace merge` has not written."""
    try:
        timeline = _timeline(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        timeline = None
    if timeline is None or not timeline.clocks:
        raise ConfigError(f"{path} is no merged trace: make one with thalweg trace merge")
    return timeline


def _timeline(events: list[dict[str, Any]]) -> Timeline:
    known = [event for event in events if event.get("name") == "thalweg_process"]
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name" and event.get("ph") == "M"
    }
    return Timeline(
        spans=list(_spans(events)),
        names=names,
        clocks={e["pid"]: (e["args"]["clock"], e["args"]["error_us"]) for e in known},
        dropped=sum(event["args"]["dropped"] for event in known),
    )


def _spans(events: list[dict[str, Any]]) -> Iterator[Span]:
    """Yields the spans. A wait is two events; a lone one, from a killed process, is ignored."""
    begun: dict[tuple[int, str], dict[str, Any]] = {}
    for event in events:
        kind, side = event.get("ph"), event.get("cat")
        if side not in SIDES:
            continue
        if kind == "X":
            begin = event["ts"]
            yield Span(
                side, event["name"], begin, begin + event["dur"], event["pid"], event["args"]
            )
        elif kind == "b":
            begun[event["pid"], event["id2"]["local"]] = event
        elif kind == "e":
            first = begun.pop((event["pid"], event["id2"]["local"]), None)
            if first is not None:
                yield Span(
                    side, event["name"], first["ts"], event["ts"], event["pid"], first["args"]
                )
