"""Implements `apex.parallel.SyncBatchNorm`, and what makes and groups it."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm with apex's arguments, also for tensors on the CPU.

    Statistics are those of all workers' batches, which may differ in size. On the CPU they are
    computed in float32 in two passes, mean first, by torch's differentiable all_reduce; on a GPU
    they are torch's. It is no torch.nn.SyncBatchNorm, which DistributedDataParallel refuses on the
    CPU.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group: torch's.
        channel_last: the channel is the last dimension of inputs and outputs, not the second.
        fuse_relu: the result is clamped to 0 or more, by an operation of its own.
    """

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,  # noqa: ANN401
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Returns the normalised input; `z`, of its shape, is added before the clamp."""
        moved = self.channel_last and input.dim() > 2
        result = self._normalize(input.movedim(-1, 1) if moved else input)
        if moved:
            result = result.movedim(1, -1)
        if z is not None:
            result = result + z
        final: Tensor = result.relu() if self.fuse_relu else result
        return final

    def _normalize(self, input: Tensor) -> Tensor:
        if not self.training or not _has_workers():
            return super().forward(input)
        if input.device.type != "cpu":
            by_torch: Tensor = cast("Any", nn.SyncBatchNorm.forward)(self, input)
            return by_torch
        group = self.process_group or dist.group.WORLD
        values = input.float()
        dims = [d for d in range(input.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(input.dim())]
        local = torch.full((1,), float(input.numel() // input.size(1)), device=values.device)
        dist.all_reduce(local, group=group)
        count = local.item()
        mean = all_reduce(values.sum(dims), group=group) / count
        centred = values - mean.view(shape)
        variance = all_reduce(centred.square().sum(dims), group=group) / count
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach() * count / max(count - 1, 1))
        result = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.float().view(shape) + self.bias.float().view(shape)
        narrow: Tensor = result.to(input.dtype)
        return narrow

    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def convert_syncbn_model(
    module: nn.Module,
    process_group: Any = None,  # noqa: ANN401
    channel_last: bool = False,
) -> nn.Module:
    """Returns the module with batch normalisation replaced by SyncBatchNorm, at any depth.

    Parameters and buffers are those of the module, not copies: an optimizer that has the parameters
    keeps them.

    Args:
        module: of any kind; it is changed in place, unless it is batch normalisation itself.
        process_group: the workers that share statistics; None: all.
        channel_last: as SyncBatchNorm's.
    """
    if isinstance(module, _InstanceNorm):
        return module
    result = module
    if isinstance(module, _BatchNorm):
        result = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            channel_last,
        )
        result._parameters.update(module._parameters)
        result._buffers.update(module._buffers)
        result.train(module.training)
    for name, child in module.named_children():
        setattr(result, name, convert_syncbn_model(child, process_group, channel_last))
    return result


def create_syncbn_process_group(group_size: int) -> Any:  # noqa: ANN401
    """Returns the group of this worker, among consecutive groups of `group_size` workers.

    All workers must call it. With 0 it returns None: all workers are one group. Raises ValueError
    if the number of workers is not a multiple of `group_size`.
    """
    if group_size == 0:
        return None
    size = dist.get_world_size()
    if group_size < 0 or size % group_size != 0:
        raise ValueError(f"group_size is {group_size}, expected a divisor of {size} workers, or 0")
    firsts = range(0, size, group_size)
    groups = [dist.new_group(list(range(first, first + group_size))) for first in firsts]
    return groups[dist.get_rank() // group_size]


def _has_workers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
