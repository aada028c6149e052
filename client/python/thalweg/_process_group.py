"""Makes process groups of the back end "thalweg".

The workers meet and connect to their node's sidecar; every group then becomes one of the session's.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from thalweg import _C, _collectives, _config, _shards, _starting, _topology
from thalweg._config import Config, Network
from thalweg._topology import Introduction, Placement

_log = logging.getLogger("thalweg")

_ALL = 1  # number of the group of all workers


@dataclass(frozen=True)
class World:
    """All workers of a job, and this worker's session."""

    session: _C.Session
    nodes: tuple[int, ...]  # by rank: the number of its node
    store: Store
    sidecar: str
    listens: bool
    pid: int


_worlds: list[World] = []  # of the default process group; at most one


def create(options: Any, pg_options: object) -> _C.ProcessGroup:  # noqa: ANN401 - c10d's own type
    """Makes the process group that c10d asks for with `options` (_DistributedBackendOptions).

    All workers of the group call it together; the first group has all workers of the job. Raises
    what thalweg.ddp.attach() raises, and RuntimeError for a group of workers that have not met.
    """
    if pg_options is not None:
        raise RuntimeError(
            'thalweg: the back end "thalweg" takes no pg_options, got '
            f"{type(pg_options).__name__}: the environment has its settings (docs/settings.md)"
        )
    timeout = options.timeout.total_seconds()
    if not options.global_ranks_in_group:
        _worlds[:] = [_meet(options.store, options.group_rank, options.group_size, timeout)]
        number, ranks = _ALL, range(options.group_size)
    else:
        ranks = options.global_ranks_in_group
        number = _number(options, timeout)
    world = _current()
    if world is None:
        raise RuntimeError(
            'thalweg: a group of the back end "thalweg" needs a default process group of it: '
            'call init_process_group("thalweg") first'
        )
    return _C.ProcessGroup(
        world.session,
        number=number,
        rank=options.group_rank,
        nodes=[world.nodes[rank] for rank in ranks],
        name=options.group_id,
        timeout=timeout,
    )


def running_sidecar() -> tuple[str, bool]:
    """As ddp.attach() asks: the sidecar that this process has started for its process group."""
    world = _current()
    if world is None or world.session.status() is not None:
        return "", False
    return world.sidecar, world.listens


def _current() -> World | None:
    return _worlds[0] if _worlds and _worlds[0].pid == os.getpid() else None


def _number(options: Any, timeout: float) -> int:  # noqa: ANN401 - c10d's own type
    """Agrees on the number of a group with its other workers, through its store."""
    key = "thalweg/number"
    world = _current()
    if options.group_rank == 0 and world is not None:
        options.store.set(key, str(_ALL + world.store.add("thalweg/groups", 1)))
    options.store.wait([key], options.timeout)
    return int(options.store.get(key))


def _meet(store: Store, rank: int, size: int, timeout: float) -> World:
    problem = ""
    try:
        config, network = Config.from_env(), Network.from_env()
    except _config.ConfigError as error:
        config, network = Config.from_env({}), Network.from_env({})
        problem = str(error)  # the others must hear of it as well
    me = Introduction(
        host=_topology.host_id(),
        sidecar=config.sidecar,
        running="",
        running_listens=False,
        aggregators=config.aggregators,
        job=f"{config.job or 'job'}-{secrets.token_hex(4)}",
        secret=secrets.token_hex(32),
        codec=config.codec,
        chunk_bytes=config.chunk_bytes,
        local_shards=config.local_shards,
        node_reduce="sidecar",
        timeout=config.timeout,
        step_timeout=config.step_timeout or timeout,
        model=(),
        problem=problem,
    )
    # The others may come as late as the group's own timeout allows.
    meeting = _collectives.Meeting(
        None, "process_group", rank, size, max(config.timeout, timeout / 2), store
    )
    workers = _topology.introduce(me, rank, lambda value: _collectives.gather(value, meeting))
    _topology.check(workers)
    meeting = meeting._replace(timeout=config.timeout)
    sidecars = _starting.find_sidecars(workers, rank, network, meeting)
    keys = [(worker.host, path) for worker, path in zip(workers, sidecars, strict=True)]
    place = _topology.place(keys, rank)
    with _shards.offered(workers, place, sidecars[rank], meeting) as shards:
        session = _collectives.together(
            lambda: _connect(workers, sidecars[rank], place, shards), meeting
        )
    assert session is not None
    _log.info("job %s: rank %d, process group of %d", workers[0].job, rank, size)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return World(
        session,
        tuple(numbers[key] for key in keys),
        store,
        "" if me.sidecar else sidecars[rank],
        _topology.may_host(workers),
        os.getpid(),
    )


def _connect(
    workers: Sequence[Introduction], sidecar: str, place: Placement, shards: _shards.Shards
) -> _C.Session:
    first = workers[0]
    try:
        return _C.Session(
            sidecar_path=sidecar,
            job=first.job,
            rank=place.ranks[place.local_rank],
            world_size=len(workers),
            node=place.node,
            num_nodes=place.num_nodes,
            node_name=socket.gethostname(),
            local_rank=place.local_rank,
            local_size=place.local_size,
            codec=first.codec,
            chunk_bytes=first.chunk_bytes,
            timeout=first.timeout,
            step_timeout=first.step_timeout,
            shards=list(shards.addresses),
            hosts=list(shards.hosts),
            secret=first.secret,
        )
    except ConnectionError as error:
        raise type(error)(f"{error}{shards.hint(str(error), place.node)}") from None
