"""Defines what workers exchange before they connect, and computes the nodes from it."""

from __future__ import annotations

import functools
import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thalweg._settings._config import ConfigError

# The fields of an introduction that must be equal on all workers. Where `min_nodes` differ, so do
# the `local_shards` that follow from them: it comes first.
_SETTINGS = (
    "codec",
    "chunk_bytes",
    "min_nodes",
    "local_shards",
    "node_reduce",
    "residuals",
    "timeout",
    "step_timeout",
)

_NO_HOSTS = (
    "THALWEG_LOCAL_SHARDS is 0 or THALWEG_MIN_NODES is set: set the first to auto and leave the "
    "second out, set THALWEG_AGGREGATORS to host:port of every aggregator on all workers, or "
    "THALWEG_SIDECAR to the socket of each node's sidecar"
)
NEEDS_DISKS = (
    "snapshots need aggregators, because sidecars keep none: name these on all workers in "
    "THALWEG_AGGREGATORS, or to each sidecar that you start in --aggregators, or leave "
    "snapshot_every= and THALWEG_SNAPSHOT_EVERY out"
)


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
    running_listens: bool  # it can serve a shard to other nodes
    aggregators: tuple[str, ...]
    job: str
    secret: str = field(repr=False)  # rank 0's is that of the job; never in logs or messages
    codec: str
    chunk_bytes: int
    local_shards: str
    node_reduce: str
    timeout: float
    step_timeout: float
    model: tuple[Tensor, ...]  # empty in a report whose digest says enough
    problem: str  # why this worker cannot take part; empty if it can
    digest: str = ""  # of the model
    min_nodes: int = 0  # with which the job goes on when others are lost; 0: all
    residuals: bool = False  # what its node holds back of gradients is written to files
    apart: str = ""  # why the session of its process group cannot serve it; empty if it can
    needs_disks: bool = False  # its snapshots do, and only because of them sidecars host no shards


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


def host_name(host: str) -> str:
    """Returns the name in the identity of a machine."""
    return host.partition("/")[0]


def introduce(
    me: Introduction, rank: int, exchange: Callable[[Any], list[Any]]
) -> list[Introduction]:
    """Returns the reports of all workers, by rank, without models where all are the same; otherwise
    with rank 0's and that of the first that differs, for check(). `exchange` gathers a value of all
    workers: their full lists of parameters would grow with the square of their number.
    """
    text = f"{len(me.model)} {me.model!r}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    workers: list[Introduction] = exchange(replace(me, model=(), digest=digest))
    others = [r for r, worker in enumerate(workers) if worker.digest != workers[0].digest]
    if others:
        models = exchange(me.model if rank in (0, others[0]) else ())
        known = {workers[r].digest: models[r] for r in (0, others[0])}
        workers = [replace(worker, model=known.get(worker.digest, ())) for worker in workers]
    return workers


def check(workers: Sequence[Introduction]) -> None:
    """Raises the same error on every worker when they cannot train together."""
    for rank, worker in enumerate(workers):
        if worker.problem:
            raise ConfigError(f"thalweg: rank {rank}: {worker.problem}")
    for rank, worker in enumerate(workers):
        _check_same_model(workers[0].model, worker.model, rank)
        for setting in _SETTINGS:
            ours, theirs = getattr(workers[0], setting), getattr(worker, setting)
            if ours != theirs:
                raise ConfigError(
                    f"thalweg: {setting} is {ours} on rank 0 but {theirs} on rank {rank}: "
                    "it must be the same on all workers"
                )
    _check_node_sizes(workers)
    without = [workers[r] for r in starters(workers) if not workers[r].aggregators]
    if workers[0].local_shards == "0" and without and _count_nodes(workers) > 1:
        raise ConfigError(
            f"thalweg: the workers form {_count_nodes(workers)} nodes, but "
            f"{host_name(without[0].host)} has no aggregator to meet the others at, and "
            f"{NEEDS_DISKS if workers[0].needs_disks else _NO_HOSTS}"
        )


def may_host(workers: Sequence[Introduction]) -> bool:
    """Returns whether the sidecars may host the job's shards; a single node needs none."""
    return workers[0].local_shards != "0" and _count_nodes(workers) > 1


def _count_nodes(workers: Sequence[Introduction]) -> int:
    return len(_node_sizes(workers))


def _node_sizes(workers: Sequence[Introduction]) -> Counter[tuple[str, str]]:
    """Returns how many workers each node has."""
    return Counter((worker.host, worker.sidecar) for worker in workers)


def _check_node_sizes(workers: Sequence[Introduction]) -> None:
    """Raises ConfigError where a lost node would make the mean wrong: workers that reduce among
    themselves divide by the mean size of all nodes, which is not that of the nodes that are left.
    """
    first, sizes = workers[0], _node_sizes(workers)
    may_lose = 0 < first.min_nodes < len(sizes)
    if first.node_reduce != "workers" or not may_lose or len(set(sizes.values())) == 1:
        return
    least, most = min(sizes, key=lambda key: sizes[key]), max(sizes, key=lambda key: sizes[key])
    raise ConfigError(
        f"thalweg: node_reduce is workers and min_nodes is {first.min_nodes}, but "
        f"{host_name(least[0])} has {sizes[least]} of the workers and {host_name(most[0])} "
        f"{sizes[most]}: when a node is lost, the mean over the others would be wrong; expected as "
        "many workers on each node, or node_reduce sidecar"
    )


def starters(workers: Sequence[Introduction]) -> dict[int, list[int]]:
    """Returns the ranks that must start a sidecar, each with all the ranks that will use it.

    A sidecar that already serves all of them is used again, unless it listens for other nodes and
    this job does not need it to, or the other way round.
    """
    listens = may_host(workers)
    hosts: dict[str, list[int]] = {}
    for rank, worker in enumerate(workers):
        if not worker.sidecar:
            hosts.setdefault(worker.host, []).append(rank)
    result = {}
    for ranks in hosts.values():
        running = {
            workers[rank].running if workers[rank].running_listens == listens else ""
            for rank in ranks
        }
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


def _differing_arguments(first: str, other: str, rank: int) -> str:
    """Says in what two descriptions of arguments differ, whose parts stand between semicolons."""
    ours, theirs = first.split("; "), other.split("; ")
    if len(ours) == len(theirs):
        pairs = [(one, two) for one, two in zip(ours, theirs, strict=True) if one != two]
    else:
        pairs = [
            (
                ", ".join(part for part in ours if part not in theirs) or "none of these",
                ", ".join(part for part in theirs if part not in ours) or "none of these",
            )
        ]
    texts = [f"{one} on rank 0 but {two} on rank {rank}" for one, two in pairs]
    return f"the optimizers' arguments differ: {', '.join(texts)}"


def _check_same_model(first: tuple[Tensor, ...], other: tuple[Tensor, ...], rank: int) -> None:
    for index, (ours, theirs) in enumerate(zip(first, other, strict=False)):
        if ours != theirs and not ours.dtype and not theirs.dtype:
            raise ValueError(f"thalweg: {_differing_arguments(ours.name, theirs.name, rank)}")
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
