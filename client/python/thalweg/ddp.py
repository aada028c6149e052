"""Thalweg for DistributedDataParallel: gradients are averaged by sidecars and aggregators.

ddp_model = DistributedDataParallel(model)
state = thalweg.ddp.attach(ddp_model, thalweg.PowerSGD(rank=4))
...train as before...
print(state.summary())
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import weakref
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thalweg import _C, _binaries, _config, _model, _processes, _topology
from thalweg._config import Config
from thalweg._state import State
from thalweg._topology import Introduction
from thalweg.codecs import Codec
from thalweg.policy import Policy

_T = TypeVar("_T")
_SUN_PATH_MAX = 107

_states: weakref.WeakKeyDictionary[DistributedDataParallel, State] = weakref.WeakKeyDictionary()


def attach(
    ddp_model: DistributedDataParallel,
    codec: Codec | Policy | str | None = None,
    *,
    timeout: float | None = None,
    chunk_bytes: int | None = None,
) -> State:
    """Makes `ddp_model` average its gradients through Thalweg. Call it on all workers.

    Without THALWEG_SIDECAR a sidecar is started on this machine; it leaves with its last worker.
    `codec` says how fp32 gradients cross the network: one of thalweg.codecs, a Policy where not all
    tensors take the same, or the text of either. Embeddings are not compressed to factors unless a
    rule says so. No wait takes longer than `timeout` seconds. `chunk_bytes` of gradient travel
    together; by default the links decide. Arguments left out come from the environment.

    Raises on all workers, saying what is wrong: ValueError (settings or models differ),
    ConnectionError, TimeoutError (workers are missing), RuntimeError, TypeError (not a DDP module).
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"thalweg: attach() got a {type(ddp_model).__name__}, expected DistributedDataParallel"
        )
    problem = ""
    try:
        config = Config.from_env().override(codec, timeout, chunk_bytes)
        config = config._replace(codec=_model.spare_embeddings(ddp_model, config.codec))
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
    workers = _gather(me, group)
    _topology.check(workers)
    rank = dist.get_rank(group)
    sidecar = _find_sidecar(workers, rank, group)
    place = _topology.place(
        [(w.host, path) for w, path in zip(workers, sidecar, strict=True)], rank
    )

    state, error = None, None
    try:
        session = _C.Session(
            sidecar_path=sidecar[rank],
            job=workers[0].job,
            rank=rank,
            world_size=len(workers),
            node=place.node,
            num_nodes=place.num_nodes,
            node_name=socket.gethostname(),
            local_rank=place.local_rank,
            local_size=place.local_size,
            codec=me.codec,
            chunk_bytes=me.chunk_bytes,
            timeout=me.timeout,
        )
        state = State(
            session,
            job=workers[0].job,
            codec=me.codec,
            sidecar=sidecar[rank],
            ours=not me.sidecar,
            place=place,
        )
        session.attach(ddp_model.reducer, _model.parameters(ddp_model))
    except Exception as failure:  # noqa: BLE001 - all workers must hear of it before it is raised
        error = failure
    try:
        _raise_together(error, group)
    except Exception:
        if state is not None:
            state.close()
        raise
    assert state is not None
    _states[ddp_model] = state
    return state


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


def _raise_together(error: Exception | None, group: dist.ProcessGroup) -> None:
    """Raises on all workers if it does on one: the own error first, else the first other's."""
    errors = _gather("" if error is None else str(error), group)
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text:
            raise RuntimeError(f"thalweg: rank {rank}: {text.removeprefix('thalweg: ')}")
