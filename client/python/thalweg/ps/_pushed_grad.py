"""Stands in for a gradient that is on its way to the shards."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

_aten = torch.ops.aten


class PushedGrad(Tensor):
    """A gradient with a shape and a type, without values: whatever uses it raises RuntimeError.

    When its step is over, zero_() gives the parameter zeros in its place, as zero_grad() of a
    module or an optimizer does with set_to_none=False.
    """

    _name: str
    _parameter: weakref.ref[Tensor]
    _unfinished: Collection[int]

    @staticmethod
    def __new__(
        cls: type[PushedGrad], parameter: Tensor, name: str, unfinished: Collection[int]
    ) -> PushedGrad:
        """`unfinished` has the parameter's id as long as the step is not over."""
        grad: PushedGrad = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        grad._name = name
        grad._parameter = weakref.ref(parameter)  # which has this one
        grad._unfinished = unfinished
        return grad

    def share_memory_(self) -> NoReturn:
        """Raises, as all else does; torch's would look for the memory that is not there."""
        self.clone()
        raise AssertionError

    def _give_way_to_zeros(self) -> bool:
        """Returns whether zeros may take its place, and now do."""
        parameter = self._parameter()
        if parameter is None or id(parameter) in self._unfinished:
            return False
        if parameter.grad is self:
            parameter.grad = torch.zeros_like(parameter)
        return True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PushedGrad({self._name})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: object,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is _aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
        if func is _aten.zero_.default and args[0]._give_way_to_zeros():
            return args[0]
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
