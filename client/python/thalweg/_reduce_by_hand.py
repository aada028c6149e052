"""Averages gradients for training loops that do so themselves, after backward()."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg._attach._state import State
from thalweg._settings._config import Config, ConfigError
from thalweg._torch import _nonfinite
from thalweg.codecs import Codec
from thalweg.policy import Policy


class _Fetched(list[torch.Tensor]):
    """An optimizer's gradients, and the positions of its parameters that have none."""

    left_out: tuple[int, ...] = ()


class _Call(NamedTuple):
    """What must be the same on all workers in a call of all_reduce()."""

    codec: str | None
    left_out: tuple[int, ...]
    gradients: tuple[tuple[torch.Size, torch.dtype, torch.layout], ...]

    def statements(self) -> Iterator[str]:
        yield f"the codec is {self.codec or 'that of the environment'}"
        missing = ", ".join(map(str, self.left_out)) or "none"
        yield f"parameters without a gradient are {missing}"
        for position, (shape, dtype, layout) in enumerate(self.gradients):
            kind = "" if layout == torch.strided else f"{layout} "
            text = f"{kind}{dtype}{list(shape)}".replace("torch.", "")
            yield f"gradient {position} is {text}"


_Key = tuple[dist.ProcessGroup, _Call, tuple[torch.device, ...]]


class _Carried(NamedTuple):
    """A job that carries gradients of certain shapes."""

    ddp_model: DistributedDataParallel
    state: State


_jobs: dict[_Key, _Carried] = {}


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the gradients that `optimizer.step()` would use, in the order of its parameters.

    They are the tensors themselves, not copies. Parameters without a gradient are left out; the
    list knows which, so that all_reduce() refuses gradients of other parameters of the same shapes.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    found = _Fetched(one.grad for one in parameters if one.grad is not None)
    found.left_out = tuple(i for i, one in enumerate(parameters) if one.grad is None)
    return found


def all_reduce(
    gradients: Iterable[torch.Tensor],
    scale: float | None = None,
    *,
    codec: Codec | Policy | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> State | None:
    """Replaces each gradient by `scale` times its sum over the workers, through Thalweg.

    Call it on all workers, after backward() and before gradients are unscaled, clipped or used, for
    models that DistributedDataParallel does not average. Where losses are scaled, an infinity of
    one worker then reaches all, and all skip the step. The bits of the results are the same on all
    workers. It blocks; DistributedDataParallel with thalweg.ddp.attach() reduces beside backward(),
    and so is faster.

    The first call with gradients of certain shapes and types joins a job, as attach() does; it
    lasts until the process ends. In rules of `codec`, gradients are named by their position: "0".

    Before that, each call finds out whether gradients are alike on all workers: an all-reduce of 16
    bytes over `group`. With THALWEG_MIN_NODES, where a group may lack processes, none does, and
    workers whose gradients differ in a later call wait for the timeout.

    Args:
        gradients: dense tensors, all on the CPU or on one GPU, in the same order on all workers. A
            worker that lacks a gradient which others have passes zeros in its place.
        scale: 1 / number of workers unless given, for the mean.
        codec: as for thalweg.ddp.attach().
        group: the workers; the default process group unless given.

    Returns:
        The job's state, for statistics; None if there is one worker or no gradient.

    Raises:
        RuntimeError: there is no process group, or the job has failed.
        ValueError: a gradient is sparse, or gradients differ between workers.
        ConnectionError, TimeoutError: as attach() does.
    """
    tensors = list(gradients)
    if not dist.is_initialized():
        raise RuntimeError("thalweg: all_reduce() needs torch.distributed.init_process_group()")
    workers = dist.get_world_size(group)
    factor = 1.0 if scale is None else scale * workers
    group = group or dist.distributed_c10d._get_default_group()
    call = _Call(
        codec if isinstance(codec, str | None) else codec.spec(),
        gradients.left_out if isinstance(gradients, _Fetched) else (),
        tuple((t.shape, t.dtype, t.layout) for t in tensors),
    )
    if workers > 1 and not _may_lose_nodes():
        _require_same(call, group)
    for position, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise ValueError(f"thalweg: gradient {position} is sparse, expected a dense tensor")
    job = None
    if workers > 1 and tensors:
        key = (group, call, tuple(tensor.device for tensor in tensors))
        job = _job_for(tensors, codec, key)
        _mean(tensors, job)
    if factor != 1.0:
        torch._foreach_mul_(tensors, factor)
    if job is None:
        return None
    if abs(factor) > 1:
        _count_overflows(tensors, job)
    return job.state


def _may_lose_nodes() -> bool:
    """Returns whether jobs go on without lost nodes, whose processes the group then lacks."""
    try:
        return Config.from_env().min_nodes > 0
    except ConfigError:  # attach() tells all workers
        return False


def _require_same(call: _Call, group: dist.ProcessGroup) -> None:
    """Raises ValueError on all workers unless their calls are the same.

    They would wait for each other in different jobs.
    """
    number = _digest(call)
    device = dist.distributed_c10d._get_object_coll_device(group)
    extremes = torch.tensor([number, -number], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MIN, group=group)
    least, negated_most = extremes.tolist()
    if least == -negated_most:
        return
    calls: list[Any] = [None] * group.size()
    dist.all_gather_object(calls, call, group=group)
    rank = next(rank for rank, other in enumerate(calls) if other != calls[0])
    pairs = itertools.zip_longest(
        calls[0].statements(), calls[rank].statements(), fillvalue="there are no more gradients"
    )
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"thalweg: gradients differ between workers: {ours} on rank 0, but {theirs} on rank "
        f"{rank}: pass the same on all, zeros for missing ones"
    )


