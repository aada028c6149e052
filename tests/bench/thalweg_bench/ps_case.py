"""Measures steps with AdamW on the workers and on the shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from thalweg._settings._config import ConfigError
from thalweg.codecs import WIRE_TYPES, parse
from thalweg_bench.case import Outcome
from thalweg_bench.cluster import Cluster
from thalweg_bench.cluster_case import ClusterCase
from thalweg_bench.compression import wire_bytes
from thalweg_bench.options import Forward, Model, Norm, flag, number, one_of, peers
from thalweg_bench.resources import memory_of
from thalweg_bench.rows import say
from thalweg_bench.shapes import count_elements, shapes_of

if TYPE_CHECKING:
    from thalweg_bench.worker import Factories

_Memory = dict[str, int]
_LOSSY = ("int8", "onebit")
_ON_SHARDS = ("servers", "snapshots")


@dataclass(frozen=True, kw_only=True)
class PsCase(ClusterCase):
    """steps with AdamW, on workers and on shards

    With --snapshot-every, shards also write snapshots of what they keep, while steps go on.
    """

    model: Model = "resnet50"
    clip: Norm = None
    overlap: Annotated[bool, flag("weights come with the next forward pass")] = False
    snapshot_every: Annotated[
        int, number(0, 1000, "steps after which aggregators write snapshots; 0: never")
    ] = 0
    steps: Annotated[int, number(1, 1000, "of a run")] = 1
    forward: Forward = 0.0
    codec: Annotated[
        str,
        one_of((*WIRE_TYPES, *_LOSSY), "both ways; weights come as differences in int8 and onebit"),
    ] = "bf16"
    peers: Annotated[tuple[str, ...], peers("iperf3")] = ("iperf3",)

    def check(self) -> None:
        if self.snapshot_every and (self.shape.shards == 0 or self.shape.local):
            raise ConfigError(
                "--snapshot-every needs aggregators alone: --shards 1, --local-shards 0"
            )
        if self.codec in _LOSSY and self.snapshot_every:
            raise ConfigError(
                f"--codec {self.codec} does not go with --snapshot-every: expected "
                f"{', '.join(WIRE_TYPES)}"
            )
        super().check()

    @property
    def name(self) -> str:
        parts = [self.model, str(self.shape), self.codec, "AdamW"]
        parts += [] if self.clip is None else [f"clipped to {self.clip:g}"]
        parts += ["overlapped"] if self.overlap else []
        parts += [f"{self.forward:g} + {2 * self.forward:g} s of work"] if self.forward else []
        parts += [f"{self.steps} steps"] if self.steps > 1 else []
        return ", ".join(parts)

    @property
    def size(self) -> int:
        return 4 * count_elements(shapes_of(self.model))

    @property
    def systems(self) -> tuple[str, ...]:
        snapshots = ("snapshots",) if self.snapshot_every else ()
        return (*self.peers, "workers", "servers", *snapshots)

    def factories(self) -> Factories:
        from thalweg_bench.ps_step import factories

        return factories(self)

    @property
    def work_seconds(self) -> float:
        return 3 * self.forward * self.steps  # a backward pass takes two forward passes

    def bound(self, system: str, rate: float | None) -> float | None:
        """Returns how long the links take for the exchanges of a run.

        Where nothing comes down before all is up, each direction of a link rests half of the time;
        but not where every node has a shard, whose results go up. With other shards beside those
        there is no formula here.
        """
        if system in self.peers:
            return super().bound(system, rate)
        sent = wire_bytes(parse(self.codec), shapes_of(self.model))
        once = self.shape.exchange_bound(sent, rate)
        if once is None:
            return None
        if system not in _ON_SHARDS or not (self.overlap or self.clip):
            return self.steps * once
        if self.shape.local:
            return self.steps * once if self.shape.shards == 0 else None
        return 2 * self.steps * once

    @property
    def slowest(self) -> float:
        return (super().slowest or 0.0) + self.work_seconds

    def run(self) -> Outcome:
        with self.cluster(keeps=self.snapshot_every > 0) as cluster:
            self.start(cluster)
            for system in self.systems:
                before = _memory_of_shards(cluster)
                if system not in self.peers:
                    say(f"{system}: building, first steps")
                    cluster.open(system, seconds=60 + 20 * self.slowest, offers=False)
                if system == "servers":
                    self._say_memory(_memory_of_shards(cluster), before)
            return Outcome(self.rows(self.take_turns(cluster)))

    def _say_memory(self, now: Mapping[str, _Memory], before: Mapping[str, _Memory]) -> None:
        """Says what each shard takes more since then, and how much of that is the optimizer's."""
        kept = 3 * self.size / max(1, len(now))  # weights and moments
        for name, memory in now.items():
            own, shared = (memory[key] - before[name][key] for key in ("RssAnon", "RssShmem"))
            say(
                f"{name}: {own / 1e6:.1f} MB more, of which weights and moments take "
                f"{kept / 1e6:.1f} with equal shares, and {shared / 1e6:.1f} MB in arenas"
            )


def _memory_of_shards(cluster: Cluster) -> dict[str, _Memory]:
    shards = [*cluster.shards, *(cluster.nodes if cluster.shape.local else ())]
    servers = [cluster.server(name) for name in shards]
    return {server.name: memory_of(server.process.pid) for server in servers}
