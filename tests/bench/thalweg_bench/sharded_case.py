"""`thalweg bench fsdp` runs steps of a model that torch shards, over Gloo and over Thalweg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.codecs import parse
from thalweg_bench.cluster import Cluster, Shape
from thalweg_bench.compression import wire_bytes
from thalweg_bench.lab_case import run_alternating
from thalweg_bench.resources import Usage
from thalweg_bench.rows import Row, make_row, say
from thalweg_bench.shapes import count_elements, transformer_blocks
from thalweg_bench.torch_import import import_torch

# Bytes of an element that is gathered, and of one that is reduced. Both are the same here.
_ITEM_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 260 / 256}


@dataclass(frozen=True)
class Kind:
    """What a system is."""

    backend: str  # "gloo" or "thalweg"
    fsdp: int  # 1 or 2
    codec: str = "fp32"
    hybrid: bool = False  # sharded inside each node, copies on all nodes


@dataclass(frozen=True)
class ShardedCase:
    shape: Shape
    width: int
    blocks: int
    codecs: tuple[str, ...]
    repeats: int

    @property
    def hybrid(self) -> bool:
        """Whether the model is sharded inside each node, with copies on all nodes."""
        return self.shape.workers > 1

    @property
    def elements(self) -> int:
        return sum(map(count_elements, transformer_blocks(self.width, self.blocks)))

    @property
    def name(self) -> str:
        how = "HSDP" if self.hybrid else "FSDP"
        return f"{how}, {self.elements / 1e6:.1f} M parameters, {self.shape}"

    def kinds(self) -> dict[str, Kind]:
        """Returns the systems, by name; those of Gloo come first."""
        plain = {
            f"{backend} fsdp{fsdp}": Kind(backend, fsdp, hybrid=self.hybrid)
            for backend in ("gloo", "thalweg")
            for fsdp in ((2,) if self.hybrid else (2, 1))
        }
        coded = {
            f"thalweg fsdp2 {codec}": Kind("thalweg", 2, codec, self.hybrid)
            for codec in self.codecs
        }
        return plain | coded

    def sent_bytes(self, kind: Kind) -> float:
        """Returns the bytes of values that a node's link carries each way in a step.

        Gloo has no reduce_scatter: torch takes an allreduce, which is two of them.
        """
        nodes, blocks = self.shape.nodes, transformer_blocks(self.width, self.blocks)
        part = (nodes - 1) / nodes
        if self.hybrid:
            shards = [(-(-s[0] // self.shape.workers), *s[1:]) for block in blocks for s in block]
            return 2 * part * self.shape.workers * wire_bytes(parse(kind.codec), shards)
        units = 4 if kind.backend == "gloo" else 3
        return units * part * self.elements * _ITEM_BYTES[kind.codec.partition(":")[0]]


@dataclass(frozen=True)
class Measured:
    row: Row
    sent_mb: float  # by a node in a step, headers included


def run(case: ShardedCase) -> list[Measured]:
    """Runs the case. Raises BenchError, LabError or ServerError."""
    kinds = case.kinds()
    with Cluster(case.shape) as cluster:
        _start_workers(cluster, case)
        usages = {system: cluster.usage() for system in kinds}
        slowest = max(filter(None, (_bound(case, kind) for kind in kinds.values())), default=None)

        def once(system: str, repeat: int) -> float:
            return cluster.measure(system, repeat, slowest, usages[system] if repeat else None)

        times = run_alternating(list(kinds), case.repeats, once)
        return [
            _measured(case, system, times[system], _bound(case, kind), usages[system])
            for system, kind in kinds.items()
        ]


def _measured(
    case: ShardedCase, system: str, seconds: Sequence[float], bound: float | None, usage: Usage
) -> Measured:
    row = make_row(case.name, system, 4 * case.elements, seconds, bound)
    used = usage.per_node(case.name, system, row.bytes, case.shape.nodes)
    return Measured(row, float(str(used["sent_mb"])))


def _start_workers(cluster: Cluster, case: ShardedCase) -> None:
    say(case.name)
    import_torch()
    from thalweg_bench.sharded_step import factories
    from thalweg_bench.worker import Worker

    kinds = case.kinds()
    systems = factories(transformer_blocks(case.width, case.blocks), kinds)
    cluster.fork(lambda rank: Worker(cluster.lab, cluster.place(rank), systems))
    cluster.call("start_gloo")
    slowest = max(filter(None, (_bound(case, kind) for kind in kinds.values())), default=0.0)
    for system in kinds:
        say(f"{system}: building, first steps")
        cluster.call("open", system, seconds=120 + 20 * slowest)


def _bound(case: ShardedCase, kind: Kind) -> float | None:
    rate = case.shape.rate
    return None if rate is None else case.sent_bytes(kind) * 8 / rate


def table(results: Sequence[Measured]) -> str:
    """Returns a Markdown table, each system beside Gloo's of its case and kind of FSDP: how many
    times as fast it is, what part it sends of Gloo's bytes, and of its own without a codec.
    """
    heads = ("case", "system", "seconds", "min", "max", "of bound", "times Gloo", "MB sent")
    lines = [f"| {' | '.join((*heads, 'of Gloo', 'of fp32'))} |", "|---" * 10 + "|"]
    for one in results:
        row = one.row
        kind = row.system.split()[1]
        gloo, exact = (_find(results, row.case, f"{by} {kind}") for by in ("gloo", "thalweg"))
        cells = (
            *(row.case, row.system, f"{row.median_s:.3f}", f"{row.min_s:.3f}", f"{row.max_s:.3f}"),
            "-" if row.bound_s is None else f"{row.bound_s / row.median_s:.3f}",
            *(f"{gloo.row.median_s / row.median_s:.2f}", f"{one.sent_mb:.2f}"),
            *(f"{one.sent_mb / base.sent_mb:.3f}" for base in (gloo, exact)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _find(results: Sequence[Measured], case: str, system: str) -> Measured:
    return next(one for one in results if (one.row.case, one.row.system) == (case, system))