@functools.cache
def _digest(call: _Call) -> int:
    """Returns a number of 63 bits that only equal calls have."""
    return int.from_bytes(hashlib.sha256(repr(call).encode()).digest()[:8], "big") >> 1


class _Carrier(torch.nn.Module):
    """A module whose parameters get given gradients in backward()."""

    def __init__(self, like: list[torch.Tensor]) -> None:
        super().__init__()
        for position, tensor in enumerate(like):
            # Nobody writes into it, so that on the CPU the system gives it no memory.
            parameter = torch.nn.Parameter(torch.empty_like(tensor))
            self.register_parameter(str(position), parameter)
        self.gradients: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        pairs = zip(self.parameters(), self.gradients, strict=True)
        given = [_Give.apply(p, gradient) for p, gradient in pairs]  # type: ignore[no-untyped-call]
        return torch.stack(given)


class _Give(torch.autograd.Function):
    """Is a function of a parameter that has the given gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.gradient = gradient
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return ctx.gradient, None


@torch.enable_grad()
def _mean(tensors: list[torch.Tensor], job: _Carried) -> None:
    """Replaces tensors by their means."""
    ddp_model = job.ddp_model
    ddp_model.zero_grad()
    ddp_model.module.gradients = [tensor.detach() for tensor in tensors]
    ddp_model().sum().backward()
    ddp_model.module.gradients = []
    with torch.no_grad():
        torch._foreach_copy_(tensors, _means_of(job))


def _means_of(job: _Carried) -> list[torch.Tensor]:
    """Returns the means that the job has taken last."""
    return [parameter.grad for parameter in job.ddp_model.module.parameters()]


def _count_overflows(tensors: list[torch.Tensor], job: _Carried) -> None:
    """Counts the elements of these multiples of means that float16 cannot hold, unlike the mean."""
    for mean, tensor in zip(_means_of(job), tensors, strict=True):
        if tensor.dtype == torch.float16:
            job.state.became_nonfinite += _nonfinite.became(mean, tensor)


def _job_for(
    tensors: list[torch.Tensor], codec: Codec | Policy | str | None, key: _Key
) -> _Carried:
    if key not in _jobs:
        ddp_model = DistributedDataParallel(
            _Carrier(tensors),
            process_group=key[0],
            init_sync=False,  # nobody reads the parameters
            gradient_as_bucket_view=True,
        )
        _jobs[key] = _Carried(ddp_model, thalweg.ddp.attach(ddp_model, codec))
    return _jobs[key]


@atexit.register
def _forget() -> None:
    """Frees DDP's modules, which are in cycles, while Gloo's threads can still end."""
    _jobs.clear()
    gc.collect()
