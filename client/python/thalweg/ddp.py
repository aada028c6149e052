"""Thalweg for DistributedDataParallel: gradients are averaged by sidecars and aggregators.

    ddp_model = DistributedDataParallel(model)
    state = thalweg.ddp.attach(ddp_model, thalweg.PowerSGD(rank=4))
    ...  # train as before
    print(state.summary())

docs/zero_code.md has the way without a line of code.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from thalweg import _C
from thalweg._attach import _left_behind, _left_out, _model, _remarks, _residuals, _resuming
from thalweg._attach._state import Member, State
from thalweg._c10d import _process_group
from thalweg._c10d._process_group import World
from thalweg._job import _collectives, _member, _rendezvous, _shards
from thalweg._job._member import Job
from thalweg._job._topology import Introduction
from thalweg._settings import _config
from thalweg._settings._config import Config, JobArguments, Network
from thalweg._torch import _precision
from thalweg.codecs import Codec
from thalweg.node import Node
from thalweg.node import join as join_node
from thalweg.policy import Policy

__all__ = ["State", "attach", "load_state_dict", "state_of"]

_log = logging.getLogger("thalweg")

_states: weakref.WeakKeyDictionary[DistributedDataParallel, State] = weakref.WeakKeyDictionary()
# What is to be loaded when a module is attached.
_saved: weakref.WeakKeyDictionary[DistributedDataParallel, Mapping[str, Any]] = (
    weakref.WeakKeyDictionary()
)
_resuming.install()


class _Guest:
    """A module's part in the job of its process group, which only the group itself ends."""

    def __init__(self, session: _C.Session) -> None:
        self.stats = session.stats
        self.path = session.path
        self.placement = session.placement
        self.lost_nodes = session.lost_nodes
        self.status = session.status

    def close(self) -> None:
        """Does nothing: other modules and collectives use the session."""


