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
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thalweg import (
    _C,
    _binaries,
    _config,
    _left_out,
    _model,
    _precision,
    _processes,
    _rendezvous,
    _topology,
)
from thalweg._config import Config
from thalweg._state import Member, State
from thalweg._topology import Introduction, Placement
from thalweg.codecs import Codec
from thalweg.node import Node
from thalweg.node import join as join_node
from thalweg.policy import Policy

_log = logging.getLogger("thalweg")
_T = TypeVar("_T")
_Closable = TypeVar("_Closable", _C.Session, Member)
_SUN_PATH_MAX = 107

_states: weakref.WeakKeyDictionary[DistributedDataParallel, State] = weakref.WeakKeyDictionary()


def attach(
    ddp_model: DistributedDataParallel,
    codec: Codec | Policy | str | None = None,
    *,
    timeout: float | None = None,
    chunk_bytes: int | None = None,
    node_reduce: str | None = None,
) -> State:
    """Makes `ddp_model` average its gradients through Thalweg. Call it on all workers.

    All its parameters must be on the CPU, or all on one GPU. Without THALWEG_SIDECAR a sidecar is
    started on this machine; it leaves with its last worker.
    `codec` says how fp32 gradients cross the network: one of thalweg.codecs, a Policy where not all
    tensors take the same, or the text of either. Embeddings are not compressed to factors, nor
    small tensors lossily, unless a rule says so. No wait takes longer than `timeout` seconds.
    `chunk_bytes` of gradient travel together; by default the links decide. `node_reduce` says who
    sums the gradients of a node: "sidecar", or "workers" among themselves, which needs a GPU for
    each (docs/gpu.md, path C). Arguments left out come from the environment.

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
            codec=codec, timeout=timeout, chunk_bytes=chunk_bytes, node_reduce=node_reduce
        )
        config = config._replace(codec=_model.add_exceptions(ddp_model, config.codec))
        problem = _model.why_not(ddp_model)
        if ddp_model in _states:
            problem = (
                "thalweg is attached to this module already: build a new DistributedDataParallel"
            )
    except _config.ConfigError as error:
        config, problem = Config.from_env({}), str(error)  # the others must hear of it as well
    introduction = Introduction(
        host=_topology.host_id(),
        sidecar=config.sidecar,
        running=_running_sidecar(),
        aggregators=config.aggregators,
        job=f"{config.job or 'job'}-{secrets.token_hex(4)}",
        codec=config.codec,
        chunk_bytes=config.chunk_bytes,
        node_reduce=config.node_reduce,
        timeout=config.timeout,
        model=_model.describe(ddp_model),
        problem=problem,
    )
    return _attach(ddp_model, introduction)


def state_of(ddp_model: DistributedDataParallel) -> State | None:
    """The state of a module that is attached, be it by the environment; None: it is not."""
    return _states.get(ddp_model)


def _attach(ddp_model: DistributedDataParallel, me: Introduction) -> State:
    group = ddp_model.process_group
    _await_all(group, me.timeout)
    workers = _gather(me, group)
    _topology.check(workers)
    rank = dist.get_rank(group)
    sidecar = _find_sidecar(workers, rank, group)
    place = _topology.place(
        [(w.host, path) for w, path in zip(workers, sidecar, strict=True)], rank
    )

    session = _together(lambda: _connect(ddp_model, workers, sidecar[rank], place), group)
    try:
        member = _together(lambda: _serve(ddp_model, workers, session, place), group)
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
        sidecar=sidecar[rank],
        ours=not me.sidecar,
        place=place,
        left_out=_left_out.find(me.codec, me.model, place.num_nodes),
    )
    _states[ddp_model] = state
    if place.local_rank == 0:
        for remark in state._left_out.remarks:
            _log.warning("job %s: %s", state.job, remark)
    _log.info("job %s: rank %d, codec %s, path %s", state.job, rank, state.codec, state.path)
    return state


def _await_all(group: dist.ProcessGroup, timeout: float) -> None:
    """Returns when all workers have come to attach(). Raises TimeoutError with the missing ranks.

    What follows uses torch's collectives, which would wait as long as the process group does.
    """
    try:
        store = _rendezvous.default_store()
    except RuntimeError:  # the group is MPI's; torch's collectives then wait on their own terms
        return
    try:
        _rendezvous.gather(
            store,
            f"attach/{group.group_name}",
            "",
            where="attach()",
            rank=dist.get_rank(group),
            world=dist.get_world_size(group),
            timeout=timeout,
        )
    except TimeoutError as error:
        raise TimeoutError(
            f"{error}. All workers must attach, which without code they do in their first training "
            "step: a worker that has no batch at all, or is later than that, cannot take part"
        ) from None


def _by_workers(workers: list[Introduction], place: Placement) -> bool:
    """Returns whether the workers of each node reduce among themselves; false without any peer."""
    return workers[0].node_reduce == "workers" and place.num_nodes < len(workers)


def _connect(
    ddp_model: DistributedDataParallel, workers: list[Introduction], sidecar: str, place: Placement
) -> _C.Session | None:
    """This worker's session; None: its node's leader has one for it."""
    leaders_only = _by_workers(workers, place)
    if leaders_only and place.local_rank != 0:
        return None
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
        cuda_device=_model.cuda_device(ddp_model),
    )


def _serve(
    ddp_model: DistributedDataParallel,
    workers: list[Introduction],
    session: _C.Session | None,
    place: Placement,
) -> Member:
    """Registers the communication hook."""
    if _by_workers(workers, place):
        node = Node(workers[0].job, place, len(workers), workers[0].timeout)
        return join_node(ddp_model, node, session)
    assert session is not None
    session.attach(ddp_model.reducer, _model.parameters(ddp_model))
    return session


def _find_sidecar(workers: list[Introduction], rank: int, group: dist.ProcessGroup) -> list[str]:
    """The socket of every worker's sidecar, by rank, after starting those that are missing."""
    starters = _topology.starters(workers)
    started, error = "", None
    if rank in starters:
        try:
            started = _start_sidecar(workers[rank])
        except (_config.ConfigError, _processes.ServerError, OSError) as failure:
            error = RuntimeError(f"thalweg: {failure}")
    paths = [w.sidecar or w.running for w in workers]
    if starters:
        _raise_together(error, group)
        announced = _gather(started, group)
        for starter, members in starters.items():
            for member in members:
                paths[member] = announced[starter]
    return paths


