"""When workers that train by themselves exchange what, and how shards take it."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from thalweg.ps._parameters import Parameter
from thalweg.ps._rules import Group, make

# By name: the kind, and what it has where torch has another default.
_OUTER: dict[str, tuple[str, dict[str, Any]]] = {
    "nesterov": ("sgd", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "sgd": ("sgd", {"lr": 1.0}),
    "adam": ("adam", {}),
    "adamw": ("adamw", {}),
}


class Plan(NamedTuple):
    """The arguments of LocalOptimizer that say when; it says what they mean."""

    every: int
    fragments: int
    delay: int
    mix: float
    weighted: bool

    def check(self) -> None:
        """Raises ValueError, naming what cannot be."""
        if self.every < 1:
            raise ValueError(f"thalweg: every is {self.every}, expected 1 step or more")
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"thalweg: fragments is {self.fragments}, expected 1 to {self.every}: every "
                "fragment leaves after a step of its own"
            )
        if not 0 <= self.delay < self.every:
            raise ValueError(
                f"thalweg: delay is {self.delay}, expected 0 to {self.every - 1} steps: weights "
                "are to be here before their fragment leaves again"
            )
        if not 0 <= self.mix < 1:
            raise ValueError(f"thalweg: mix is {self.mix}, expected 0 or more, and less than 1")

    def leaves(self, fragment: int, step: int) -> bool:
        """Whether that fragment leaves after that step, counted from 1."""
        return step % self.every == (fragment + 1) * self.every // self.fragments % self.every


class Outer(NamedTuple):
    """The optimizer that shards run on what workers have changed."""

    name: str
    kind: str  # a key of KINDS
    options: Mapping[str, Any]  # arguments of torch's optimizer
    groups: Sequence[Group]  # one

    @classmethod
    def of(cls, wish: Mapping[str, Any], parameters: Sequence[Tensor]) -> Outer:
        """`wish` has the name, and arguments of torch's optimizer. Raises ValueError, and
        TypeError for those that it does not have.
        """
        options = dict(wish)
        name = options.pop("name", None)
        if name not in _OUTER:
            raise ValueError(f"thalweg: outer has name {name!r}, expected {', '.join(_OUTER)}")
        kind, defaults = _OUTER[name]
        options = defaults | options
        made = make(
            kind, list(parameters), options, f"LocalOptimizer(outer={{'name': {name!r}, …}})"
        )
        return cls(name, kind, options, made.param_groups)

    def describe(self) -> str:
        settings = {key: value for key, value in self.groups[0].items() if key != "params"}
        return "; ".join([f"outer {self.name}", *(f"{k} {v}" for k, v in settings.items())])


def cut_fragments(parameters: Sequence[Parameter], count: int) -> list[list[Parameter]]:
    """Returns `count` fragments of about as many bytes each, with parameters in their order.

    The largest parameters are dealt out first, each to the fragment that has least. Raises
    ValueError where there are fewer parameters than fragments.
    """
    if len(parameters) < count:
        raise ValueError(
            f"thalweg: fragments is {count}, but only {len(parameters)} parameters require a "
            "gradient"
        )
    places = sorted(range(len(parameters)), key=lambda place: -parameters[place].tensor.nbytes)
    having = [(0, fragment) for fragment in range(count)]  # bytes
    chosen: list[list[int]] = [[] for _ in range(count)]
    for place in places:
        size, fragment = having[0]
        chosen[fragment].append(place)
        heapq.heapreplace(having, (size + parameters[place].tensor.nbytes, fragment))
    return [[parameters[place] for place in sorted(own)] for own in chosen]
