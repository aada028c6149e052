"""Weights and state of an outer optimizer that every worker keeps, and steps alike."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from thalweg.optim import FusedAdam, FusedAdamW, FusedSGD
from thalweg.ps._plan import Outer
from thalweg.ps._rules import KINDS

_FUSED = {"sgd": FusedSGD, "adam": FusedAdam, "adamw": FusedAdamW}  # with the shards' bits


class Mean(Protocol):
    """Takes the mean of float32 values over all workers, one mean at a time."""

    owes: bool  # workers may have changed more than has been sent

    def begin(self, values: Tensor, *, factor: float, whole: bool) -> None:
        """Sends `values`, which may be used again at once: `factor` times a worker's own. `whole`:
        nothing is to stay unsent.
        """

    def wait(self) -> Tensor:
        """Returns the mean, the same bits on all workers; it is valid until the next begin()."""

    def take_rest(self) -> Tensor | None:
        """Returns once, after wait(), what this worker has not sent of its own values, and is to be
        in its next ones; None: the codec knows itself.
        """


class KeptWeights:
    """Stands in for a _C.ServedBucket whose update does not commit: the mean comes to the workers,
    and each does what the shards would have done with it.
    """

    def __init__(self, mean: Mean, outer: Outer, elements: int) -> None:
        self._mean = mean
        self.factor = 1.0  # by which the next changes have been multiplied
        self.evens_out = False  # with the next push: its mean is no gradient
        self._moments = KINDS[outer.kind].moments
        self._weights = nn.Parameter(torch.zeros(elements, device="cpu"))
        self._optimizer = _FUSED[outer.kind]([self._weights], **outer.options)
        self._optimizer.is_internal = True

    def push(self, changes: Tensor, settings: int, waited: float) -> KeptWeights:
        """Sends changes. wait() returns the weights that result, in float32."""
        self._mean.begin(changes.float(), factor=self.factor, whole=self.evens_out)
        return self

    def wait(self) -> Tensor:
        mean = self._mean.wait()
        if self.evens_out:
            self.evens_out = False
            return self._weights.detach().sub_(mean)
        self._weights.grad = mean
        self._optimizer.step()
        self._weights.grad = None
        return self._weights.detach()

    def read(self, slice_: int) -> tuple[Tensor | None, int]:
        state = self._optimizer.state[self._weights]
        steps = int(state.get("step", 0))
        values = self._weights.detach() if slice_ == 0 else state.get(self._moments[slice_ - 1])
        return values, steps

    @torch.no_grad()
    def write(self, slice_: int, values: Tensor | None, steps: int) -> None:
        state = self._optimizer.state[self._weights]
        if slice_ == 0:
            assert values is not None
            self._weights.copy_(values)
        elif values is None:
            state.clear()  # as nobody has stepped
        else:
            state[self._moments[slice_ - 1]] = values
            # read() needs it with any optimizer.
            state["step"] = torch.tensor(float(steps), device="cpu")

    @property
    def owes(self) -> bool:
        return self._mean.owes

    def take_rest(self) -> Tensor | None:
        return self._mean.take_rest()

    def shared(self) -> list[Tensor]:
        """Returns all that is equal on all workers."""
        state = self._optimizer.state[self._weights]
        return [self._weights.detach(), *(state[name] for name in self._moments if name in state)]
