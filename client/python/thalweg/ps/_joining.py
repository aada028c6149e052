"""Makes the workers of a process group a job whose shards keep their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thalweg import _C, policy
from thalweg._c10d import _process_group
from thalweg._job import _collectives, _member, _rendezvous
from thalweg._job._member import Job
from thalweg._job._topology import Tensor
from thalweg._settings import _config
from thalweg._settings._config import Config, JobArguments, Network
from thalweg.optim._shards import is_dtensor
from thalweg.policy import Policy
from thalweg.ps._snapshots import why_no_way_back
from thalweg.ps._upward import are_dense

_Shapes = list[tuple[str, torch.Size]]
_log = logging.getLogger("thalweg")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Joined(NamedTuple):
    """A worker's place in a job."""

    job: Job
    codecs: Policy  # of gradients
    session: _C.Session  # the job's
    meeting: _collectives.Meeting
    snapshot_every: int  # steps; 0: none are taken
    no_way_back: str  # why the job may not go back to one; empty: it does
    step_timeout: float  # seconds


def join(
    group: dist.ProcessGroup,
    named_parameters: list[tuple[str, torch.Tensor]],
    description: str,
    arguments: JobArguments,
    *,
    optimizer: str = "ServerOptimizer",
    choose: Callable[[Policy, _Shapes], Policy],
    for_all_collectives: bool = False,
    secret: str = "",
    why_no_snapshots: str = "",
) -> Joined:
    """Makes this worker a member of a job. All workers of the group call it together.

    `description` is equal on all workers, as are names, types and shapes of the parameters; its
    parts stand between semicolons.
    `optimizer` is the class that messages name. `choose` makes of the codecs that are asked for,
    and of the parameters' names and shapes, the codecs that are used; it may raise ConfigError.
    `secret` is that of an earlier job of these workers; empty: they have a new one.
    `why_no_snapshots` says why none can be taken; empty: they can. Raises what
    thalweg.ddp.attach() does.
    """
    try:
        config, network = Config.from_env().override(arguments), Network.from_env()
        shapes = [(name, tensor.shape) for name, tensor in named_parameters]
        codecs = choose(policy.parse(config.codec), shapes)
        config = config._replace(codec=codecs.spec())
        problem = _why_not(named_parameters, optimizer)
        if optimizer == "ServerOptimizer" and not (are_dense(codecs) or why_no_snapshots):
            # What nodes hold back would stay that of the step at which a shard was lost.
            why_no_snapshots = f"do not go with codec {config.codec}: expected fp32, fp16 or bf16"
        if config.snapshot_every and why_no_snapshots:
            problem = problem or (
                f"snapshots (snapshot_every=, THALWEG_SNAPSHOT_EVERY) {why_no_snapshots}"
            )
    except _config.ConfigError as error:
        config, network = Config.from_env({}), Network.from_env({})
        codecs = policy.parse(config.codec)
        problem = str(error)  # the others must hear of it as well
    ignored = tuple(_without_effect(config, codecs, optimizer))
    config = config._replace(
        step_timeout=config.step_timeout or _process_group.timeout_of(group),
        node_reduce="sidecar",
    )
    if optimizer != "ServerOptimizer":
        config = config._replace(snapshot_every=0)
    if config.snapshot_every:
        description += f"; snapshots every {config.snapshot_every} steps"
    needs_disks = config.snapshot_every > 0 and config.local_shards == "auto"
    if needs_disks:
        config = config._replace(local_shards="0")  # sidecars have no disk for snapshots
    # The description is the first line of the model that all must have.
    model = [Tensor(description, "", ())]
    for name, tensor in named_parameters:
        dtype = str(tensor.dtype).removeprefix("torch.")
        model.append(Tensor(name, dtype, tuple(tensor.shape)))
    me = _member.introduction(
        config, problem, running=_process_group.running_sidecar(), model=tuple(model), secret=secret
    )
    me = replace(me, needs_disks=needs_disks)
    _rendezvous.await_all(group, me.step_timeout, me.timeout)
    meeting = _collectives.Meeting.of(group, me.timeout)
    workers = _member.meet(me, meeting)
    job = _member.join(workers, network, meeting, for_all_collectives=for_all_collectives)
    assert job.session is not None
    if job.place.node == job.place.local_rank == 0:
        for text in ignored:
            _log.warning("job %s: %s", job.name, text)
    no_way_back = why_no_way_back(config.timeout, config.step_timeout, config.reconnect)
    return Joined(
        job, codecs, job.session, meeting, config.snapshot_every, no_way_back, me.step_timeout
    )


def broadcast(group: dist.ProcessGroup, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Gives all workers rank 0's parameters, as DistributedDataParallel does."""
    tensors = [tensor.detach() for each in param_groups for tensor in each["params"]]
    if dist.get_rank(group) == 0:
        tensors = [tensor.data for tensor in tensors]  # these do not change, and torch counts none
    if tensors:
        dist._broadcast_coalesced(group, tensors, 250 << 20, 0)  # type: ignore[attr-defined]


def _without_effect(config: Config, codecs: Policy, optimizer: str) -> Iterator[str]:
    """Yields what is set and means nothing here, and why."""
    if config.residuals and not are_dense(codecs):
        yield (
            f"THALWEG_RESIDUALS has no effect with {optimizer}: only nodes behind "
            "DistributedDataParallel keep files of what they hold back"
        )
    if config.node_reduce != "sidecar":
        yield (
            f"THALWEG_NODE_REDUCE={config.node_reduce} has no effect with {optimizer}: each worker "
            "gives the sidecar what it has, and that sums it"
        )


def _why_not(named_parameters: list[tuple[str, torch.Tensor]], optimizer: str) -> str:
    """Returns why these weights cannot be exchanged; empty: they can."""
    for name, tensor in named_parameters:
        if is_dtensor(tensor):
            return f"parameter {name} is sharded (DTensor): {optimizer} takes whole ones"
        devices = {"cpu", "cuda"} if optimizer == "ServerOptimizer" else {"cpu"}
        if tensor.device.type not in devices:
            taken = " and ".join(sorted(devices))
            return f"parameter {name} is on {tensor.device}: {optimizer} takes those on {taken}"
        if tensor.dtype not in DTYPES:
            return (
                f"parameter {name} is {tensor.dtype}: {optimizer} takes float32, float16 and "
                "bfloat16"
            )
        if tensor.layout is not torch.strided:
            return f"parameter {name} is sparse: {optimizer} takes dense ones"
    return ""
