"""Parameters that workers change by themselves, and whose changes are pushed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.ps._bucket import Bucket


class LocalBucket(Bucket):
    """One bucket of a session. What it pushes is how far its parameters have come since its last
    exchange.

    Between two exchanges its memory holds the weights that the last one gave; while weights are on
    their way, it holds what has been pushed.
    """

    @torch.no_grad()
    def push_change(self, factor: float, settings: int) -> None:
        """Sends `factor` times the weights of the last exchange minus the parameters."""
        torch._foreach_sub_(self._weights(), self._tensors())
        if factor != 1:
            self._grads.flat.mul_(factor)
        if self._kept:
            self._kept.factor = factor
        self.push(settings)
        self.expect()

    def push_rest(self) -> None:
        """Sends all by which the parameters differ from the last exchange's weights: what workers
        keep in the place of shards becomes the mean of all workers' parameters.
        """
        assert self._kept
        self._kept.evens_out = True
        self.push_change(1.0, 0)

    @torch.no_grad()
    def place(self, weights: Sequence[Tensor]) -> None:
        """Makes these, as they are when they have been pulled, the last exchange's. The parameters
        stay, and so does what is known of them.
        """
        torch._foreach_copy_(self._weights(), [each.to(self._pulled) for each in weights])

    def differing(self, weights: Sequence[Tensor]) -> list[str]:
        """Returns none: the parameters are the worker's own, whatever the shards have."""
        return []

    @torch.no_grad()
    def merge(self, mix: float) -> None:
        """Makes the parameters `mix` times what they are, and for the rest the last exchange's
        weights, which are here, with what this worker has not sent of its changes.
        """
        weights = self._with_rest()
        if mix:
            torch._foreach_lerp_(self._tensors(), weights, 1 - mix)
        else:
            torch._foreach_copy_(self._tensors(), weights)

    @property
    def owes(self) -> bool:
        """Whether workers may have changed more than they have sent; equal on all of them."""
        return self._kept is not None and self._kept.owes

    def _with_rest(self) -> list[Tensor]:
        weights = self._weights()
        rest = self._kept.take_rest() if self._kept else None
        if rest is None:
            return weights
        pairs = zip(weights, self._views(rest), strict=True)
        return [(each - unsent).to(each.dtype) for each, unsent in pairs]

    def shared(self) -> list[Tensor]:
        """Returns what is equal on all workers after an exchange: its weights, one parameter after
        the other, and what workers keep in the place of shards.
        """
        return [self._grads.flat, *(self._kept.shared() if self._kept else ())]

    def _weights(self) -> list[Tensor]:
        return self._views(self._grads.flat)
