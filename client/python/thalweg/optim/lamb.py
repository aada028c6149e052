"""Implements LAMB: Adam with a step in each tensor in proportion to the tensor's norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.optim._moments import Batch, MomentOptimizer, adam_updates, subtract
from thalweg.optim._shards import has_flat_shards, norms, refuse_norms_of_flat_shards
from thalweg.optim._steps import lamb_step


class FusedLAMB(MomentOptimizer):
    """Layer-wise adaptive moments for large batches (You et al., 2020), as in apex's FusedLAMB.

    All gradients together are first clipped: divided by ‖g‖/max_grad_norm where their norm, over
    all groups, is larger. Then, for each tensor w of shape (…), in float32,

        m = β1·m + (1-β1)·g     v = β2·v + (1-β2)·g²     u = (m/c1) / (√(v/c2) + ε) + λ·w
        w -= lr · r · u,  r = ‖w‖/‖u‖ where λ is not 0 or `use_nvlamb`, and both norms are not 0;
                          1 otherwise

    with bias corrections c = 1-β^step. A gradient that is not finite passes through, unless a
    GradScaler skips the step. Three passes over memory for float32, float16 and bfloat16 on
    the CPU or one GPU, with norms summed in float64; other tensors are updated by torch's
    multi-tensor operations.

    Args:
        params: tensors, named tensors or groups, as any torch optimizer takes them; float32, or a
            half type, which is updated in float32 and rounded.
        lr: a number, or a tensor with one element.
        weight_decay: λ. With 0, the default, LAMB is Adam with clipping: r is 1 (see use_nvlamb).
        betas: β1 and β2, from 0 to below 1.
        eps: ε.
        adam_w_mode: False: λ·w is added to g after clipping, not to u.
        grad_averaging: False: m = β1·m + g.
        set_grad_none: what zero_grad() does by default.
        max_grad_norm: bound of the norm; None or 0: no clipping. A group may have its own.
        bias_correction: False: c is 1.
        use_nvlamb: apply r also where weight_decay is 0.
        maximize: ascend.

    Raises ValueError for arguments out of their range. A step raises RuntimeError for shards of
    FullyShardedDataParallel, whose norms would be each process's own; with NO_SHARD there are none.
    """

    _fused_step = staticmethod(lamb_step)

    def __init__(  # noqa: PLR0917 - AIAK's order
        self,
        params: Any,  # noqa: ANN401
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1,
        *,
        bias_correction: bool = True,
        use_nvlamb: bool = False,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "bias_correction": bias_correction,
            "use_nvlamb": use_nvlamb,
            "maximize": maximize,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def _grad_bounds(self) -> list[float]:
        return [max(group["max_grad_norm"] or 0.0, 0.0) for group in self.param_groups]

    def _step_unfused(self, reason: RuntimeError) -> None:
        if has_flat_shards(param for group in self.param_groups for param in group["params"]):
            refuse_norms_of_flat_shards(self)
        super()._step_unfused(reason)

    def _global_norm(self, batches: list[Batch]) -> Tensor | None:
        grads = [grad for batch in batches for grad in batch.grads]
        if not any(self._grad_bounds()) or not grads:
            return None
        each = norms(grads, [param for batch in batches for param in batch.params])
        norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(each[0].device) for n in each]))
        return norm

    def _update(self, group: dict[str, Any], batch: Batch, norm: Tensor | None) -> None:
        bound = group["max_grad_norm"] or 0
        if norm is not None and bound > 0:
            divisor = (norm / bound).clamp_min(1.0)  # NaN stays NaN
            for grad in batch.grads:
                grad.div_(divisor.to(grad.device))
        share = 1 - group["betas"][0] if group["grad_averaging"] else 1.0
        updates = adam_updates(group, batch, share)
        if group["use_nvlamb"] or group["weight_decay"] != 0:
            torch._foreach_mul_(updates, trust_ratios(batch, updates))
        subtract(batch, updates, group["lr"])


LAMB = FusedLAMB  # AIAK's name


def trust_ratios(batch: Batch, updates: list[Tensor]) -> list[Tensor]:
    """Returns ‖w‖/‖u‖ of each parameter; 1 where either is 0."""
    both = norms([*batch.weights, *updates], [*batch.params, *batch.params])
    ratios = []
    for of_weight, of_update in zip(both[: len(updates)], both[len(updates) :], strict=True):
        usable = (of_weight != 0) & (of_update != 0)
        ratios.append(torch.where(usable, of_weight / of_update, 1.0))
    return ratios
