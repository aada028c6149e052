"""Measures how long torch's optimizers would take if they ran fused, on this machine."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from thalweg.optim import FusedAdam, FusedAdamW, FusedSGD

_FUSED: dict[type, Any] = {SGD: FusedSGD, Adam: FusedAdam, AdamW: FusedAdamW}
_MOST_ELEMENTS = 8 << 20  # of a trial, which takes 16 bytes for each
_REPEATS = 5


def fused_seconds(optimizer: Optimizer) -> float | None:
    """Returns the seconds of a fused step that updates as many elements.

    None for optimizers that `THALWEG_FUSED_OPTIMIZER` leaves as they are: those that are not
    torch's SGD, Adam or AdamW, and those with other parameters than float32.
    """
    fused = _FUSED.get(type(optimizer))
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    count: int = sum(param.numel() for param in params)
    if fused is None or count == 0 or any(p.dtype is not torch.float32 for p in params):
        return None
    trial = torch.nn.Parameter(torch.zeros(min(count, _MOST_ELEMENTS), device=params[0].device))
    trial.grad = torch.zeros_like(trial)
    kept = ("momentum", "amsgrad", "weight_decay")
    group = optimizer.param_groups[0]
    made = fused([trial], lr=1e-3, **{name: group[name] for name in kept if name in group})
    made.is_internal = True
    step = made.step
    step()  # makes its state
    shortest = min(_seconds(step, trial) for _ in range(_REPEATS))
    return shortest * count / trial.numel()


def _seconds(step: Any, trial: torch.Tensor) -> float:  # noqa: ANN401
    began = time.perf_counter()
    step()
    if trial.is_cuda:
        torch.cuda.synchronize(trial.device)
    return time.perf_counter() - began
