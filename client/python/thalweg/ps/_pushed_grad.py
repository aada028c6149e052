"""Stands in for a gradient that is on its way to the shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor


class PushedGrad(Tensor):
    """A gradient with a shape and a type, without values: whatever uses it raises RuntimeError."""

    _name: str

    @staticmethod
    def __new__(cls: type[PushedGrad], parameter: Tensor, name: str) -> PushedGrad:
        grad: PushedGrad = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        grad._name = name
        return grad

    def share_memory_(self) -> NoReturn:
        """Raises, as all else does; torch's would look for the memory that is not there."""
        self.zero_()
        raise AssertionError

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PushedGrad({self._name})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: object,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> NoReturn:
        name = next((arg._name for arg in _flat(args) if isinstance(arg, PushedGrad)), "")
        raise RuntimeError(
            f"thalweg: the gradient of {name} has been pushed to the shards, which update its "
            f"weights: nobody can read or change it any more ({func}). ServerOptimizer takes the "
            "place of DistributedDataParallel: train the plain module. To clip, give it "
            "max_grad_norm; before another backward pass call zero_grad(), and put all passes of a "
            "step but the last into `with optimizer.accumulate():`"
        )


def _flat(args: Any) -> list[Any]:  # noqa: ANN401
    """Returns the arguments, and those in lists of tensors."""
    return [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]
