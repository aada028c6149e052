"""The part of ServerOptimizer that is about the gradients of a step as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.ps._kept_state import KeptState, or_rolled_back
from thalweg.ps._rules import KINDS, own_bound
from thalweg.ps._wishes import check_bound


class Clipping(KeptState):
    """Norms of gradients, and what they are clipped to."""

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients in the last step that had a max_grad_norm, before clipping;
        None: there was none. With a max_grad_norm of infinity nothing is clipped.
        """
        return self._committing.norm

    @property
    def max_grad_norm(self) -> float | None:
        """What gradients are clipped to. It may be changed between two steps, on all workers alike.
        ValueError: it is not more than 0, or the optimizer was made for steps without it.
        """
        return own_bound(self.param_groups) or self._committing.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not self._wishes.commits:
            raise ValueError(
                f"thalweg: max_grad_norm is {value}, but shards update before all gradients are "
                "known: make the ServerOptimizer with a max_grad_norm"
            )
        if KINDS[self._wishes.kind].measures:
            for group in self.param_groups:
                group["max_grad_norm"] = check_bound(value)
        else:
            self._committing.max_grad_norm = check_bound(value)

    @or_rolled_back
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Lets this step, whose backward pass is over, clip as torch.nn.utils.clip_grad_norm_ over
        all groups, and to max_grad_norm as well. Call it on all workers. Returns the norm before,
        but after earlier calls, a float32 on the CPU. RuntimeError: the optimizer was made for
        steps without clipping and loss scaling.
        """
        if not self._wishes.commits:
            self._serving.fail(
                "shards update before all gradients are known: to clip them, make the "
                "ServerOptimizer with a max_grad_norm"
            )
        self._serving.complete(self.param_groups, self.state)
        norm = self._committing.clip(self.param_groups, check_bound(max_norm) or 0.0)
        return torch.tensor(norm, device="cpu")

    @or_rolled_back
    def look_for_infinities(self, inverse_scale: float) -> bool:
        """Is called in the place of a GradScaler's unscale_(): step() is to multiply gradients by
        that. Returns whether one is not finite.
        """
        self._serving.complete(self.param_groups, self.state)
        return self._committing.look_for_infinities(self.param_groups, inverse_scale)
