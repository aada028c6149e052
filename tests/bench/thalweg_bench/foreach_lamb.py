"""Implements LAMB in torch's multi-tensor operations, for comparison with FusedLAMB."""

from __future__ import annotations

import torch
from torch import Tensor


class ForeachLamb:
    """LAMB as in docs/optim.md, with λ ≠ 0, on float32 parameters that all have gradients."""

    def __init__(
        self, params: list[Tensor], lr: float, weight_decay: float, max_grad_norm: float = 1.0
    ) -> None:
        """`params` may have any shapes."""
        self._params = params
        self._lr, self._decay, self._bound = lr, weight_decay, max_grad_norm
        self._firsts = [torch.zeros_like(p) for p in params]
        self._seconds = [torch.zeros_like(p) for p in params]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Updates all parameters once."""
        self._steps += 1
        beta1, beta2, eps = 0.9, 0.999, 1e-8
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        grads = list(torch._foreach_div(grads, (norm / self._bound).clamp_min(1.0).item()))
        torch._foreach_lerp_(self._firsts, grads, 1 - beta1)
        torch._foreach_mul_(self._seconds, beta2)
        torch._foreach_addcmul_(self._seconds, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(self._seconds)
        torch._foreach_div_(denominators, (1 - beta2**self._steps) ** 0.5)
        torch._foreach_add_(denominators, eps)
        updates = list(torch._foreach_div(self._firsts, denominators))
        torch._foreach_div_(updates, 1 - beta1**self._steps)
        torch._foreach_add_(updates, self._params, alpha=self._decay)
        ratios = torch._foreach_div(torch._foreach_norm(self._params), torch._foreach_norm(updates))
        torch._foreach_mul_(updates, list(ratios))
        torch._foreach_add_(self._params, updates, alpha=-self._lr)
