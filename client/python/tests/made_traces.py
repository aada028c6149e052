"""Makes traces of a fictitious job: two nodes on two hosts, a shard on a third, known clocks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

MS = 1_000_000  # nanoseconds


@dataclass
class Host:
    """A host whose steady clock is `ahead` of true time and gains `drift` per nanosecond."""

    name: str
    ahead: int
    wall_ahead: int = 0
    drift: float = 0.0

    def steady(self, true: int) -> int:
        return true + self.ahead + round(self.drift * true)


@dataclass
class Writer:
    """Writes a process's trace; times are true ones, in nanoseconds."""

    host: Host
    program: str
    pid: int
    place: dict[str, int]
    lines: list[dict[str, object]] = field(default_factory=list)
    waits: int = 0

    def __post_init__(self) -> None:
        start = 50 * MS
        process = {
            "program": self.program,
            "version": "0",
            "host": self.host.name,
            "pid": self.pid,
            "clock": f"boot of {self.host.name}",
            "steady_ns": self.host.steady(start),
            "wall_ns": 10**18 + start + self.host.wall_ahead,
        }
        self.meta("process_name", {"name": self.program})
        self.meta("thalweg_process", process)

    def meta(self, name: str, args: dict[str, object]) -> None:
        self.lines.append({"ph": "M", "name": name, "pid": self.pid, "args": args})

    def offset(self, other: Host, true: int, round_trip: int, there: int) -> None:
        """Adds a comparison begun at `true`; the other clock is read `there` after that."""
        ours = self.host.steady(true) + round_trip // 2
        args = {
            "at_ns": ours,
            "clock": f"boot of {other.name}",
            "offset_ns": other.steady(true + there) - ours,
            "error_ns": round_trip // 2 + 1,
        }
        self.meta("thalweg_offset", args)

    def span(self, side: str, phase: str, begin: int, end: int, **args: object) -> None:
        base = {"job": "night", **self.place, "bucket": 0, "layout": 0, "part": 0}
        base |= {"raw_bytes": 400, "codec": "fp16", **args}
        common: dict[str, object] = {"cat": side, "name": phase, "pid": self.pid}
        begin_us, end_us = self.host.steady(begin) / 1e3, self.host.steady(end) / 1e3
        if phase.startswith("wait") or phase in ("exchange", "wire"):
            self.waits += 1
            common["id2"] = {"local": str(self.waits)}
            self.lines.append({"ph": "b", **common, "ts": begin_us, "args": base})
            self.lines.append({"ph": "e", **common, "ts": end_us})
        else:
            times = {"tid": 7, "ts": begin_us, "dur": end_us - begin_us}
            self.lines.append({"ph": "X", **common, **times, "args": base})

    def write(self, folder: Path, tail: str = "") -> Path:
        path = folder / f"thalweg-{self.program}-{self.host.name}-{self.pid}.json"
        text = "".join(json.dumps(line) + ",\n" for line in self.lines)
        path.write_text("[\n" + text + tail, encoding="utf-8")
        return path


def hosts(drift: float = 0.0) -> list[Host]:
    """Returns the hosts of nodes 0 and 1, and of the shard, whose clock is behind all others."""
    return [
        Host("a", ahead=7_000 * MS, wall_ahead=3 * MS, drift=drift),
        Host("b", ahead=-20 * MS, wall_ahead=-4 * MS),
        Host("c", ahead=900_000 * MS),
    ]


def job(on: list[Host], rounds: int = 2) -> list[Writer]:
    """Writes a worker and a sidecar for each node, then the shard; each has two chunks."""
    writers = []
    for node in range(2):
        place = {"node": node, "num_nodes": 2}
        worker = {"rank": node, "world_size": 2}
        writers.append(Writer(on[node], "worker", 100 + node, {**worker, **place}))
        writers.append(Writer(on[node], "sidecar", 200, place))
    writers.append(Writer(on[2], "aggregator", 200, {"num_nodes": 2}))
    for number in range(1, rounds + 1):
        _add_round(writers, number, number * 100 * MS)
    return writers


def _add_round(writers: list[Writer], number: int, begin: int) -> None:
    shard = writers[-1]
    for node in range(2):
        worker, sidecar = writers[2 * node], writers[2 * node + 1]
        worker.span("worker", "copy_in", begin, begin + 4 * MS, round=number)
        worker.span("worker", "wait", begin + 4 * MS, begin + 40 * MS, round=number)
        worker.span("worker", "copy_out", begin + 40 * MS, begin + 41 * MS, round=number)
        sidecar.span("sidecar", "wait_workers", begin, begin + MS, round=number)
        sidecar.span("sidecar", "exchange", begin + MS, begin + 38 * MS, round=number)
        sidecar.span("sidecar", "return", begin + 38 * MS, begin + 39 * MS, round=number)
        for chunk in range(2):
            what = {"round": number, "part_round": number, "chunk": chunk, "shard": 0}
            late = begin + chunk * 5 * MS
            sidecar.span("sidecar", "reduce", late + 4 * MS, late + 6 * MS, **what)
            sidecar.span("sidecar", "send", late + 6 * MS, late + 7 * MS, **what)
            sidecar.span("sidecar", "wire", late + 6 * MS, late + 30 * MS, **what)
            sidecar.span("sidecar", "decode", late + 30 * MS, late + 32 * MS, **what)
    for chunk in range(2):
        what = {"part_round": number, "chunk": chunk, "shard": 0}
        late = begin + chunk * 5 * MS
        shard.span("shard", "wait_for_slowest", late + 8 * MS, late + 18 * MS, **what)
        shard.span("shard", "fold", late + 18 * MS, late + 20 * MS, **what)
        shard.span("shard", "deliver", late + 20 * MS, late + 21 * MS, **what)


def compare_clocks(writers: list[Writer], on: list[Host], there: float = 0.5) -> None:
    """Compares every sidecar's clock with the shard's in 0.4 ms, of which `there` is one way."""
    for sidecar in (writers[1], writers[3]):
        for round_trip in (5 * MS, 400_000, 2 * MS):
            sidecar.offset(on[2], 60 * MS, round_trip, round(there * round_trip))
