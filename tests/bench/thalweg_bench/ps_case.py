"""`thalweg bench ps` runs steps with AdamW on the workers and on the shards, in turns.

With `local`, workers also step by themselves, and exchange what has changed at the end of a run.
With `snapshot_every`, shards also write snapshots of what they keep, while steps go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thalweg.codecs import parse
from thalweg_bench.cluster import Cluster, Shape
from thalweg_bench.compression import wire_bytes
from thalweg_bench.lab_case import measure_iperf3, run_alternating
from thalweg_bench.resources import Memory
from thalweg_bench.rows import Row, make_row, say
from thalweg_bench.shapes import count_elements, shapes_of
from thalweg_bench.torch_import import import_torch


@dataclass(frozen=True)
class PsCase:
    shape: Shape
    model: str
    steps: int  # in a run
    forward_seconds: float  # of a forward pass; a backward pass takes twice as long
    clip: float | None  # the norm to which gradients are clipped
    overlap: bool  # of weights that come with the next forward pass
    local: bool  # measure local updates as well
    snapshot_every: int  # steps: measure them with snapshots as well; 0: do not
    peers: tuple[str, ...]
    repeats: int

    @property
    def name(self) -> str:
        parts = [self.model, str(self.shape), self.shape.codec, "AdamW"]
        parts += [] if self.clip is None else [f"clipped to {self.clip:g}"]
        parts += ["overlapped"] if self.overlap else []
        if self.forward_seconds:
            parts.append(f"{self.forward_seconds:g} + {2 * self.forward_seconds:g} s of work")
        parts += [f"{self.steps} steps"] if self.steps > 1 else []
        return ", ".join(parts)

    @property
    def systems(self) -> tuple[str, ...]:
        more = [("snapshots", self.snapshot_every > 0), ("local", self.local)]
        return ("workers", "servers", *(name for name, wanted in more if wanted))

    @property
    def work_seconds(self) -> float:
        return 3 * self.forward_seconds * self.steps

    def bound(self, system: str) -> float | None:
        """Returns how long the links take for the exchanges of a run; local updates work first, and
        then exchange once.

        Where nothing comes down before all is up, each direction of a link rests half of the time;
        but not where every node has a shard, whose results go up. With other shards beside those
        there is no formula here.
        """
        bytes_ = wire_bytes(parse(self.shape.codec), shapes_of(self.model))
        once = self.shape.exchange_bound(bytes_, self.shape.rate)
        if once is not None and system == "local":
            return self.work_seconds + once
        once = None if once is None else self.steps * once
        on_shards = system in {"servers", "snapshots"}
        if once is None or not on_shards or not (self.overlap or self.clip):
            return once
        if self.shape.local:
            return once if self.shape.shards == 0 else None
        return 2 * once


def run(case: PsCase) -> list[Row]:
    """Runs the case. Raises BenchError, LabError or ServerError."""
    size = 4 * count_elements(shapes_of(case.model))
    with Cluster(case.shape, keeps=case.snapshot_every > 0) as cluster:
        _start_workers(cluster, case)
        slowest = _slowest(case)

        def once(system: str, repeat: int) -> float:
            if system == "iperf3":
                return measure_iperf3(cluster, size)
            return cluster.measure(system, repeat, slowest)

        times = run_alternating((*case.peers, *case.systems), case.repeats, once)
    return [
        make_row(
            case.name, system, size, seconds, case.bound(system) if system in case.systems else None
        )
        for system, seconds in times.items()
    ]


def _start_workers(cluster: Cluster, case: PsCase) -> None:
    say(case.name)
    import_torch()
    from thalweg_bench.ps_step import Training, factories
    from thalweg_bench.worker import Worker

    shapes = shapes_of(case.model)
    training = Training(
        shapes, case.steps, case.forward_seconds, case.clip, case.overlap, case.snapshot_every
    )
    systems = factories(training)
    cluster.fork(lambda rank: Worker(cluster.lab, cluster.place(rank), systems))
    cluster.call("start_gloo")
    for system in case.systems:
        say(f"{system}: building, first steps")
        before = _memory_of_shards(cluster)
        cluster.call("open", system, seconds=60 + 20 * _slowest(case))
        if system == "servers":
            _say_memory(_memory_of_shards(cluster), before, count_elements(shapes))


def _memory_of_shards(cluster: Cluster) -> dict[str, Memory]:
    shards = [*cluster.shards, *(cluster.nodes if cluster.shape.local else ())]
    servers = [cluster.server(name) for name in shards]
    return {server.name: Memory.of(server.process.pid) for server in servers}


def _say_memory(now: Mapping[str, Memory], before: Mapping[str, Memory], elements: int) -> None:
    """Says what each shard takes more since then, and how much of that is the optimizer's."""
    kept = 12 * elements / max(1, len(now))  # weights and moments
    for name, memory in now.items():
        grown = memory.minus(before[name])
        say(
            f"{name}: {grown.own / 1e6:.1f} MB more, of which weights and moments take "
            f"{kept / 1e6:.1f} with equal shares, and {grown.shared / 1e6:.1f} MB in arenas"
        )


def _slowest(case: PsCase) -> float:
    return max(case.bound(system) or 0.0 for system in case.systems) + case.work_seconds