def attach(
    ddp_model: DistributedDataParallel,
    codec: Codec | Policy | str | None = None,
    *,
    timeout: float | None = None,
    step_timeout: float | str | None = None,
    chunk_bytes: int | None = None,
    node_reduce: str | None = None,
    local_shards: str | bool | None = None,
    residuals: str | os.PathLike[str] | None = None,
    min_nodes: int | None = None,
) -> State:
    """Makes `ddp_model` average its gradients through Thalweg. Call it on all workers.

    All its parameters must be on the CPU, or all on one GPU. Without THALWEG_SIDECAR a sidecar is
    started on this machine; it leaves with its last worker. A module of the default process group
    joins the job of that where the group is one of the back end "thalweg" and was made with the
    same settings (docs/c10d.md).

    An argument that is None comes from the environment. Where that says nothing either, it is the
    default below.

    Args:
        ddp_model: the module, on all workers the same.
        codec: how float32 gradients cross the network: one of thalweg.codecs, a Policy where not
            all tensors take the same, or the text of either. Embeddings are not compressed to
            factors, nor small tensors lossily, unless a rule says so. Default: "fp32".
        timeout: seconds, more than 0 and at most 86400. A process that shows no sign of life for so
            long fails the job. Default: 30.
        step_timeout: seconds that a worker which is alive may come late to a step, because it
            evaluates or writes a checkpoint. "auto", the default, is the process group's timeout.
        chunk_bytes: bytes of gradient that travel together, 4096 to 4194304. By default the links
            decide.
        node_reduce: who sums the gradients of a node: "sidecar", the default, or "workers" among
            themselves, which needs a GPU for each (docs/gpu.md, path C).
        local_shards: whether the nodes' sidecars host the shards of a job of several nodes: True,
            False or "auto", the default: those that can.
        residuals: a folder for what this node holds back of gradients (docs/compression.md,
            checkpoints). Default: none.
        min_nodes: nodes with which the job goes on when others are lost (docs/faults.md, lost
            nodes). 0, the default: it needs all. With node_reduce "workers", nodes must have
            equally many workers then.

    Returns:
        The module's state in the job, on this worker.

    Raises:
        ValueError: settings or models differ between workers, or one is malformed. This and the
            next three are raised on all workers, saying what is wrong.
        ConnectionError: a sidecar or shard cannot be reached.
        TimeoutError: workers are missing.
        RuntimeError: something else keeps the job from beginning.
        TypeError: `ddp_model` is not a DistributedDataParallel module.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"thalweg: attach() got a {type(ddp_model).__name__}, expected the model in "
            "torch.nn.parallel.DistributedDataParallel, after init_process_group()"
        )
    problem = ""
    try:
        config = Config.from_env().override(
            JobArguments(
                codec=codec,
                timeout=timeout,
                step_timeout=step_timeout,
                chunk_bytes=chunk_bytes,
                node_reduce=node_reduce,
                local_shards=local_shards,
                residuals=residuals,
                min_nodes=min_nodes,
            )
        )
        network = Network.from_env()
        config = config._replace(codec=_model.add_exceptions(ddp_model, config.codec))
        problem = _model.why_not(ddp_model, config.min_nodes)
        if ddp_model in _states:
            problem = (
                "thalweg is attached to this module already: build a new DistributedDataParallel"
            )
    except _config.ConfigError as error:
        config, network = Config.from_env({}), Network.from_env({})
        problem = str(error)  # the others must hear of it as well
    world = _process_group.world_of(ddp_model.process_group)
    if not config.step_timeout:
        number = _model.cuda_device(ddp_model)
        limit = _process_group.timeout_of(ddp_model.process_group, number)
        config = config._replace(step_timeout=limit)
    model = _model.describe(ddp_model)
    me = _member.introduction(
        config,
        problem,
        running=_running_sidecar(),
        model=model,
        apart=world.why_apart(config, model, _model.cuda_device(ddp_model)) if world else "",
    )
    return _attach(ddp_model, me, network, world, config.residuals)


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


def close_all() -> None:
    """Closes the states of all modules, because their process group is about to end."""
    for state in list(_states.values()):
        state.close()


def _attach(
    ddp_model: DistributedDataParallel,
    me: Introduction,
    network: Network,
    world: World | None,
    residuals: str,
) -> State:
    group = ddp_model.process_group
    _rendezvous.await_all(group, me.step_timeout, me.timeout)
    meeting = _collectives.Meeting.of(group, me.timeout)
    rank = meeting.rank
    workers = _member.meet(me, meeting)
    job = _join(workers, network, meeting, world, _model.cuda_device(ddp_model))
    session, place = job.session, job.place
    try:
        member = _collectives.together(lambda: _serve(ddp_model, job, world), meeting)
    except Exception:
        if session is not None and not _is_guest(job, world):
            session.close()
        raise
    assert member is not None
    if session is not None:
        _precision.watch(session)
    has_files = me.residuals and place.num_nodes > 1 and _left_behind.fits_files(me.codec)
    keeper = None
    if session is not None and place.local_rank == 0 and has_files:
        keeper = _residuals.keeper_of(ddp_model, job, meeting, residuals)
    state = State(
        member,
        keeper=session if place.local_rank == 0 else None,
        job=job.name,
        codec=me.codec,
        sidecar=job.sidecar,
        starts_sidecars=job.starts_sidecars,
        listens=job.listens,
        shards=str(job.shards),
        place=place,
        left_out=_left_out.find(me.codec, me.model, place.num_nodes),
        workers=len(workers),
        rides=place.num_nodes > 1 and (_left_behind.counts_steps(me.codec) or has_files),
        has_residual_files=has_files,
        residuals=keeper,
        min_nodes=me.min_nodes,
        counted=place.num_nodes if job.by_workers else 0,
    )
    _states[ddp_model] = state
    if _is_guest(job, world):
        _process_group.call_at_end(group, state._finalizer)
    _resuming.join(ddp_model, state, meeting, me.step_timeout)
    if (saved := _saved.pop(ddp_model, None)) is not None:
        state.load_state_dict(saved)
    _remarks.remark(ddp_model, state, me, rank)
    if session is not None and rank == 0:
        warning = _shards.warning(
            job.shards, session.num_shards(), place.num_nodes, workers[0].local_shards
        )
        if warning:
            _log.warning("job %s: %s", state.job, warning)
    where = f", {state.shards}" if state.shards else ""
    _log.info(
        "job %s: rank %d, codec %s, path %s%s", state.job, rank, state.codec, state.path, where
    )
    return state


def _join(
    workers: tuple[Introduction, ...],
    network: Network,
    meeting: _collectives.Meeting,
    world: World | None,
    cuda_device: int | None,
) -> Job:
    """Returns the job of the module's process group, or else a new one, after saying why."""
    apart = next((worker.apart for worker in workers if worker.apart), "")
    if world is not None and not apart:
        world.is_taken = True
        return world.job
    job = _member.join(workers, network, meeting, cuda_device)
    if world is not None and meeting.rank == 0:
        text = "job %s: a job of its own beside %s of the process group: %s"
        _log.warning(text, job.name, world.job.name, apart)
    return job


def _serve(ddp_model: DistributedDataParallel, job: Job, world: World | None) -> Member:
    """Registers the communication hook."""
    if job.by_workers:
        first = job.workers[0]
        node = Node(first.job, job.place, len(job.workers), first.timeout, first.step_timeout)
        return join_node(ddp_model, _model.parameters(ddp_model), node, job.session)
    assert job.session is not None
    job.session.attach(ddp_model.reducer, _model.parameters(ddp_model))
    return _Guest(job.session) if _is_guest(job, world) else job.session


def _is_guest(job: Job, world: World | None) -> bool:
    """Returns whether a module has joined the job of its process group."""
    return world is not None and job is world.job


def _running_sidecar() -> tuple[str, bool]:
    """A sidecar that an earlier attach() of this process started and still uses; whether it listens
    for other nodes.
    """
    for state in _states.values():
        ours = state._starts_sidecars and state._pid == os.getpid()
        if ours and not state.closed and state.status() is None:
            return state.sidecar, state._listens
    return _process_group.running_sidecar()
