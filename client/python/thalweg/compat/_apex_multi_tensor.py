"""Implements `amp_C`'s functions on lists of tensors, and `apex.multi_tensor_apply`.

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

from thalweg.optim._moments import Batch, adam_updates
from thalweg.optim.lamb import trust_ratios

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
    torch._foreach_copy_(list(targets), torch._foreach_mul(_wide(sources), scale))


@torch.no_grad()
def multi_tensor_axpby(  # noqa: PLR0917 - apex's order
    chunk_size: int, flag: Tensor, lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Writes a·x + b·y into the third list; the flag is about x (0), y (1) or both (-1)."""
    xs, ys, targets = lists
    _note(flag, {0: xs, 1: ys}.get(arg_to_check, [*xs, *ys]))
    sums = torch._foreach_mul(_wide(xs), a)
    torch._foreach_add_(sums, _wide(ys), alpha=b)
    torch._foreach_copy_(list(targets), sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, flag: Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Returns the norm of all tensors together, shape (1,), and with `per_tensor` those of each.

    Without it the second has shape (0,). Squares are summed in float64.
    """
    return _norms(flag, lists[0], 1.0, per_tensor)


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
def multi_tensor_lamb(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """Does a step of LAMB on lists of gradients, parameters and two moments.

    Gradients are only read; apex's function leaves the updates in them.
    """
    grads, params, *moments = lists
    group = {
        "betas": (beta1, beta2),
        "eps": epsilon,
        "weight_decay": weight_decay,
        "adam_w_mode": bool(mode),
        "bias_correction": bool(bias_correction),
    }
    weights, averages, squares = _wide(params), _wide(moments[0]), _wide(moments[1])
    clip = (global_grad_norm / max_grad_norm).clamp_min(1.0) if max_grad_norm > 0 else 1.0
    wide = [grad / clip for grad in _wide(grads)]
    steps = [float(step)] * len(weights)
    batch = Batch(list(params), weights, wide, averages, squares, steps)
    updates = adam_updates(group, batch, 1 - beta1 if grad_averaging else 1.0)
    if use_nvlamb or weight_decay != 0:
        torch._foreach_mul_(updates, trust_ratios(batch, updates))
    torch._foreach_add_(weights, updates, alpha=-lr)
    for targets, values in ((params, weights), *zip(moments, (averages, squares), strict=True)):
        torch._foreach_copy_(list(targets), values)


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


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
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
        return torch.zeros(1), torch.zeros(0)
    each = torch.stack(list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)))
    each = (each * scale).reshape(-1)
    total = each.square().sum().sqrt().float().reshape(1)
    flag.copy_(flag | total.isfinite().all().logical_not())
    return total, each.float() if per_tensor else total.new_empty(0)
