"""Runs steps of mixed precision by thalweg.amp, for comparison with mixed_sequence.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thalweg import amp
from thalweg_bench.mixed_sequence import grad_of


class MixedStep:
    """thalweg.amp's O2 around a fused optimizer. Only one may exist: its scale is apex's."""

    def __init__(self, params: list[nn.Parameter], optimizer: Optimizer) -> None:
        """`params` must be float32 with gradients; they become float16."""
        self._grads = [grad_of(param).half() for param in params]
        self._params, self._optimizer = params, optimizer
        self._loss = torch.zeros((), device=params[0].device)
        amp.initialize(nn.ParameterList(params), optimizer, opt_level="O2", verbosity=0)
        self.masters: list[Tensor] = list(amp.master_params(optimizer))

    def step(self) -> None:
        """Does what follows a backward."""
        with amp.scale_loss(self._loss, self._optimizer):
            for param, grad in zip(self._params, self._grads, strict=True):
                param.grad = grad
        self._optimizer.step()
