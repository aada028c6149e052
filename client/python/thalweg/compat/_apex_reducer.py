"""Implements `apex.parallel.Reducer`: averages gradients when the script says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["Reducer"]


class Reducer:
    """Averages gradients over all workers in `reduce`.

    Args:
        module_or_grads_list: a module, whose parameters and buffers all workers take from rank 0
            now; or tensors, which `reduce` averages themselves.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            with torch.no_grad():
                for tensor in [*self.module.parameters(), *self.module.buffers()]:
                    dist.broadcast(tensor.detach(), 0)
        else:
            self.grads = list(module_or_grads_list)

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages; all workers must have gradients for the same parameters."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        alike: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for grad in grads:
            alike[grad.dtype, grad.device].append(grad)
        for tensors in alike.values():
            flat = _flatten_dense_tensors(tensors)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            torch._foreach_copy_(tensors, list(_unflatten_dense_tensors(flat, tensors)))
