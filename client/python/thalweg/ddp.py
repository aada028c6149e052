"""Thalweg for DistributedDataParallel: gradients are averaged by sidecars and aggregators.

ddp_model = DistributedDataParallel(model)
state = thalweg.ddp.attach(ddp_model, thalweg.PowerSGD(rank=4))
...train as before...
print(state.summary())
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from thalweg import (
    _C,
    _collectives,
    _config,
    _left_behind,
    _left_out,
    _model,
    _precision,
    _process_group,
    _rendezvous,
    _resuming,
    _shards,
    _starting,
    _topology,
)
from thalweg._config import Config, Network
from thalweg._shards import Shards
from thalweg._state import Member, State
from thalweg._topology import Introduction, Placement
from thalweg.codecs import Codec
from thalweg.node import Node
from thalweg.node import join as join_node
from thalweg.policy import Policy

_log = logging.getLogger("thalweg")

_states: weakref.WeakKeyDictionary[DistributedDataParallel, State] = weakref.WeakKeyDictionary()
# What is to be loaded when a module is attached.
_saved: weakref.WeakKeyDictionary[DistributedDataParallel, Mapping[str, Any]] = (
    weakref.WeakKeyDictionary()
)
_resuming.install()


def attach(
    ddp_model: DistributedDataParallel,
    codec: Codec | Policy | str | None = None,
    *,
    timeout: float | None = None,
    step_timeout: float | str | None = None,
    chunk_bytes: int | None = None,
    node_reduce: str | None = None,
    local_shards: str | bool | None = None,
) -> State:
    """Makes `ddp_model` average its gradients through Thalweg. Call it on all workers.

    All its parameters must be on the CPU, or all on one GPU. Without THALWEG_SIDECAR a sidecar is
    started on this machine; it leaves with its last worker.
    `codec` says how fp32 gradients cross the network: one of thalweg.codecs, a Policy where not all
    tensors take the same, or the text of either. Embeddings are not compressed to factors, nor
    small tensors lossily, unless a rule says so. A process that shows no sign of life for `timeout`
    seconds fails the job. One that is alive may come `step_timeout` seconds late to a step, because
    it evaluates or writes a checkpoint; "auto" is the process group's timeout.
    `chunk_bytes` of gradient travel together; by default the links decide. `node_reduce` says who
    sums the gradients of a node: "sidecar", or "workers" among themselves, which needs a GPU for
    each (docs/gpu.md, path C). `local_shards` says whether the nodes' sidecars host the shards of a
    job of several nodes: True, False or "auto", those that can. Arguments left out come from the
    environment.

    Raises on all workers, saying what is wrong: ValueError (settings or models differ),
    ConnectionError, TimeoutError (workers are missing), RuntimeError, TypeError (not a DDP module).
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"thalweg: attach() got a {type(ddp_model).__name__}, expected DistributedDataParallel"
        )
    problem = ""
    try:
        config = Config.from_env().override(
            codec=codec,
            timeout=timeout,
            step_timeout=step_timeout,
            chunk_bytes=chunk_bytes,
            node_reduce=node_reduce,
            local_shards=local_shards,
        )
        network = Network.from_env()
        config = config._replace(codec=_model.add_exceptions(ddp_model, config.codec))
        problem = _model.why_not(ddp_model)
        if ddp_model in _states:
            problem = (
                "thalweg is attached to this module already: build a new DistributedDataParallel"
            )
    except _config.ConfigError as error:
        config, network = Config.from_env({}), Network.from_env({})
        problem = str(error)  # the others must hear of it as well
    running, listens = _running_sidecar()
    introduction = Introduction(
        host=_topology.host_id(),
        sidecar=config.sidecar,
        running=running,
        running_listens=listens,
        aggregators=config.aggregators,
        job=f"{config.job or 'job'}-{secrets.token_hex(4)}",
        secret=secrets.token_hex(32),
        codec=config.codec,
        chunk_bytes=config.chunk_bytes,
        local_shards=config.local_shards,
        node_reduce=config.node_reduce,
        timeout=config.timeout,
        step_timeout=config.step_timeout or _group_timeout(ddp_model),
        model=_model.describe(ddp_model),
        problem=problem,
    )
    return _attach(ddp_model, introduction, network)


def state_of(ddp_model: DistributedDataParallel) -> State | None:
    """The state of a module that is attached, be it by the environment; None: it is not.

    The environment attaches a module in its first training step: until then it is None.
    """
    return _states.get(ddp_model)


def load_state_dict(ddp_model: DistributedDataParallel, state_dict: Mapping[str, Any]) -> None:
    """Does State.load_state_dict, also for a module that the environment has not attached yet: then
    it is done when that happens.
    """
    state = _states.get(ddp_model)
    if state is None:
        _saved[ddp_model] = state_dict
    else:
        state.load_state_dict(state_dict)


