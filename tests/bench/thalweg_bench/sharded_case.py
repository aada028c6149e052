"""Measures steps of a model that torch shards, over Gloo and over Thalweg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from thalweg._settings._config import ConfigError
from thalweg.codecs import parse
from thalweg_bench.case import Outcome
from thalweg_bench.cluster_case import ClusterCase
from thalweg_bench.compression import wire_bytes
from thalweg_bench.options import StepCodecs, names, number
from thalweg_bench.rows import Row, markdown
from thalweg_bench.shape import HOSTED, Shape
from thalweg_bench.shapes import count_elements, transformer_blocks

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories

# Bytes of an element that is gathered, and of one that is reduced. Both are the same here.
_ITEM_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 260 / 256}
_FORMS = ("flat", "hybrid")
_HEADINGS = (
    *("case", "system", "seconds", "min", "max", "of bound"),
    *("times Gloo", "MB sent", "of Gloo", "of fp32"),
)


@dataclass(frozen=True)
class Kind:
    """What a system is."""

    backend: str  # "gloo" or "thalweg"
    fsdp: int  # 1 or 2
    codec: str = "fp32"
    hybrid: bool = False  # sharded inside each node, copies on all nodes


@dataclass(frozen=True, kw_only=True)
class FsdpCase(ClusterCase):
    """a step of a model that torch shards, over Gloo and over Thalweg

    A step is a forward and a backward pass with a transformer's parameters and hardly any
    computation: it takes what its links take. The blocks are the units that torch gathers and
    reduces. "flat": sharded over all workers, by FSDP2 (fully_shard) and FSDP1; "hybrid": inside
    each of 2 nodes of 2 workers, with copies on both. There are no aggregators unless asked for:
    the nodes' sidecars host the shards. MB sent: by a node in a step, headers included.

    examples:
      thalweg bench fsdp --json rows.json
      thalweg bench fsdp --cases hybrid --hybrid-codecs powersgd:4,onebit --rate 100mbit
    """

    shape: Shape = HOSTED
    cases: Annotated[tuple[str, ...], names(_FORMS)] = _FORMS
    width: Annotated[int, number(8, 8192, "of the transformer")] = 512
    blocks: Annotated[int, number(1, 1000)] = 16
    codecs: StepCodecs = ("fp16", "int8")
    hybrid_codecs: StepCodecs = ("powersgd:rank=4,start=2",)
    repeats: Annotated[int, number(1, 1000)] = 3

    def check(self) -> None:
        for codec in self.codecs:
            if "flat" in self.cases and codec.partition(":")[0] not in ("fp16", "bf16", "int8"):
                raise ConfigError(f"--codecs {codec}: shards are sent in fp16, bf16 or int8")
        super().check()

    def run(self) -> Outcome:
        shapes = {"flat": self.shape, "hybrid": replace(self.shape, nodes=2, workers=2)}
        parts = [replace(self, cases=(form,), shape=shapes[form])._run() for form in self.cases]
        found = Outcome.joined(parts)
        sent = [float(str(entry["sent_mb"])) for entry in found.resources]
        return replace(found, text=table(found.rows, sent))

    @property
    def hybrid(self) -> bool:
        """Whether the model is sharded inside each node, with copies on all nodes."""
        return self.cases == ("hybrid",)

    @property
    def elements(self) -> int:
        return sum(map(count_elements, transformer_blocks(self.width, self.blocks)))

    @property
    def size(self) -> int:
        return 4 * self.elements

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
            for codec in (self.hybrid_codecs if self.hybrid else self.codecs)
        }
        return plain | coded

    @property
    def systems(self) -> tuple[str, ...]:
        return tuple(self.kinds())

    def factories(self) -> Factories:
        from thalweg_bench.sharded_step import factories

        return factories(transformer_blocks(self.width, self.blocks), self.kinds())

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

    def bound(self, system: str, rate: float | None) -> float | None:
        return None if rate is None else self.sent_bytes(self.kinds()[system]) * 8 / rate

    def _run(self) -> Outcome:
        with self.cluster() as cluster:
            self.start(cluster)
            self.open(cluster, seconds=120 + 20 * (self.slowest or 0.0))
            usages = {system: cluster.usage() for system in self.systems}
            rows = self.rows(self.take_turns(cluster, usages))
            nodes = self.shape.nodes
            return Outcome(
                rows, [usages[r.system].per_node(r.case, r.system, r.bytes, nodes) for r in rows]
            )


def table(rows: Sequence[Row], sent_mb: Sequence[float]) -> str:
    """Returns each system beside Gloo's of its case and kind of FSDP: how many times as fast it is,
    what part it sends of Gloo's bytes, and of its own without a codec.
    """
    by_system = {
        (row.case, row.system): (row, sent) for row, sent in zip(rows, sent_mb, strict=True)
    }
    lines = []
    for row, sent in by_system.values():
        kind = row.system.split()[1]
        gloo, gloo_sent = by_system[row.case, f"gloo {kind}"]
        plain_sent = by_system[row.case, f"thalweg {kind}"][1]
        lines.append(
            (
                *(row.case, row.system),
                *(f"{seconds:.3f}" for seconds in (row.median_s, row.min_s, row.max_s)),
                "-" if row.bound_s is None else f"{row.bound_s / row.median_s:.3f}",
                *(f"{gloo.median_s / row.median_s:.2f}", f"{sent:.2f}"),
                *(f"{sent / base:.3f}" for base in (gloo_sent, plain_sent)),
            )
        )
    return markdown(_HEADINGS, lines)
