"""Keeps what optimizers have loaded of codecs, until the modules of their parameters go on from it.

Each piece is of one module. Some of its parameters may be those of another module as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_loaded: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter: a list of Loaded


class Loaded:
    """What an optimizer's checkpoint has of one module."""

    def __init__(self, riding: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """`parameters` are those of the optimizer."""
        self.riding = riding
        self.parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the module
        self._others: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the optimizer
        places = set(riding["parameters"])
        for place, parameter in enumerate(parameters):
            (self.parameters if place in places else self._others)[parameter] = None

    def is_of(self, module: WeakIdKeyDictionary) -> bool:
        """Returns whether these are the parameters that the optimizer updates of a module."""
        return self._are_in(module) and not self._lacks(module)

    def may_be_of(self, module: WeakIdKeyDictionary) -> bool:
        """The same, but the module may have been frozen or unfrozen in part since."""
        return self._are_in(module) or not self._lacks(module)

    def _are_in(self, module: WeakIdKeyDictionary) -> bool:
        return all(parameter in module for parameter in self.parameters)

    def _lacks(self, module: WeakIdKeyDictionary) -> bool:
        return any(parameter in module for parameter in self._others)


def put(ridings: Iterable[Mapping[str, Any]], parameters: Sequence[torch.Tensor]) -> None:
    """Keeps what an optimizer of these parameters has loaded, instead of what it had before."""
    for one in {one for parameter in parameters for one in loaded_for(parameter)}:
        _forget(one)
    for riding in ridings:
        one = Loaded(riding, parameters)
        for parameter in one.parameters:
            _loaded.setdefault(parameter, []).append(one)


def loaded_for(parameter: torch.Tensor) -> list[Loaded]:
    found: list[Loaded] = _loaded.get(parameter, [])
    return found


def find(module: WeakIdKeyDictionary, number: int) -> list[Loaded]:
    """Returns what a module of these parameters is to go on from; several optimizers may have it.
    Of what is for the same parameters it is for the module of this number.
    """
    every = list(dict.fromkeys(one for parameter in module for one in loaded_for(parameter)))
    if found := _choose(every, lambda one: one.is_of(module), number):
        return found
    found = _choose(every, lambda one: one.may_be_of(module), number)
    return [one for one in found if one.riding["shared"] == found[0].riding["shared"]]


def take(module: WeakIdKeyDictionary, number: int) -> Mapping[str, Any] | None:
    """Returns what a module goes on from, and forgets it."""
    found = find(module, number)
    for one in found:
        _forget(one)
    return found[0].riding if found else None


def _choose(every: Sequence[Loaded], fits: Callable[[Loaded], bool], number: int) -> list[Loaded]:
    """Returns, of those that fit and are for the same parameters, the one of this number."""
    chosen: list[Loaded] = []
    left = [one for one in every if fits(one)]
    while left:
        alike = [one for one in left if _are_same(one, left[0])]
        chosen += alike[number : number + 1]
        left = [one for one in left if one not in alike]
    return chosen


def _are_same(one: Loaded, other: Loaded) -> bool:
    return len(one.parameters) == len(other.parameters) and all(
        parameter in other.parameters for parameter in one.parameters
    )


def _forget(one: Loaded) -> None:
    for parameter in list(one.parameters):
        kept = [other for other in loaded_for(parameter) if other is not one]
        if kept:
            _loaded[parameter] = kept
        else:
            _loaded.pop(parameter, None)
