"""Implements `amp_C`'s steps of LAMB on lists of tensors: whole, with masters, and in two stages.

They take apex's arguments, as [_apex_multi_tensor](_apex_multi_tensor.py) says. Gradients are only
read, where apex's functions leave the updates in them, and a bound of 0 means no clipping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.compat._apex_multi_tensor import Lists, wide
from thalweg.compat._apex_multi_tensor_steps import adam_group, batch_of, finish
from thalweg.optim._moments import adam_updates
from thalweg.optim.lamb import trust_ratios


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

    `global_grad_norm` is that of all gradients, `max_grad_norm` its bound. `mode` 0 adds the decay
    to the gradients, 1 to the updates; `step` counts from 1. The flag is neither read nor set.
    """
    corrected = bool(bias_correction)
    group = adam_group(beta1, beta2, epsilon, mode, weight_decay, bias_correction=corrected)
    grads = _clipped(lists, global_grad_norm, max_grad_norm)
    batch = batch_of(lists, grads, step)
    updates = adam_updates(group, batch, 1 - beta1 if grad_averaging else 1.0)
    if use_nvlamb or weight_decay != 0:
        torch._foreach_mul_(updates, trust_ratios(batch, updates))
    finish(lists, batch, updates, lr)


@torch.no_grad()
def multi_tensor_lamb_mp(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inverse_scale: Tensor,
) -> None:
    """Does multi_tensor_lamb with gradients times `inverse_scale`, unless the flag is set.

    `global_grad_norm` and its bound are of the gradients as they are. Where there is a fifth list,
    the second has float32 masters, and the fifth gets them, rounded. As in apex, `found_inf` is not
    read. Tensors of one element are read on the host.
    """
    if flag.item():
        return
    grads = wide(lists[0])
    torch._foreach_mul_(grads, inverse_scale.item())
    multi_tensor_lamb(
        chunk_size,
        flag,
        [grads, *lists[1:4]],
        float(lr.item()),
        beta1,
        beta2,
        epsilon,
        int(step.item()),
        bias_correction,
        weight_decay,
        grad_averaging,
        mode,
        global_grad_norm,
        float(max_grad_norm.item()),
        bool(use_nvlamb),
    )
    for targets in lists[4:]:
        torch._foreach_copy_(list(targets), list(lists[1]))


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """Writes LAMB's updates u of gradients, parameters and two moments into the fifth list.

    It updates the moments; u = (m/c1) / (√(v/c2) + ε) + λp with a λ for each tensor. `step` counts
    from 0, and the flag is neither read nor set.
    """
    grads = _clipped(lists, global_grad_norm, max_global_grad_norm)
    batch = batch_of(lists[:4], grads, step + 1)
    group = adam_group(beta1, beta2, epsilon, 1, 0.0, bias_correction=True)
    updates = adam_updates(group, batch, 1 - beta1)
    decayed = torch._foreach_mul(batch.weights, per_tensor_decay.tolist())
    torch._foreach_add_(updates, decayed)
    for targets, values in zip(
        lists[2:], (batch.exp_avgs, batch.exp_avg_sqs, updates), strict=True
    ):
        torch._foreach_copy_(list(targets), values)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(  # noqa: PLR0917 - apex's order
    chunk_size: int,
    flag: Tensor,
    lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = False,
) -> None:
    """Subtracts the updates of the second list, times lr, from the parameters of the first.

    With decay or `use_nvlamb`, each also times the ratio of its two norms, where neither is 0.
    """
    weights, updates = map(wide, lists)
    if use_nvlamb or weight_decay != 0:
        of_params, of_updates = per_tensor_param_norm, per_tensor_update_norm
        usable = (of_params != 0) & (of_updates != 0)
        ratios = torch.where(usable, of_params / of_updates, 1.0)
        torch._foreach_mul_(updates, ratios.tolist())
    torch._foreach_mul_(updates, lr)
    torch._foreach_sub_(weights, [u.to(w.dtype) for w, u in zip(weights, updates, strict=True)])
    torch._foreach_copy_(list(lists[0]), weights)


def _clipped(lists: Lists, norm: Tensor, bound: float) -> list[Tensor]:
    """Returns copies of the gradients, divided by norm/bound where that is above 1."""
    clip = (norm / bound).clamp_min(1.0) if bound > 0 else torch.ones(1, device="cpu")
    return [grad / clip.to(grad.device) for grad in wide(lists[0])]
