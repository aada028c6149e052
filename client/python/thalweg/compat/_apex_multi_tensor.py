"""Implements `amp_C`'s functions that scale, add and measure lists, and `apex.multi_tensor_apply`.

They take apex's arguments: the size of chunks, which changes nothing, a flag, which becomes 1 where
a value is not finite, lists of tensors of any floating point types, and the function's own. They
compute in float32 (in float64 where tensors are), by torch's multi-tensor operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]
_SMALLEST = torch.finfo(torch.float32).smallest_normal


class MultiTensorApply:
    """Calls a function of `amp_C`: `applier(function, flag, lists, *arguments)`."""

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Lists,
        *args: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Returns what the function returns."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, flag: Tensor, lists: Lists, scale: float | Tensor) -> None:
    """Writes `scale` times the tensors of the first list into those of the second."""
    sources, targets = lists
    _note(flag, sources)
    results = wide(sources)
    torch._foreach_mul_(results, scale)
    torch._foreach_copy_(list(targets), results)


@torch.no_grad()
def multi_tensor_axpby(  # noqa: PLR0917 - apex's order
    chunk_size: int, flag: Tensor, lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Writes a·x + b·y into the third list; the flag is about x (0), y (1) or both (-1)."""
    xs, ys, targets = lists
    _note(flag, {0: xs, 1: ys}.get(arg_to_check, [*xs, *ys]))
    sums = wide(xs)
    torch._foreach_mul_(sums, a)
    torch._foreach_add_(sums, [y.to(x.dtype) for x, y in zip(sums, ys, strict=True)], alpha=b)
    torch._foreach_copy_(list(targets), sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, flag: Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Returns the norm of all tensors together, shape (1,), and with `per_tensor` those of each.

    Without it the second has shape (0,). Squares are summed in float64.
    """
    return _norms(flag, lists[0], 1.0, per_tensor)


def multi_tensor_l2norm_mp(
    chunk_size: int, flag: Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Is multi_tensor_l2norm; where the flag is set already, apex's result is undefined."""
    return multi_tensor_l2norm(chunk_size, flag, lists, per_tensor)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    inverse_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Returns what multi_tensor_l2norm does for the tensors times `inverse_scale`."""
    return _norms(flag, lists[0], inverse_scale, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, flag: Tensor, lists: Lists, scale: float, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Does multi_tensor_scale, and returns what multi_tensor_l2norm does for the results."""
    multi_tensor_scale(chunk_size, flag, lists, scale)
    return _norms(flag, lists[0], abs(scale), per_tensor)


@torch.no_grad()
def update_scale_hysteresis(  # noqa: PLR0917 - apex's order
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Updates a loss scale that is lowered only after `hysteresis` steps with infinities.

    It is multiplied by `growth_factor` after `growth_interval` steps without, unless the result is
    infinite. As on a GPU, a scale below the smallest normal number becomes 0.
    """
    if found_inf.item() > 0:
        hysteresis_tracker -= 1
        growth_tracker.zero_()
        if hysteresis_tracker.item() > 0:
            return current_scale
        current_scale *= backoff_factor
        current_scale[current_scale < _SMALLEST] = 0
        return current_scale
    growth_tracker += 1
    if growth_tracker.item() == growth_interval:
        grown = current_scale * growth_factor
        current_scale.copy_(torch.where(grown.isfinite(), grown, current_scale))
        growth_tracker.zero_()
    hysteresis_tracker.fill_(hysteresis)
    return current_scale


def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies in float32, or in float64 of those that are."""
    return [t.to(torch.promote_types(t.dtype, torch.float32), copy=True) for t in tensors]


def _note(flag: Tensor, tensors: Sequence[Tensor]) -> None:
    """Sets the flag if a value is not finite."""
    if tensors:
        found = [t.isfinite().all().logical_not().to(flag.device) for t in tensors]
        flag.copy_(flag | functools.reduce(torch.logical_or, found))


def _norms(
    flag: Tensor, tensors: Sequence[Tensor], scale: float | Tensor, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    if not tensors:
        return torch.zeros(1, device="cpu"), torch.zeros(0, device="cpu")
    each = torch.stack(list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)))
    each = (each * scale).reshape(-1)
    total = each.square().sum().sqrt().float().reshape(1)
    flag.copy_(flag | total.isfinite().all().logical_not())
    return total, each.float() if per_tensor else total.new_empty(0)