def _start_sidecar(worker: Introduction) -> str:
    folder = tempfile.mkdtemp(prefix="thalweg-")
    try:
        path = str(Path(folder) / "sidecar.sock")
        if len(os.fsencode(path)) > _SUN_PATH_MAX:
            raise _config.ConfigError(
                f"{path} is longer than the {_SUN_PATH_MAX} bytes of a Unix socket's path: "
                "set TMPDIR to a shorter one"
            )
        argv = [str(_binaries.find(_binaries.SIDECAR)), "--socket", path, "--own-dir"]
        argv += ["--exit-when-idle", "--timeout", f"{worker.timeout:g}"]
        if worker.aggregators:
            argv += ["--aggregators", ",".join(worker.aggregators)]
        server = _processes.Server(
            _binaries.SIDECAR, argv, env=_config.server_environment(log="warn")
        )
        server.wait_ready(worker.timeout)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return path


def _running_sidecar() -> str:
    """A sidecar that an earlier attach() of this process started and still uses."""
    for state in _states.values():
        ours = state._ours and state._pid == os.getpid()
        if ours and not state.closed and state.status() is None:
            return state.sidecar
    return ""


def _gather(value: _T, group: dist.ProcessGroup) -> list[_T]:
    values: list[_T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]  # all_gather_object has filled every place


def _together(make: Callable[[], _Closable | None], group: dist.ProcessGroup) -> _Closable | None:
    """Returns what `make` returns if it has raised on no worker; otherwise raises on all."""
    made, error = None, None
    try:
        made = make()
    except Exception as failure:  # noqa: BLE001 - all workers must hear of it before it is raised
        error = failure
    try:
        _raise_together(error, group)
    except Exception:
        if made is not None:
            made.close()
        raise
    return made


def _raise_together(error: Exception | None, group: dist.ProcessGroup) -> None:
    """Raises on all workers if it does on one: the own error first, else the first other's."""
    errors = _gather("" if error is None else str(error), group)
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text:
            raise RuntimeError(f"thalweg: rank {rank}: {text.removeprefix('thalweg: ')}")
