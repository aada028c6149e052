"""Averages gradients for training loops that do so themselves, after backward()."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg._attach._state import State
from thalweg.codecs import Codec
from thalweg.policy import Policy

_Key = tuple[object, ...]


class _Carried(NamedTuple):
    """A job that carries gradients of certain shapes."""

    ddp_model: DistributedDataParallel
    state: State


_jobs: dict[_Key, _Carried] = {}


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the gradients that `optimizer.step()` would use, in the order of its parameters.

    They are the tensors themselves, not copies. Parameters without a gradient are left out.
    """
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


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

    Args:
        gradients: dense tensors, all on the CPU or on one GPU, in the same order on all workers.
        scale: 1 / number of workers unless given, for the mean.
        codec: as for thalweg.ddp.attach().
        group: the workers; the default process group unless given.

    Returns:
        The job's state, for statistics; None if there is one worker or no gradient, where nothing
        is sent.

    Raises:
        RuntimeError: there is no process group, or the job has failed.
        ValueError: a gradient is sparse, or gradients differ between workers.
        ConnectionError, TimeoutError: as attach() does.
    """
    tensors = list(gradients)
    if not dist.is_initialized():
        raise RuntimeError("thalweg: all_reduce() needs torch.distributed.init_process_group()")
    for position, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise ValueError(f"thalweg: gradient {position} is sparse, expected a dense tensor")
    workers = dist.get_world_size(group)
    factor = 1.0 if scale is None else scale * workers
    state = None
    if workers > 1 and tensors:
        state = _mean(tensors, codec, group or dist.distributed_c10d._get_default_group())
    if factor != 1.0:
        torch._foreach_mul_(tensors, factor)
    return state


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
def _mean(
    tensors: list[torch.Tensor], codec: Codec | Policy | str | None, group: dist.ProcessGroup
) -> State:
    """Replaces tensors by their means."""
    ddp_model, state = _job_for(tensors, codec, group)
    ddp_model.zero_grad()
    ddp_model.module.gradients = [tensor.detach() for tensor in tensors]
    ddp_model().sum().backward()
    ddp_model.module.gradients = []
    means = [parameter.grad for parameter in ddp_model.module.parameters()]
    with torch.no_grad():
        torch._foreach_copy_(tensors, means)
    return state


def _job_for(
    tensors: list[torch.Tensor], codec: Codec | Policy | str | None, group: dist.ProcessGroup
) -> _Carried:
    shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors)
    spec = codec if isinstance(codec, str | None) else codec.spec()
    key = (group, spec, shapes)
    if key not in _jobs:
        ddp_model = DistributedDataParallel(
            _Carrier(tensors),
            process_group=group,
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
