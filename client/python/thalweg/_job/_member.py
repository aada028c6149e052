"""Makes a worker a member of a job: the workers meet, find their sidecars and shards, and connect.

All workers of the job call these functions together.
"""

from __future__ import annotations

import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thalweg import _C
from thalweg._job import _collectives, _shards, _starting, _topology
from thalweg._job._collectives import Meeting
from thalweg._job._shards import Shards
from thalweg._job._topology import Introduction, Placement, Tensor
from thalweg._settings._config import Config, ConfigError, Network

_NO_HOSTS = (
    "nodes are to host shards (THALWEG_LOCAL_SHARDS is 1), but the job is to go on when one is "
    "lost (THALWEG_MIN_NODES): leave one of them out"
)

# Whether the job of each ends when a node is lost.
_sessions: weakref.WeakKeyDictionary[_C.Session, bool] = weakref.WeakKeyDictionary()
_sessions_lock = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A job as one of its workers sees it."""

    workers: tuple[Introduction, ...]  # by rank; the settings of all are rank 0's
    place: Placement
    nodes: tuple[int, ...]  # by rank: the number of its node
    sidecar: str  # of this worker
    shards: Shards
    session: _C.Session | None  # None: the leader of this worker's node has one for it

    @property
    def name(self) -> str:
        return self.workers[0].job

    @property
    def secret(self) -> str:
        return self.workers[0].secret

    @property
    def starts_sidecars(self) -> bool:
        """Whether this worker's sidecar is the job's own, and not one of THALWEG_SIDECAR."""
        return not self.workers[self.place.ranks[self.place.local_rank]].sidecar

    @property
    def by_workers(self) -> bool:
        return _by_workers(self.workers, self.place)

    @property
    def listens(self) -> bool:
        """Whether the sidecars may serve shards to other nodes."""
        return _topology.may_host(self.workers)


def introduction(
    config: Config,
    problem: str,
    *,
    running: tuple[str, bool] = ("", False),
    model: tuple[Tensor, ...] = (),
    apart: str = "",
    secret: str = "",
) -> Introduction:
    """Returns what this worker tells the others; `running` is its sidecar of an earlier job, and
    whether that listens for other nodes. `config.step_timeout` must be in seconds, not 0. The job
    has a `secret` of its own unless one is given.
    """
    local_shards = config.local_shards
    if config.min_nodes:
        if local_shards == "1":
            problem = problem or _NO_HOSTS
        local_shards = "0"
    return Introduction(
        host=_topology.host_id(),
        sidecar=config.sidecar,
        running=running[0],
        running_listens=running[1],
        aggregators=config.aggregators,
        job=f"{config.job or 'job'}-{secrets.token_hex(4)}",
        secret=secret or secrets.token_hex(32),
        codec=config.codec,
        chunk_bytes=config.chunk_bytes,
        local_shards=local_shards,
        node_reduce=config.node_reduce,
        timeout=config.timeout,
        step_timeout=config.step_timeout,
        model=model,
        problem=problem,
        min_nodes=config.min_nodes,
        residuals=bool(config.residuals),
        apart=apart,
    )


def meet(me: Introduction, meeting: Meeting) -> tuple[Introduction, ...]:
    """Returns what all workers say, by rank. Raises ConfigError or ValueError on all where they
    cannot train together, TimeoutError where some are missing.
    """
    workers = _topology.introduce(
        me, meeting.rank, lambda value: _collectives.gather(value, meeting)
    )
    _topology.check(workers)
    return tuple(workers)


def join(
    workers: tuple[Introduction, ...],
    network: Network,
    meeting: Meeting,
    cuda_device: int | None = None,
    *,
    for_all_collectives: bool = False,
) -> Job:
    """Connects this worker, whose gradients are on that GPU; None: on the CPU.

    `for_all_collectives`: the job does others than the allreduce of gradients. Raises what
    thalweg.ddp.attach() does.
    """
    rank = meeting.rank
    sidecars = _starting.find_sidecars(workers, rank, network, meeting)
    keys = [(worker.host, path) for worker, path in zip(workers, sidecars, strict=True)]
    place = _topology.place(keys, rank)
    offered = _shards.offered(
        workers, place, sidecars[rank], meeting, for_all_collectives=for_all_collectives
    )
    with offered as shards:
        session = _collectives.together(
            lambda: _connect(workers, sidecars[rank], place, shards, cuda_device), meeting
        )
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    nodes = tuple(numbers[key] for key in keys)
    return Job(workers, place, nodes, sidecars[rank], shards, session)


def _by_workers(workers: Sequence[Introduction], place: Placement) -> bool:
    """Returns whether the workers of each node reduce among themselves; false without any peer."""
    return workers[0].node_reduce == "workers" and place.num_nodes < len(workers)


def _connect(
    workers: Sequence[Introduction],
    sidecar: str,
    place: Placement,
    shards: Shards,
    cuda_device: int | None,
) -> _C.Session | None:
    first = workers[0]
    leaders_only = _by_workers(workers, place)
    if leaders_only and place.local_rank != 0:
        return None
    try:
        session = _C.Session(
            sidecar_path=sidecar,
            job=first.job,
            rank=place.node if leaders_only else place.ranks[place.local_rank],
            world_size=place.num_nodes if leaders_only else len(workers),
            node=place.node,
            num_nodes=place.num_nodes,
            node_name=socket.gethostname(),
            local_rank=place.local_rank,
            local_size=1 if leaders_only else place.local_size,
            codec=first.codec,
            chunk_bytes=first.chunk_bytes,
            timeout=first.timeout,
            step_timeout=first.step_timeout,
            cuda_device=cuda_device,
            shards=list(shards.addresses),
            hosts=list(shards.hosts),
            secret=first.secret,
            min_nodes=first.min_nodes,
        )
    except RuntimeError as error:
        if first.needs_disks and "no aggregator" in str(error):
            raise ConfigError(f"thalweg: {_topology.NEEDS_DISKS}") from None
        raise
    except ConnectionError as error:
        text = f"{error}{_shards.question(str(error))}"
        raise type(error)(f"{text}{shards.hint(text, place.node)}") from None
    with _sessions_lock:
        _sessions[session] = first.min_nodes == 0
    return session


def abort_all() -> None:
    """Fails all jobs that this process has joined or is joining, for all their workers.

    Thread-safe.
    """
    _abort(lambda needs_all: True)


def abort_for_lost() -> None:
    """Like abort_all(), but leaves jobs alone that go on without lost nodes."""
    _abort(lambda needs_all: needs_all)


def _abort(is_due: Callable[[bool], bool]) -> None:
    _C.cancel_connects()
    with _sessions_lock:
        sessions = [session for session, needs_all in _sessions.items() if is_due(needs_all)]
    for session in sessions:
        session.abort()
