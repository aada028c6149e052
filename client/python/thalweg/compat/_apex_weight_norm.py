"""Implements `apex.reparameterization`: weight normalisation, by torch's parametrizations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["WeightNorm", "apply_weight_norm", "remove_weight_norm"]


class WeightNorm(nn.Module):
    """w = g·v/‖v‖, with norms over all dimensions but `dim` (None: over all).

    The norm is computed in float32 whatever the type of v, and w has the type of v.
    """

    def __init__(self, dim: int | None = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, magnitude: Tensor, direction: Tensor) -> Tensor:
        """Returns w."""
        wide = _widened(direction)
        result: Tensor = magnitude.to(wide.dtype) * wide / self._norm(wide)
        return result.to(direction.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns g and v of which w is `weight`."""
        return self._norm(_widened(weight)).to(weight.dtype), weight

    def _norm(self, direction: Tensor) -> Tensor:
        every = range(direction.dim())
        kept = None if self.dim is None else self.dim % direction.dim()
        dims = [d for d in every if d != kept]
        norm: Tensor = torch.linalg.vector_norm(direction, dim=dims, keepdim=kept is not None)
        return norm


def apply_weight_norm(
    module: nn.Module, name: str = "", dim: int | None = 0, hook_child: bool = True
) -> nn.Module:
    """Replaces a parameter by its magnitude and its direction; returns the module.

    They are `parametrizations.<name>.original0` (g) and `original1` (v) of the module that has the
    parameter. Checkpoints of apex, which call them `<name>_g` and `<name>_v`, can be loaded. With
    `thalweg.amp`, O2, each has a master of its own.

    Args:
        module: the module, or one that contains it.
        name: of the parameter, with dots for modules inside; empty: all parameters with two or more
            dimensions, but those of embeddings.
        dim: the dimension whose indices have a norm each; None: one norm.
        hook_child: accepted as apex does; the weight is computed when it is read.
    """
    names = [name] if name else [found for found, _ in module.named_parameters()]
    for full in names:
        owner, attribute = _find(module, full)
        weight = getattr(owner, attribute)
        if weight.dim() > 1 and not isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            parametrize.register_parametrization(owner, attribute, WeightNorm(dim))
            rename = functools.partial(_rename, attribute)
            owner.register_load_state_dict_pre_hook(rename)
    return module


def remove_weight_norm(module: nn.Module, name: str = "", remove_all: bool = False) -> nn.Module:
    """Puts the weight back as a parameter; returns the module.

    An empty `name`, or `remove_all`, stands for all that apply_weight_norm has replaced. Raises
    ValueError if `name` is not among them.
    """
    found = [
        (owner, attribute)
        for owner in module.modules()
        if isinstance(getattr(owner, "parametrizations", None), nn.ModuleDict)
        for attribute, steps in owner.parametrizations.items()  # type: ignore[union-attr, operator]
        if isinstance(steps[0], WeightNorm)
    ]
    if name and not remove_all:
        owner, attribute = _find(module, name)
        if not any(o is owner and a == attribute for o, a in found):
            raise ValueError(f"{name} has no weight normalisation, expected one to remove")
        found = [(owner, attribute)]
    for owner, attribute in found:
        parametrize.remove_parametrizations(owner, attribute)
    return module


def _find(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _rename(name: str, _: nn.Module, state: dict[str, Any], prefix: str, *__: object) -> None:
    """Hook of load_state_dict(): takes the names of apex."""
    for theirs, ours in (("g", "original0"), ("v", "original1")):
        if (old := f"{prefix}{name}_{theirs}") in state:
            state[f"{prefix}parametrizations.{name}.{ours}"] = state.pop(old)
