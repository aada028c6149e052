"""What an optimizer is, for the shards that run it: kinds, what stays, and settings of a step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from thalweg.optim.lamb import FusedLAMB

Group = Mapping[str, Any]  # of a torch optimizer's param_groups


class Kind(NamedTuple):
    """An optimizer that shards have."""

    torch: type[Optimizer]  # whose arguments, groups and state it has: torch's, or ours
    native: str  # its name in _C.ServedBucket
    moments: tuple[str, ...]  # the names of its state in torch, by slice from 1
    settings: tuple[str, ...]  # the names in a group of what may change from step to step

    @property
    def counts_steps(self) -> bool:
        """Whether the state of a parameter has its number of steps."""
        return self.native != "sgd"

    @property
    def measures(self) -> bool:
        """Whether steps depend on norms of whole parameters, which have settings of their own."""
        return self.native == "lamb"


_MOMENTS = ("exp_avg", "exp_avg_sq")
_ADAM = ("lr", "weight_decay", "betas", "eps")
KINDS = {
    "sgd": Kind(SGD, "sgd", ("momentum_buffer",), ("lr", "weight_decay", "momentum", "dampening")),
    "adam": Kind(Adam, "adam", _MOMENTS, _ADAM),
    "adamw": Kind(AdamW, "adam", _MOMENTS, _ADAM),
    "lamb": Kind(FusedLAMB, "lamb", _MOMENTS, _ADAM),
}


def make(kind: str, params: Iterable[Any], options: Mapping[str, Any], where: str) -> Optimizer:
    """Returns an optimizer of this kind, a key of KINDS. Raises TypeError that names the option
    that it does not have, and `where` the script gives it.
    """
    known = [*inspect.signature(KINDS[kind].torch).parameters][1:]
    for name in options:
        if name not in known:
            raise TypeError(
                f"thalweg: {where} has no argument {name}{_owner(name)}; those of {kind} are "
                f"{', '.join(known)}"
            )
    return KINDS[kind].torch(params, **options)


def _owner(name: str) -> str:
    """Says whether it is an argument of LocalOptimizer."""
    from thalweg.ps._local import LocalOptimizer

    is_its = name in inspect.signature(LocalOptimizer).parameters
    return ", which is one of LocalOptimizer" if is_its else ""


# Options of torch's that ask for a way of computing, not for another result.
_WAYS = ("foreach", "fused")
_UNKNOWN = ("amsgrad", "capturable", "differentiable")
_NEEDED = ("bias_correction", "grad_averaging")  # of LAMB


class Rule(NamedTuple):
    """What all groups have in common, and keep."""

    decoupled: bool
    nesterov: bool
    maximize: bool


def rule_of(groups: Sequence[Group]) -> Rule:
    """Returns the rule of these groups. Raises ValueError for what shards cannot do."""
    rules = [
        Rule(
            decoupled=bool(group.get("decoupled_weight_decay", group.get("adam_w_mode", False))),
            nesterov=bool(group.get("nesterov", False)),
            maximize=bool(group["maximize"]),
        )
        for group in groups
    ]
    for number, (group, rule) in enumerate(zip(groups, rules, strict=True)):
        for option in _UNKNOWN:
            if group.get(option):
                raise ValueError(f"thalweg: group {number} has {option}, which shards do not have")
        for option in _NEEDED:
            if not group.get(option, True):
                raise ValueError(f"thalweg: group {number} has no {option}, which shards have")
        if rule != rules[0]:
            raise ValueError(
                f"thalweg: group {number} has {rule}, group 0 {rules[0]}: shards have one for all"
            )
    return rules[0]


def settings_of(kind: Kind, groups: Sequence[Group]) -> list[dict[str, float]]:
    """Returns by group what a step needs, with the names that _C.Session.set_settings() knows."""
    return [_settings(kind, group) for group in groups]


def own_bound(groups: Sequence[Group]) -> float:
    """Returns the norm to which the optimizer itself clips, as LAMB does; 0: it does not. Raises
    ValueError.
    """
    bounds = [float(group.get("max_grad_norm") or 0) for group in groups]
    for number, bound in enumerate(bounds):
        if bound != bounds[0]:
            raise ValueError(
                f"thalweg: group {number} has max_grad_norm {bound:g}, group 0 {bounds[0]:g}: "
                "shards have one for all"
            )
    return bounds[0]


def _settings(kind: Kind, group: Group) -> dict[str, float]:
    settings: dict[str, float] = {}
    for name in kind.settings:
        if name == "betas":
            settings["beta1"], settings["beta2"] = map(_number, group[name])
        else:
            settings[name] = _number(group[name])
    return settings


def _number(value: float | Tensor) -> float:
    return float(value)
