"""Extends torch's optimizers: one fused step, state in float32, and AMP's scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from thalweg.optim import _finite
from thalweg.optim._norm import Norm
from thalweg.optim._plan import on_device
from thalweg.optim._shards import local_of
from thalweg.optim._state import load_unrounded
from thalweg.optim._steps import Step


class FusedMixin:
    """Put before a torch optimizer: replaces its step().

    GradScaler passes its scale and whether an infinity was found: gradients are unscaled in the
    step, which does nothing, and does not count, if one was found. Afterwards `.grad` is divided by
    the scale, as after torch's steps; gradients are not written to otherwise.
    """

    is_internal = False  # whether no script has made it, so that switches for scripts pass it by
    _fused_step: Step
    _norm: Norm | None = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks before it looks at gradients, also before an optimizer's first step.
        _finite.install()
        return True

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None:
        """Takes what torch's optimizers set for `fused=True`, which is so anyway."""

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm before clipping of all gradients that the latest step clipped, divided by their
        scale.

        It is a float64 on the gradients' device, computed here. After a step that GradScaler has
        skipped it is not finite, or None if our own check caused the skip; it is None after a step
        that scale_loss has skipped, and where there is no clipping.
        """
        return None if self._norm is None else self._norm.value()

    def _grad_bounds(self) -> list[float]:
        """Returns for each group the norm that gradients are clipped to; 0: no clipping."""
        assert isinstance(self, Optimizer)
        return [0.0] * len(self.param_groups)

    @_disable_dynamo  # torch.compile leaves the call as it is: it contains nothing to fuse
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Updates once. Returns what `closure`, which computes loss and gradients, returns.

        Raises RuntimeError, before anything is changed, for parameters and gradients that cannot be
        updated (docs/optim.md), and while a CUDA graph is captured.
        """
        refuse_capture(self)
        # `import torch` may define optimizers, and this import costs time
        from thalweg._C import NotFusable

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step_fused()
        except NotFusable as error:
            self._step_unfused(error)
        unscale_grads(self)
        return loss

    def _step_fused(self) -> None:
        """Raises NotFusable."""
        type(self)._fused_step(self, own=True)

    def _step_unfused(self, reason: RuntimeError) -> None:
        """Does the same update where the kernels cannot; raises `reason` if it cannot either."""
        raise reason

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Is Optimizer.load_state_dict, but moments are float32 whatever the parameters are."""
        assert isinstance(self, Optimizer)
        load_unrounded(self, super().load_state_dict, state_dict)  # type: ignore[misc]


def unscale_grads(optimizer: Any) -> None:  # noqa: ANN401
    """Divides `.grad` by the scale that GradScaler has handed over, so that scripts may log it."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [local_of(p.grad) for p in dict.fromkeys(params) if p.grad is not None]
    if grads and on_device(optimizer):
        torch._foreach_mul_(grads, scale.reciprocal().reshape(()))  # nothing waits for the device
    elif grads and float(scale) != 1:
        torch._foreach_mul_(grads, float(scale.reciprocal()))


def refuse_capture(optimizer: Any) -> None:  # noqa: ANN401
    """Raises RuntimeError while a CUDA graph is captured, whose replay would read tables of
    pointers that are not there any more, and settings of now.
    """
    if on_device(optimizer) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"thalweg: the fused step of {type(optimizer).__name__} cannot be captured in a CUDA "
            "graph: capture forward and backward passes, and call step() after each replay"
        )


def refuse_modes(*, foreach: bool | None, capturable: bool, differentiable: bool) -> None:
    """Raises RuntimeError for torch's other ways of doing a step."""
    asked = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable}
    for name, value in asked.items():
        if value:
            raise RuntimeError(
                f"thalweg: {name} is {value}, expected False: `fused` does not support `{name}`, "
                "use torch's optimizer for it"
            )
