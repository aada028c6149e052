"""Defines what workers exchange before they connect, and computes the nodes from it."""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thalweg._config import ConfigError


@dataclass(frozen=True)
class Tensor:
    """A parameter that takes part in the training."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Introduction:
    """A worker's report about itself; reports are listed in order of rank."""

    host: str
    sidecar: str  # as configured; empty: one must be started
    running: str  # sidecar of an earlier attach() that still serves this worker
    aggregators: tuple[str, ...]
    job: str
    codec: str
    chunk_bytes: int
    node_reduce: str
    timeout: float
    model: tuple[Tensor, ...]
    problem: str  # why this worker cannot take part; empty if it can


@dataclass(frozen=True)
class Placement:
    node: int
    num_nodes: int
    local_rank: int
    ranks: tuple[int, ...]  # ranks in the job of this node's workers

    @property
    def local_size(self) -> int:
        return len(self.ranks)


@functools.cache
def host_id() -> str:
    """Returns an identity of this machine that is unique also where host names repeat."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}"


def check(workers: Sequence[Introduction]) -> None:
    """Raises the same error on every worker when they cannot train together."""
    for rank, worker in enumerate(workers):
        if worker.problem:
            raise ConfigError(f"thalweg: rank {rank}: {worker.problem}")
    for rank, worker in enumerate(workers):
        _check_same_model(workers[0].model, worker.model, rank)
        for setting in ("codec", "chunk_bytes", "node_reduce", "timeout"):
            ours, theirs = getattr(workers[0], setting), getattr(worker, setting)
            if ours != theirs:
                raise ConfigError(
                    f"thalweg: {setting} is {ours} on rank 0 but {theirs} on rank {rank}: "
                    "it must be the same on all workers"
                )
    nodes = {(w.host, w.sidecar) for w in workers}
    started = [workers[rank] for rank in starters(workers)]
    without = [w for w in started if not w.aggregators]
    if len(nodes) > 1 and without:
        host = without[0].host.partition("/")[0]
        raise ConfigError(
            f"thalweg: the workers form {len(nodes)} nodes, but {host} has no aggregator to meet "
            "the others at: set THALWEG_AGGREGATORS to host:port of every aggregator on all "
            "workers, or THALWEG_SIDECAR to the socket of each node's sidecar"
        )


def starters(workers: Sequence[Introduction]) -> dict[int, list[int]]:
    """Returns the ranks that must start a sidecar, each with all the ranks that will use it.

    A sidecar that already serves all of them is used again.
    """
    hosts: dict[str, list[int]] = {}
    for rank, worker in enumerate(workers):
        if not worker.sidecar:
            hosts.setdefault(worker.host, []).append(rank)
    result = {}
    for ranks in hosts.values():
        running = {workers[rank].running for rank in ranks}
        if running == {""} or len(running) > 1:
            result[ranks[0]] = ranks
    return result


def place(sidecars: Sequence[tuple[str, str]], rank: int) -> Placement:
    """Groups workers with the same (host, sidecar) into nodes, ordered by their lowest rank."""
    nodes: dict[tuple[str, str], list[int]] = {}
    for other, key in enumerate(sidecars):
        nodes.setdefault(key, []).append(other)
    members = nodes[sidecars[rank]]
    return Placement(
        node=list(nodes).index(sidecars[rank]),
        num_nodes=len(nodes),
        local_rank=members.index(rank),
        ranks=tuple(members),
    )


def _check_same_model(first: tuple[Tensor, ...], other: tuple[Tensor, ...], rank: int) -> None:
    for index, (ours, theirs) in enumerate(zip(first, other, strict=False)):
        if ours != theirs:
            raise ValueError(
                f"thalweg: the models differ at parameter {index}: {ours} on rank 0, "
                f"{theirs} on rank {rank}"
            )
    if len(first) != len(other):
        index = min(len(first), len(other))
        more, which = (first, 0) if len(first) > len(other) else (other, rank)
        raise ValueError(
            f"thalweg: the models differ: rank 0 has {len(first)} parameters, rank {rank} has "
            f"{len(other)}; only rank {which} has {more[index]}"
        )