def _attach(ddp_model: DistributedDataParallel, me: Introduction, network: Network) -> State:
    group = ddp_model.process_group
    _rendezvous.await_all(group, me.step_timeout)
    meeting = _collectives.Meeting.of(group, me.timeout)
    rank = meeting.rank
    workers = _topology.introduce(me, rank, lambda value: _collectives.gather(value, meeting))
    _topology.check(workers)
    sidecars = _starting.find_sidecars(workers, rank, network, meeting)
    place = _topology.place(
        [(w.host, path) for w, path in zip(workers, sidecars, strict=True)], rank
    )

    with _shards.offered(workers, place, sidecars[rank], meeting) as shards:
        session = _collectives.together(
            lambda: _connect(ddp_model, workers, sidecars[rank], place, shards), meeting
        )
    try:
        member = _collectives.together(lambda: _serve(ddp_model, workers, session, place), meeting)
    except Exception:
        if session is not None:
            session.close()
        raise
    assert member is not None
    if session is not None:
        _precision.watch(session)
    state = State(
        member,
        keeper=session if place.local_rank == 0 else None,
        job=workers[0].job,
        codec=me.codec,
        sidecar=sidecars[rank],
        ours=not me.sidecar,
        listens=_topology.may_host(workers),
        shards=str(shards),
        place=place,
        left_out=_left_out.find(me.codec, me.model, place.num_nodes),
        workers=len(workers),
    )
    _states[ddp_model] = state
    if state.rides:
        _resuming.join(ddp_model, state, meeting)
    if (saved := _saved.pop(ddp_model, None)) is not None:
        state.load_state_dict(saved)
    if place.local_rank == 0:
        for remark in state._left_out.remarks:
            _log.warning("job %s: %s", state.job, remark)
    compresses = place.num_nodes > 1 and not state._left_out.everything
    owner = _left_behind.Owner(state.job, me.codec, compresses)
    for remark in _left_behind.own(_model.parameters(ddp_model), owner) if rank == 0 else ():
        _log.warning("job %s: %s", state.job, remark)
    if session is not None and rank == 0:
        warning = _shards.warning(
            shards, session.num_shards(), place.num_nodes, workers[0].local_shards
        )
        if warning:
            _log.warning("job %s: %s", state.job, warning)
    where = f", {state.shards}" if state.shards else ""
    _log.info(
        "job %s: rank %d, codec %s, path %s%s", state.job, rank, state.codec, state.path, where
    )
    return state


def _group_timeout(ddp_model: DistributedDataParallel) -> float:
    """Returns how many seconds torch's own collectives of these gradients would wait."""
    number = _model.cuda_device(ddp_model)
    device = torch.device("cpu") if number is None else torch.device("cuda", number)
    try:
        timeout = ddp_model.process_group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # MPI's has none
        timeout = default_pg_timeout
    return float(min(timeout.total_seconds(), _config.MAX_TIMEOUT))


def _by_workers(workers: Sequence[Introduction], place: Placement) -> bool:
    """Returns whether the workers of each node reduce among themselves; false without any peer."""
    return workers[0].node_reduce == "workers" and place.num_nodes < len(workers)


def _connect(
    ddp_model: DistributedDataParallel,
    workers: Sequence[Introduction],
    sidecar: str,
    place: Placement,
    shards: Shards,
) -> _C.Session | None:
    """This worker's session; None: its node's leader has one for it."""
    leaders_only = _by_workers(workers, place)
    if leaders_only and place.local_rank != 0:
        return None
    try:
        return _C.Session(
            sidecar_path=sidecar,
            job=workers[0].job,
            rank=place.node if leaders_only else place.ranks[place.local_rank],
            world_size=place.num_nodes if leaders_only else len(workers),
            node=place.node,
            num_nodes=place.num_nodes,
            node_name=socket.gethostname(),
            local_rank=place.local_rank,
            local_size=1 if leaders_only else place.local_size,
            codec=workers[0].codec,
            chunk_bytes=workers[0].chunk_bytes,
            timeout=workers[0].timeout,
            step_timeout=workers[0].step_timeout,
            cuda_device=_model.cuda_device(ddp_model),
            shards=list(shards.addresses),
            hosts=list(shards.hosts),
            secret=workers[0].secret,
        )
    except ConnectionError as error:
        raise type(error)(f"{error}{shards.hint(str(error), place.node)}") from None


def _serve(
    ddp_model: DistributedDataParallel,
    workers: Sequence[Introduction],
    session: _C.Session | None,
    place: Placement,
) -> Member:
    """Registers the communication hook."""
    if _by_workers(workers, place):
        first = workers[0]
        node = Node(first.job, place, len(workers), first.timeout, first.step_timeout)
        return join_node(ddp_model, node, session)
    assert session is not None
    session.attach(ddp_model.reducer, _model.parameters(ddp_model))
    return session


def _running_sidecar() -> tuple[str, bool]:
    """A sidecar that an earlier attach() of this process started and still uses; whether it listens
    for other nodes.
    """
    for state in _states.values():
        ours = state._ours and state._pid == os.getpid()
        if ours and not state.closed and state.status() is None:
            return state.sidecar, state._listens
    return _process_group.running_sidecar()
