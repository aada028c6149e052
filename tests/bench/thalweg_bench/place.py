"""Says where a worker of a benchmark runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The place of a worker, and how it reaches the others. Nodes have consecutive ranks."""

    rank: int
    nodes: int
    workers: int  # per node
    sidecar: str
    job: str
    codec: str
    shards: tuple[str, ...] = ()  # addresses, if sidecars host some; otherwise the sidecar knows
    hosts: tuple[int, ...] = ()  # by shard, the node that hosts it, or -1
    secret: str = ""

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers

    @property
    def local_rank(self) -> int:
        return self.rank % self.workers

    @property
    def node(self) -> int:
        return self.rank // self.workers
