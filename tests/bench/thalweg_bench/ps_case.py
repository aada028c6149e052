"""`thalweg bench ps` runs a step with AdamW on the workers and on the shards, in turns."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.codecs import parse
from thalweg_bench.cluster import Cluster, Shape
from thalweg_bench.compression import wire_bytes
from thalweg_bench.lab_case import measure_iperf3, run_alternating
from thalweg_bench.rows import Row, make_row, say
from thalweg_bench.shapes import count_elements, shapes_of
from thalweg_bench.torch_import import import_torch

_SYSTEMS = ("workers", "servers")


@dataclass(frozen=True)
class PsCase:
    shape: Shape
    model: str
    clip: float | None  # the norm to which gradients are clipped
    peers: tuple[str, ...]
    repeats: int

    @property
    def name(self) -> str:
        clip = "" if self.clip is None else f", clipped to {self.clip:g}"
        return f"{self.model}, {self.shape}, {self.shape.codec}, AdamW{clip}"

    def bound(self, system: str) -> float | None:
        """Returns how long the links take: one exchange, or, where nothing comes down before all is
        up, two.
        """
        bytes_ = wire_bytes(parse(self.shape.codec), shapes_of(self.model))
        once = self.shape.exchange_bound(bytes_, self.shape.rate)
        waits = system == "servers" and self.clip is not None
        return once if once is None else once * (2 if waits else 1)


def run(case: PsCase) -> list[Row]:
    """Runs the case. Raises BenchError, LabError or ServerError."""
    size = 4 * count_elements(shapes_of(case.model))
    with Cluster(case.shape) as cluster:
        _start_workers(cluster, case)
        slowest = max((case.bound(system) or 0.0 for system in _SYSTEMS), default=0.0)

        def once(system: str, repeat: int) -> float:
            if system == "iperf3":
                return measure_iperf3(cluster, size)
            return cluster.measure(system, repeat, slowest)

        times = run_alternating((*case.peers, *_SYSTEMS), case.repeats, once)
    return [
        make_row(
            case.name, system, size, seconds, case.bound(system) if system in _SYSTEMS else None
        )
        for system, seconds in times.items()
    ]


def _start_workers(cluster: Cluster, case: PsCase) -> None:
    say(case.name)
    import_torch()
    from thalweg_bench.ps_step import factories
    from thalweg_bench.worker import Worker

    systems = factories(shapes_of(case.model), case.clip)
    cluster.fork(lambda rank: Worker(cluster.lab, cluster.place(rank), systems))
    cluster.call("start_gloo")
    slowest = max(case.bound(system) or 0.0 for system in _SYSTEMS)
    for system in _SYSTEMS:
        say(f"{system}: building, first steps")
        cluster.call("open", system, seconds=60 + 20 * slowest)
