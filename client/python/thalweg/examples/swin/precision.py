"""Runs the levels of mixed precision: O0, O1 with torch's own parts, O2 with thalweg.amp.

A sharded model's O2 is FSDP's own, see sharding.py, with torch's scale.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import thalweg
from thalweg.examples.swin.config import Config
from thalweg.ps import ServerOptimizer

Reduce = Callable[[list[torch.Tensor]], object]


class Level(Protocol):
    """How a level scales losses and updates parameters."""

    def backward(self, loss: torch.Tensor, *, final: bool, reduce: Reduce | None = None) -> None:
        """Adds gradients up; `final`: of the last micro-batch before the step.

        `reduce` averages them over the workers while they carry the scale, so that an infinity of
        one worker skips the step of all.
        """

    def step(self, largest: float) -> torch.Tensor:
        """Clips gradients to that norm unless it is 0, and updates; returns the norm before."""

    def loss_scale(self) -> float: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def prepare(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, device: torch.device
) -> Level:
    """Prepares model and optimizer for AMP_OPT_LEVEL, before DistributedDataParallel."""
    scaled = config.AMP_OPT_LEVEL != "O0" and config.AMP_ENABLE
    if scaled and config.AMP_OPT_LEVEL == "O2" and config.BACKEND != "fsdp":
        return _Masters(model, optimizer, config.AMP_LOSS_SCALE)
    scale = config.AMP_LOSS_SCALE if scaled else None
    if isinstance(optimizer, ServerOptimizer):
        return _Served(optimizer, device, scale)
    return _Torch(optimizer, device, scale)


def autocast_context_manager(
    config: Config, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Returns the context of forward and loss.

    O1 casts to float16. O2's model is in float16 already; its loss and norms are cast to float32
    where the optimised path runs, and are as the model is elsewhere.
    """
    level = config.AMP_OPT_LEVEL
    casts = level == "O1" or (level == "O2" and config.ACCELERATED)
    if not (casts and config.AMP_ENABLE):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.float16)


def get_grad_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the 2-norm of all gradients, and changes none; 0 if there are none.

    Where they are sharded, all workers call it.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    return _whole(torch.nn.utils.get_total_norm(grads))


def clip(parameters: Iterable[torch.Tensor], largest: float) -> torch.Tensor:
    """Clips gradients to that norm unless it is 0; returns the norm before."""
    if largest > 0:
        return _whole(torch.nn.utils.clip_grad_norm_(parameters, largest))
    return get_grad_norm(parameters)


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class _Torch:
    """O0, O1 and a sharded model's O2: torch's GradScaler, or no scale."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, scale: float | str | None
    ) -> None:
        self._optimizer = optimizer
        self._fixed = None if isinstance(scale, str) or scale is None else float(scale)
        self._scaler = torch.amp.GradScaler(  # type: ignore[attr-defined]
            device.type, init_scale=self._fixed or 2.0**16, enabled=scale is not None
        )

    def backward(self, loss: torch.Tensor, *, final: bool, reduce: Reduce | None = None) -> None:
        del final  # the scale stays until step()
        self._scaler.scale(loss).backward()
        if reduce is not None:
            reduce(thalweg.fetch_gradients(self._optimizer))

    def step(self, largest: float) -> torch.Tensor:
        norm = self._clip(largest)
        self._scaler.step(self._optimizer)
        self._scaler.update(self._fixed)
        return norm

    def _clip(self, largest: float) -> torch.Tensor:
        self._scaler.unscale_(self._optimizer)
        return clip((p for g in self._optimizer.param_groups for p in g["params"]), largest)

    def loss_scale(self) -> float:
        return float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


class _Served(_Torch):
    """O0 and O1 with the optimizer on shards, which clips in its step."""

    def __init__(
        self, optimizer: ServerOptimizer, device: torch.device, scale: float | str | None
    ) -> None:
        super().__init__(optimizer, device, scale)
        self._served = optimizer

    def step(self, largest: float) -> torch.Tensor:
        self._served.max_grad_norm = largest or math.inf  # then the norm is known all the same
        self._scaler.step(self._served)
        self._scaler.update(self._fixed)
        assert self._served.grad_norm is not None
        return torch.tensor(self._served.grad_norm)


class _Masters:
    """O2: a model in float16, and float32 masters."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scale: float | str
    ) -> None:
        from thalweg import amp

        self._amp = amp
        self._model = model
        self._optimizer = optimizer
        amp.initialize(model, optimizer, opt_level="O2", loss_scale=scale, verbosity=0)

    def backward(self, loss: torch.Tensor, *, final: bool, reduce: Reduce | None = None) -> None:
        with self._amp.scale_loss(loss, self._optimizer, delay_unscale=not final) as scaled:
            scaled.backward()
            if reduce is not None:  # the masters get theirs at the end of this context
                reduce([p.grad for p in self._model.parameters() if p.grad is not None])

    def step(self, largest: float) -> torch.Tensor:
        norm = clip(self._amp.master_params(self._optimizer), largest)
        self._optimizer.step()
        return norm

    def loss_scale(self) -> float:
        (state,) = self._amp.state_dict().values()
        return float(state["loss_scale"])

    def state_dict(self) -> dict[str, Any]:
        return self._amp.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._amp.load_state_dict(state)
