"""Clips as part of the step: gradients are multiplied by a factor where they are used."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from thalweg.optim._fused import FusedMixin, refuse_modes

_MODES = ("foreach", "capturable", "differentiable")


class ClippingMixin(FusedMixin):
    """FusedMixin with torch's clip_grad_norm_ in the step, which writes no gradient."""

    _max_grad_norm: float | None = None  # it is not in groups: loading a checkpoint replaces these

    @property
    def max_grad_norm(self) -> float | None:
        """The bound of the norm of all gradients together, from the next step on.

        With None there is no clipping; with infinity neither, but `grad_norm` is known. Raises
        ValueError unless it is more than 0.
        """
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, bound: float | None) -> None:
        if bound is not None and not bound > 0:
            raise ValueError(
                f"max_grad_norm is {bound}, expected more than 0, or None for no clipping"
            )
        self._max_grad_norm = None if bound is None else float(bound)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Is Optimizer.add_param_group.

        Raises ValueError if the group has a max_grad_norm, RuntimeError if it asks for a way to
        step that is refused.
        """
        if isinstance(param_group, dict) and "max_grad_norm" in param_group:
            raise ValueError(
                "a group has max_grad_norm, expected it as an argument of the optimizer: the norm "
                "is that of all groups together"
            )
        if isinstance(param_group, dict):
            refuse_modes(**{name: param_group.get(name, False) for name in _MODES})
        super().add_param_group(param_group)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        """Keeps our attributes in copies and pickles; torch omits what it does not know."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc]
        return {**state, "_max_grad_norm": self._max_grad_norm}

    def _grad_bounds(self) -> list[float]:
        assert isinstance(self, Optimizer)
        return [self._max_grad_norm or 0.0] * len(self.param_groups)
