"""`thalweg bench step` runs a DDP step with a model's parameters and hardly any computation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from thalweg.codecs import Auto, Codec, PowerSGD, parse
from thalweg_bench.cluster import Cluster, Shape
from thalweg_bench.compression import warm_up_steps, wire_bytes
from thalweg_bench.lab_case import measure_iperf3, run_alternating
from thalweg_bench.rows import Row, make_row, ring_bound, say
from thalweg_bench.shapes import count_elements, shapes_of
from thalweg_bench.torch_import import import_torch

_ORDER = ("iperf3", "local", "thalweg", "ddp", "torch-fp16", "torch-powersgd")
_ROWS = ("thalweg", "ddp", "torch-fp16", "torch-powersgd", "iperf3")


@dataclass(frozen=True)
class StepCase:
    shape: Shape
    model: str
    peers: tuple[str, ...]
    repeats: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.shape}, {self.shape.codec}"

    @property
    def codec(self) -> Codec:
        return parse(self.shape.codec)

    @property
    def size(self) -> int:
        """Returns the bytes of the gradients."""
        return 4 * count_elements(shapes_of(self.model))


def run(case: StepCase) -> list[Row]:
    """Runs the case. Raises BenchError, LabError or ServerError."""
    with Cluster(case.shape) as cluster:
        _start_workers(cluster, case)
        slowest = max((b for b in _bounds(case, case.shape.rate).values() if b), default=None)

        def once(system: str, repeat: int) -> float:
            if system == "iperf3":
                return measure_iperf3(cluster, case.size)
            return cluster.measure(system, repeat, slowest)

        order = sorted(("local", "thalweg", *case.peers), key=_ORDER.index)
        return make_rows(case, run_alternating(order, case.repeats, once))


def _start_workers(cluster: Cluster, case: StepCase) -> None:
    say(f"{case.name}: {case.size} bytes of gradients")
    import_torch()
    from thalweg_bench.step import factories
    from thalweg_bench.worker import Worker

    systems = factories(shapes_of(case.model))
    cluster.fork(lambda rank: Worker(cluster.lab, cluster.place(rank), systems))
    cluster.call("start_gloo")
    for system in ("local", "thalweg", *case.peers):
        if system != "iperf3":
            say(f"{system}: building, first steps")
            cluster.call("open", system, seconds=_opening_seconds(case))


def make_rows(case: StepCase, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Makes rows: the step, and the step less the time that it takes without communication."""
    rate: float | None = case.shape.rate
    if times.get("iperf3"):
        rate = case.size * 8 / statistics.median(times["iperf3"])
    bounds = _bounds(case, rate)
    local = statistics.median(times["local"])
    systems = [system for system in _ROWS if system in times]
    rows = []
    for part, subtracted in (("step", 0.0), ("communication", local)):
        for system in systems:
            seconds = [t - (0.0 if system == "iperf3" else subtracted) for t in times[system]]
            name = f"{case.name} {part}"
            rows.append(make_row(name, system, case.size, seconds, bounds[system]))
    return rows


def _bounds(case: StepCase, rate: float | None) -> dict[str, float | None]:
    shape, size = case.shape, case.size
    codec, shapes = case.codec, shapes_of(case.model)
    factors = None
    if isinstance(codec, PowerSGD):
        # torch's hook sends them in the gradients' type.
        fp32_bytes = wire_bytes(replace(codec, wire="fp32"), shapes)
        factors = ring_bound(fp32_bytes, rate, shape.ranks, shape.nodes)
    ours = None  # the sidecars choose what auto sends
    if not isinstance(codec, Auto):
        ours = shape.exchange_bound(wire_bytes(codec, shapes), rate)
    return {
        "thalweg": ours,
        "ddp": ring_bound(size, rate, shape.ranks, shape.nodes),
        "torch-fp16": ring_bound(size // 2, rate, shape.ranks, shape.nodes),
        "torch-powersgd": factors,
        "iperf3": None if shape.rate is None else size * 8 / shape.rate,
    }


def _opening_seconds(case: StepCase) -> float:
    """Returns the time for building and the first steps, on a machine with fewer cores than
    workers.

    Steps before compression starts take as long as plain DDP's.
    """
    slowest = max((b for b in _bounds(case, case.shape.rate).values() if b), default=0.0)
    return 60 + 20 * slowest * (1 + warm_up_steps(case.codec))
