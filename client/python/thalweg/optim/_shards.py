"""Supports DTensors: parameters of which each process holds a shard, or all (fully_shard()).

The kernels update plain tensors, so each DTensor has a stand-in: a plain tensor in the same memory
as this process's part of it, with its gradient while a step runs. Only norms differ: those of LAMB
are of whole tensors, and are summed over processes. The shards of FullyShardedDataParallel (FSDP1)
are plain tensors; steps that need norms refuse them, unless each process has all of them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version


class _StandIn(NamedTuple):
    param: Any  # a DTensor
    local: Tensor  # this process's part of it
    tensor: Tensor  # a plain tensor in the same memory


class StandIns:
    """Holds `tensors`: parameters, with stand-ins in place of DTensors."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        """Makes the stand-ins. Raises NotFusable."""
        self.tensors: list[Tensor] = []
        self._made: list[_StandIn] = []
        for param in params:
            tensor = local = local_of(param)
            if is_dtensor(param):
                tensor = local.detach()
                self._made.append(_StandIn(param, local, tensor))
            self.tensors.append(tensor)
        self.show_grads()

    def hold(self) -> bool:
        """Returns whether the DTensors are where they were: fully_shard() may move them."""
        return all(made.param._local_tensor is made.local for made in self._made)

    def show_grads(self) -> None:
        """Gives the stand-ins the present gradients. Raises NotFusable."""
        for made in self._made:
            grad = made.param.grad
            made.tensor.grad = None if grad is None else local_grad(made.param)

    def hide_grads(self) -> None:
        """Removes gradients, for zero_grad() to free them, and tells autograd of the writes."""
        for made in self._made:
            if made.tensor.grad is not None:
                made.tensor.grad = None
                increment_version(made.param)


def is_dtensor(tensor: Tensor) -> bool:
    # It is not imported here: that takes a second, and a program with DTensors has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_flat_shards(params: Iterable[Tensor]) -> bool:
    """Returns whether one is this process's part of what FullyShardedDataParallel has flattened: a
    plain tensor, which does not say who has the rest.

    With NO_SHARD, which torch chooses by itself where there is one process, all of it is here. Of a
    unit that has only vectors, with use_orig_params and several processes, that cannot be told, and
    this takes it for sharded.
    """
    flattened = [param for param in params if _is_flattened(param)]
    if not flattened or (dist.is_initialized() and dist.get_world_size() == 1):
        return False
    # A unit's parameters lie in the same memory: in their own shapes if they are whole, and else as
    # vectors.
    whole = {_memory(param) for param in flattened if param.dim() > 1 and param.numel() > 0}
    return not all(
        param.dim() > 1 or _is_whole_unit(param) or _memory(param) in whole for param in flattened
    )


def _is_flattened(tensor: Tensor) -> bool:
    return getattr(tensor, "_fsdp_flattened", False) or getattr(tensor, "_is_flat_param", False)


def _is_whole_unit(tensor: Tensor) -> bool:
    """Returns whether it is all parameters of a unit in one, as they are without use_orig_params.

    Of a unit of one element each process's part has one, too: torch pads parts to the same size.
    """
    size = getattr(tensor, "_unpadded_unsharded_size", None)
    return size is not None and tensor.numel() == size.numel() > 1


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def refuse_norms_of_flat_shards(optimizer: Any) -> None:  # noqa: ANN401
    """Raises RuntimeError: a step needs norms, and these would be of this process's parts."""
    raise RuntimeError(
        f"thalweg: {type(optimizer).__name__} needs norms of whole tensors, and a parameter is a "
        "shard of FullyShardedDataParallel, expected none, as each process would use norms of its "
        "own: to clip, leave out max_grad_norm and call model.clip_grad_norm_() before the step; "
        "for LAMB shard the model by fully_shard(); with NO_SHARD let each unit that is wrapped "
        "have a matrix, since vectors alone look like shards"
    )


def local_of(tensor: Any) -> Tensor:  # noqa: ANN401
    """Returns this process's part of a DTensor; any other tensor itself. Raises NotFusable."""
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    if any(placement.is_partial() for placement in tensor.placements):
        raise _not_fusable(
            f"a DTensor of shape {tuple(tensor.shape)} is placed as {tensor.placements}, "
            "expected shards or replicas"
        )
    local: Tensor = tensor._local_tensor
    return local.wait() if hasattr(local, "wait") else local  # a collective may be in flight


def local_grad(param: Any) -> Tensor:  # noqa: ANN401
    """Returns this process's part of a parameter's gradient. Raises NotFusable.

    It is a collective of all processes if the gradient is placed otherwise than the parameter.
    """
    grad = param.grad
    if is_dtensor(param) and is_dtensor(grad) and not _alike(param, grad):
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_state(param, grad)


def local_state(param: Any, value: Any) -> Tensor:  # noqa: ANN401
    """Returns this process's part of what belongs to a parameter. Raises NotFusable."""
    if is_dtensor(param) != is_dtensor(value) or (is_dtensor(param) and not _alike(param, value)):
        raise _not_fusable(
            f"a parameter of shape {tuple(param.shape)} is {_placement(param)}, but its gradient "
            f"or state is {_placement(value)}, expected the same"
        )
    return local_of(value)


def norms(tensors: Sequence[Tensor], params: Sequence[Any]) -> list[Tensor]:
    """Returns Euclidean norms, in float64, of whole tensors of which this process holds `tensors`.

    `params` says which tensor belongs to which parameter. This is a collective of all processes
    that hold shards: all must call it for the same parameters. The sums have the same bits on all
    of them.
    """
    return [square.sqrt() for square in _squares(tensors, params)]


def total_squares(pairs: Iterable[tuple[Tensor, Any]]) -> Tensor:
    """Returns the sum of whole tensors' squares; `pairs` is what norms() takes as two lists."""
    both = list(pairs)
    if not both:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack(_squares([t for t, _ in both], [p for _, p in both])).sum()


def _squares(tensors: Sequence[Tensor], params: Sequence[Any]) -> list[Tensor]:
    squares = [n.square() for n in torch._foreach_norm(list(tensors), 2, dtype=torch.float64)]
    shared: defaultdict[Any, list[int]] = defaultdict(list)  # by mesh and its sharded dimensions
    for index, param in enumerate(params):
        if is_dtensor(param):
            sharded = [d for d, placed in enumerate(param.placements) if not placed.is_replicate()]
            shared[param.device_mesh, tuple(sharded)].append(index)
    for (mesh, dimensions), which in shared.items():
        sums = torch.stack([squares[index] for index in which])
        for dimension in dimensions:
            dist.all_reduce(sums, group=mesh.get_group(dimension))
        for index, total in zip(which, sums.unbind(), strict=True):
            squares[index] = total
    return squares


def _alike(a: Any, b: Any) -> bool:  # noqa: ANN401
    same: bool = a.placements == b.placements and a.device_mesh == b.device_mesh
    return same


def _placement(tensor: Any) -> str:  # noqa: ANN401
    return f"a DTensor placed as {tensor.placements}" if is_dtensor(tensor) else "a plain tensor"


def _not_fusable(text: str) -> RuntimeError:
    from thalweg._C import NotFusable

    return NotFusable(f"thalweg: {text}")
