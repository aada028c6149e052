"""Sums gradients over copies of shards on other nodes (2-D meshes) in a codec of a session.

The ranks that have the same shards are a job of their own, beside that of the process group. Its
session has a bucket for each unit, whose tensors are the shards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.distributed_c10d import ReduceOp, Work

from thalweg import policy
from thalweg._attach import _left_out
from thalweg._attach._state import State
from thalweg._c10d import _process_group
from thalweg._job import _buckets, _member
from thalweg._job._collectives import Meeting
from thalweg._job._member import Job
from thalweg._job._topology import Introduction
from thalweg._job._topology import Tensor as Described
from thalweg._settings import _checks
from thalweg._settings._config import Config, ConfigError, JobArguments, Network
from thalweg._sharded._comms import Remarks, kind_of
from thalweg._sharded._units import Unit
from thalweg._torch import _nonfinite, _precision

_log = logging.getLogger("thalweg")


class _Done(Work):
    """A collective that has ended."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class CopiesGroup(dist.ProcessGroup):
    """Takes the place of the group over which torch sums the gradients of a unit's copies."""

    def __init__(
        self,
        unit: str,
        exact: dist.ProcessGroup,
        bucket: _buckets.Bucket,
        state: State,
        change: Callable[[], str],
    ) -> None:
        """`state` is that of the bucket's job; `change` says whether the unit's gradients are of
        other parameters than the bucket's.
        """
        super().__init__(exact.rank(), exact.size())  # type: ignore[call-arg]  # the stub's lacks it
        self._exact = exact
        self._bucket = bucket
        self._state = state
        self._change = change
        self._remarks = Remarks(f"the sum over copies of {unit}")

    def allreduce(  # type: ignore[override]  # torch calls this form of it
        self, tensors: list[Tensor], opts: AllreduceOptions | None = None
    ) -> Work:
        """Replaces the tensor by its mean or sum over the copies; blocks."""
        [values] = tensors
        kind = ReduceOp.SUM if opts is None else kind_of(opts.reduceOp)[0]
        if why := self._why_exact(values, kind):
            self._remarks.say(why)
            return self._exact.allreduce(tensors, opts or AllreduceOptions())
        try:
            mean = self._bucket.mean(values.float())
        except RuntimeError:
            self._introduce()
            raise
        values.copy_(mean * self.size() if kind == ReduceOp.SUM else mean)
        self._state.became_nonfinite += _nonfinite.became(mean, values)
        return _Done()

    def _introduce(self) -> None:
        """Makes the group known to torch, which asks for its back end when it logs a failure."""
        known = dist.distributed_c10d._world
        known.pg_map[self] = known.pg_map[self._exact]
        known.pg_group_ranks[self] = known.pg_group_ranks[self._exact]

    def _why_exact(self, values: Tensor, kind: Any) -> str:  # noqa: ANN401 - RedOpType
        if kind not in (ReduceOp.SUM, ReduceOp.AVG):
            return f"its operation is {kind}"
        if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"its values are {values.dtype}"
        if values.device.type != "cpu":
            return f"its values are on {values.device}"
        if values.numel() != self._bucket.elements:
            return (
                f"it has {values.numel()} elements, and not the {self._bucket.elements} of the "
                "parameters that could be trained when thalweg.fsdp.compress() was called"
            )
        return self._change()


def compress(units: Sequence[Unit], copies: dist.ProcessGroup, codec: str) -> State:
    """Sums the gradients of these units' copies in a codec or policy from now on, and returns the
    state of the job that does. All ranks of `copies` call it together.

    Raises what thalweg.ddp.attach() raises.
    """
    model = tuple(
        Described(shard.name, "float32", tuple(shard.shape))
        for unit in units
        for shard in unit.trainable()
    )
    me, network = _introduce(units, copies, codec, model)
    meeting = Meeting.of(copies, me.timeout)
    job = _member.join(_member.meet(me, meeting), network, meeting)
    session = job.session
    assert session is not None  # node_reduce is "sidecar"
    _precision.watch(session)
    filled = [unit for unit in units if unit.trainable()]
    layouts = [[(shard.name, shard.shape) for shard in unit.trainable()] for unit in filled]
    buckets = _buckets.make(session, layouts, copies)
    state = _state(job, me.codec, model)
    for unit, bucket in zip(filled, buckets, strict=True):
        change = unit.change_of_trainable()
        unit.sum_copies_over(CopiesGroup(str(unit), copies, bucket, state, change))
    return state


def _introduce(
    units: Sequence[Unit], copies: dist.ProcessGroup, codec: str, model: tuple[Described, ...]
) -> tuple[Introduction, Network]:
    """Returns what this rank tells the others, and how they reach it."""
    problem = ""
    try:
        config = Config.from_env().override(JobArguments(codec, node_reduce="sidecar"))
        network = Network.from_env()
        config = config._replace(codec=_except(units, config.codec))
    except ConfigError as error:
        config, network = Config.from_env({}), Network.from_env({})
        problem = str(error)  # the others must hear of it as well
    if not config.step_timeout:
        world = _process_group.world_of(copies) or _process_group.world_of(dist.group.WORLD)
        config = config._replace(step_timeout=world.timeout if world else _checks.MAX_TIMEOUT)
    running = _process_group.running_sidecar()
    return _member.introduction(config, problem, running=running, model=model), network


def _except(units: Sequence[Unit], codec: str) -> str:
    """Returns a policy with the rules that thalweg.ddp.attach() adds: for embeddings and for small
    tensors, as shards are.
    """
    shards = [shard for unit in units for shard in unit.trainable()]
    tables = [(shard.name, shard.shape) for shard in shards if shard.is_table]
    try:
        chosen = policy.except_embeddings(policy.parse(codec), tables)
        named = [(shard.name, shard.shape) for shard in shards]
        return policy.except_small_tensors(chosen, named).spec()
    except ValueError as error:
        raise ConfigError(f"with the rules for embeddings and small tensors, {error}") from None


def _state(job: Job, codec: str, model: tuple[Described, ...]) -> State:
    place = job.place
    state = State(
        job.session,  # type: ignore[arg-type]  # compress() has one
        keeper=job.session if place.local_rank == 0 else None,
        job=job.name,
        codec=codec,
        sidecar=job.sidecar,
        starts_sidecars=job.starts_sidecars,
        listens=job.listens,
        shards=str(job.shards),
        place=place,
        left_out=_left_out.find(codec, model, place.num_nodes),
        workers=len(job.workers),
    )
    if dist.get_rank() == 0:
        for remark in state._left_out.remarks:
            _log.warning("job %s: %s", state.job, remark)
        _log.info("job %s: sums over copies of shards, codec %s", state.job, state.codec)
    return state
