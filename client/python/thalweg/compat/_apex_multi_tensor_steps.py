"""Implements `amp_C`'s steps of Adam, SGD, Adagrad and NovoGrad on lists of tensors.

They take apex's arguments, as [_apex_multi_tensor](_apex_multi_tensor.py) says, and compute in
float32 (in float64 where tensors are). Steps that get their rate or their count as a tensor read it
on the host: they cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.compat._apex_multi_tensor import Lists, wide
from thalweg.compat._apex_updates import update_by_adagrad, update_by_novograd
from thalweg.optim._moments import Batch, adam_updates


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
    group = adam_group(beta1, beta2, epsilon, mode, weight_decay, bias_correction=corrected)
    batch = batch_of(lists, wide(lists[0]), step)
    finish(lists, batch, adam_updates(group, batch, 1 - beta1), lr)


@torch.no_grad()
def multi_tensor_adam_capturable(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inverse_scale: Tensor,
) -> None:
    """Does multi_tensor_adam with gradients times `inverse_scale`, unless the flag is set.

    The multiplied gradients stay in the first list.
    """
    if flag.item():
        return
    grads = wide(lists[0])
    torch._foreach_mul_(grads, inverse_scale.item())
    torch._foreach_copy_(list(lists[0]), grads)
    corrected = bool(bias_correction)
    group = adam_group(beta1, beta2, epsilon, mode, weight_decay, bias_correction=corrected)
    batch = batch_of(lists, grads, int(step.item()))
    finish(lists, batch, adam_updates(group, batch, 1 - beta1), float(lr.item()))


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    *settings: Any,  # noqa: ANN401
) -> None:
    """Does multi_tensor_adam_capturable on the masters in the fifth list.

    The second list gets the masters, rounded. `settings` are those of multi_tensor_adam_capturable.
    """
    grads, params, averages, squares, masters = lists
    if flag.item():
        return
    multi_tensor_adam_capturable(chunk_size, flag, [grads, masters, averages, squares], *settings)
    torch._foreach_copy_(list(params), list(masters))


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
    weights, steps = wide(params), wide(grads)
    torch._foreach_mul_(steps, scale)
    if wd != 0 and not wd_after_momentum:
        torch._foreach_add_(steps, weights, alpha=wd)
    if momentum != 0:
        averages = [g.clone() for g in steps] if first_run else wide(momenta)
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
def multi_tensor_adagrad(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Does FusedAdagrad's step on lists of gradients, parameters and sums of squares.

    `mode` 1 is its `adagrad_w_mode`. The flag is neither read nor set.
    """
    group = {"lr": lr, "eps": epsilon, "weight_decay": weight_decay}
    grads, weights, sums = map(wide, lists)
    for grad, weight, squares in zip(grads, weights, sums, strict=True):
        update_by_adagrad(group, {"sum": squares}, weight, grad, decoupled=bool(mode))
    torch._foreach_copy_(list(lists[1]), weights)
    torch._foreach_copy_(list(lists[2]), sums)


@torch.no_grad()
def multi_tensor_novograd(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Does FusedNovoGrad's step on lists of gradients, parameters and averages.

    `grad_norms` has the running norm of each gradient, and is updated. `mode` 0 is the optimizer's
    `reg_inside_moment`; `step` counts from 1. The flag is neither read nor set.
    """
    group = {
        "lr": lr,
        "betas": (beta1, beta2),
        "eps": epsilon,
        "weight_decay": weight_decay,
        "bias_correction": bool(bias_correction),
        "grad_averaging": bool(grad_averaging),
        "reg_inside_moment": mode == 0,
        "norm_type": norm_type,
    }
    grads, weights, averages = map(wide, lists)
    for i, grad in enumerate(grads):
        state = {
            "step": torch.tensor(step - 1.0, device="cpu"),
            "exp_avg": averages[i],
            "exp_avg_sq": grad_norms[i],
        }
        update_by_novograd(group, state, weights[i], grad)
    torch._foreach_copy_(list(lists[1]), weights)
    torch._foreach_copy_(list(lists[2]), averages)


def adam_group(
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


def batch_of(lists: Lists, grads: list[Tensor], step: int) -> Batch:
    """Returns float32 copies of parameters and moments, with `grads`."""
    params, averages, squares = lists[1:]
    steps = [float(step)] * len(params)
    return Batch(list(params), wide(params), grads, wide(averages), wide(squares), steps)


def finish(lists: Lists, batch: Batch, updates: list[Tensor], lr: float) -> None:
    """Subtracts lr·updates, and writes the results into parameters and moments."""
    torch._foreach_add_(batch.weights, updates, alpha=-lr)
    results = (batch.weights, batch.exp_avgs, batch.exp_avg_sqs)
    for targets, values in zip(lists[1:], results, strict=True):
        torch._foreach_copy_(list(targets), values)
