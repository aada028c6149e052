"""Knows which jobs average a parameter's gradients: modules that share it have one each."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from thalweg._attach._state import State

# By parameter: those whose codec counts steps, in the order of attach().
_jobs: WeakIdKeyDictionary = WeakIdKeyDictionary()


class AttachedModule:
    """A module and its state, neither of which it keeps alive."""

    def __init__(self, module: DistributedDataParallel, state: State) -> None:
        self._module = weakref.ref(module)
        self._state = weakref.ref(state)
        self.parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for parameter in module.parameters():
            self.parameters[parameter] = None

    @property
    def state(self) -> State | None:
        """The state, until it is closed."""
        state = self._state()
        return None if state is None or state.closed else state

    def goes_on_beside(self, later: DistributedDataParallel) -> bool:
        """Returns whether it still averages gradients when `later` is attached, which may share
        parameters with it. A module that is wrapped anew takes its place, whoever keeps it.
        """
        module = self._module()
        return module is not None and self.state is not None and module.module is not later.module

    def has_parameters_of(self, other: AttachedModule) -> bool:
        return len(self.parameters) == len(other.parameters) and all(
            parameter in other.parameters for parameter in self.parameters
        )


def begin(module: DistributedDataParallel, state: State) -> None:
    """Notes that a module is attached, and forgets those in whose place it is."""
    new = AttachedModule(module, state)
    replaced = {job for p in new.parameters for job in jobs_of(p) if not job.goes_on_beside(module)}
    for job in replaced:
        for parameter in job.parameters:
            _jobs[parameter].remove(job)
    if state.rides:
        for parameter in new.parameters:
            _jobs.setdefault(parameter, []).append(new)


def jobs_of(parameter: torch.Tensor) -> list[AttachedModule]:
    """Returns the modules that have the parameter, also those whose jobs have ended since."""
    found: list[AttachedModule] = _jobs.get(parameter, [])
    return found


def job_of(module: DistributedDataParallel, state: State) -> AttachedModule | None:
    """Returns what begin() has noted, if it is not forgotten."""
    found = (job for p in module.parameters() for job in jobs_of(p) if job.state is state)
    return next(found, None)


def number_of(job: AttachedModule) -> int:
    """Returns how many of the same parameters were attached before it and have not trained yet."""
    number = 0
    for other in jobs_of(next(iter(job.parameters))):
        if other is job:
            break
        waits = other.state is not None and not other.state.has_trained
        number += waits and other.has_parameters_of(job)
    return number
