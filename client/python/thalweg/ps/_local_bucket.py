"""Parameters that workers change by themselves, and whose changes are pushed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thalweg.ps._bucket import Bucket


class LocalBucket(Bucket):
    """One bucket of a session. What it pushes is how far its parameters have come since its last
    exchange.

    Between two exchanges its memory holds the weights that the last one gave; while weights are on
    their way, it holds what has been pushed.
    """

    # The worker's own weights minus the parameters, in float32, where workers keep what they do not
    # send, and the parameters' type cannot hold all of it.
    _left_out: list[Tensor] | None = None

    @torch.no_grad()
    def push_change(self, factor: float, settings: int) -> None:
        """Sends `factor` times the weights of the last exchange minus the worker's own."""
        torch._foreach_sub_(self._weights(), self._own())
        if factor != 1:
            self._grads.flat.mul_(factor)
        if self._kept:
            self._kept.factor = factor
        self.push(settings)
        self.expect()

    def push_rest(self) -> None:
        """Sends all by which the worker's own weights differ from the last exchange's: what
        workers keep in the place of shards becomes the mean of all workers' weights.
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
        """Makes the worker's own weights `mix` times what they are, and for the rest the last
        exchange's, which are here, with what this worker has not sent of its changes.
        """
        weights, tensors = self._with_rest(), self._tensors()
        if mix:
            own = [each.to(weights[0].dtype) for each in self._own()]
            torch._foreach_lerp_(own, weights, 1 - mix)
            weights = own
        torch._foreach_copy_(tensors, weights)
        is_rounded = self.owes and tensors[0].dtype != torch.float32
        self._left_out = list(torch._foreach_sub(weights, tensors)) if is_rounded else None

    def left_out(self) -> dict[str, Tensor]:
        """Returns by parameter what its type cannot hold of the worker's own weights."""
        values = self._left_out or ()
        return {
            each.name: value.clone() for each, value in zip(self.parameters, values, strict=False)
        }

    def load_left_out(self, values: Mapping[str, Tensor]) -> None:
        """Takes what left_out() has returned, with the parameters of that moment."""
        names = [each.name for each in self.parameters]
        is_known = all(name in values for name in names)
        self._left_out = [values[name].clone() for name in names] if is_known else None

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

    def _own(self) -> list[Tensor]:
        """Returns this worker's own weights: the parameters themselves where these hold all."""
        if self._left_out is None:
            return self._tensors()
        return list(torch._foreach_add(self._left_out, self._tensors()))

    def _weights(self) -> list[Tensor]:
        return self._views(self._grads.flat)
