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
    results = _wide(sources)
    torch._foreach_mul_(results, scale)
    torch._foreach_copy_(list(targets), results)


@torch.no_grad()
def multi_tensor_axpby(  # noqa: PLR0917 - apex's order
    chunk_size: int, flag: Tensor, lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Writes a·x + b·y into the third list; the flag is about x (0), y (1) or both (-1)."""
    xs, ys, targets = lists
    _note(flag, {0: xs, 1: ys}.get(arg_to_check, [*xs, *ys]))
    sums = _wide(xs)
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
    norm, bound = global_grad_norm, max_grad_norm
    clip = (norm / bound).clamp_min(1.0) if bound > 0 else torch.ones(1)
    grads = [grad / clip.to(grad.device) for grad in _wide(lists[0])]
    corrected = bool(bias_correction)
    group = _adam_group(beta1, beta2, epsilon, mode, weight_decay, bias_correction=corrected)
    batch = _batch(lists, grads, step)
    updates = adam_updates(group, batch, 1 - beta1 if grad_averaging else 1.0)
    if use_nvlamb or weight_decay != 0:
        torch._foreach_mul_(updates, trust_ratios(batch, updates))
    _finish(lists, batch, updates, lr)


@torch.no_grad()
def multi_tensor_adam(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Does a step of Adam (`mode` 0) or AdamW (1) on lists of gradients, parameters, two moments.

    `step` counts from 1. The flag is neither read nor set: as in apex, values that are not finite
    pass through.
    """
    corrected = bool(bias_correction)
    group = _adam_group(beta1, beta2, epsilon, mode, weight_decay, bias_correction=corrected)
    batch = _batch(lists, _wide(lists[0]), step)
    _finish(lists, batch, adam_updates(group, batch, 1 - beta1), lr)


@torch.no_grad()
def multi_tensor_sgd(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float | Tensor,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Does a step of SGD on lists of gradients, parameters and momenta, unless the flag is set.

    Gradients g are first multiplied by `scale`. In the `first_run` the momentum b becomes g without
    dampening. With `wd_after_momentum` the step is p -= lr·(b + λp), with Nesterov's
    p -= lr·(g + μb + λp), and λp is not in b. A fourth list gets the new parameters, rounded to its
    types. Without momentum, the third list is neither read nor written.
    """
    if flag.item():
        return
    grads, params, momenta, *copies = lists
    weights, steps = _wide(params), _wide(grads)
    torch._foreach_mul_(steps, scale)
    if wd != 0 and not wd_after_momentum:
        torch._foreach_add_(steps, weights, alpha=wd)
    if momentum != 0:
        averages = [g.clone() for g in steps] if first_run else _wide(momenta)
        if not first_run:
            torch._foreach_mul_(averages, momentum)
            torch._foreach_add_(averages, steps, alpha=1 - dampening)
        if nesterov:
            torch._foreach_add_(steps, averages, alpha=momentum)
        else:
            steps = averages
        torch._foreach_copy_(list(momenta), averages)
    if wd != 0 and wd_after_momentum:
        steps = list(torch._foreach_add(steps, weights, alpha=wd))
    torch._foreach_sub_(weights, torch._foreach_mul(steps, lr))
    for targets in (params, *copies):
        torch._foreach_copy_(list(targets), weights)


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


def _adam_group(
    beta1: float, beta2: float, eps: float, mode: int, decay: float, *, bias_correction: bool
) -> dict[str, Any]:
    """Returns the settings of a step as a group of an optimizer has them."""
    return {
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": decay,
        "adam_w_mode": bool(mode),
        "bias_correction": bias_correction,
    }


def _batch(lists: Lists, grads: list[Tensor], step: int) -> Batch:
    """Returns float32 copies of parameters and moments, with `grads`."""
    params, averages, squares = lists[1:]
    steps = [float(step)] * len(params)
    return Batch(list(params), _wide(params), grads, _wide(averages), _wide(squares), steps)


def _finish(lists: Lists, batch: Batch, updates: list[Tensor], lr: float) -> None:
    """Subtracts lr·updates, and writes the results into parameters and moments."""
    torch._foreach_add_(batch.weights, updates, alpha=-lr)
    results = (batch.weights, batch.exp_avgs, batch.exp_avg_sqs)
    for targets, values in zip(lists[1:], results, strict=True):
        torch._foreach_copy_(list(targets), values)


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
