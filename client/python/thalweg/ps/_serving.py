"""The steps of an optimizer whose work shards do: what is pushed when, and what must stay."""

from __future__ import annotations

import os
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg import _C
from thalweg.ps._bucket import Bucket, Parameter
from thalweg.ps._rules import Group, Kind, Rule, rule_of, settings_of

States = MutableMapping[Tensor, Any]  # a torch optimizer's state


class Serving:
    """The buckets of a job whose weights are on the shards, from one worker's side.

    A method that finds the script at fault ends the job, whose other workers would wait for this
    one, and raises RuntimeError.
    """

    def __init__(
        self,
        session: _C.Session,
        buckets: Sequence[Bucket],
        kind: Kind,
        rule: Rule,
        *,
        is_first: bool,
    ) -> None:
        """`is_first`: this worker's weights become the shards'."""
        self._session = session
        self._buckets = buckets
        self._kind = kind
        self._rule = rule
        self._is_first = is_first
        self._finalizer = weakref.finalize(self, _close, session, os.getpid())
        self._loss_scale = 0.0
        self._pushed = 0  # buckets of this step
        self.is_published = False  # the shards have the weights
        self._versions = self._present_versions()
        self._settings: list[dict[str, float]] = []
        self._settings_number = 0

    @property
    def is_idle(self) -> bool:
        """Whether no gradient of the next step has been gathered."""
        return all(bucket.is_empty for bucket in self._buckets)

    def close(self) -> None:
        self._finalizer()

    def note_precision(self, loss_scale: float, skipped_steps: int) -> None:
        """Hears of the loss scalers of this process, before gradients carry the scale."""
        self._loss_scale = loss_scale

    def gather(
        self, bucket: Bucket, parameter: Parameter, groups: Sequence[Group], states: States
    ) -> None:
        """Takes a parameter's gradient, and pushes the buckets that are full."""
        if self.is_idle:
            self._begin_step(groups, states)
        bucket.gather(parameter)
        # All workers push in the same order, whatever their backward passes do.
        while self._pushed < len(self._buckets) and self._buckets[self._pushed].is_full:
            self._buckets[self._pushed].push(self._settings_number)
            self._pushed += 1

    def finish_step(self, groups: Sequence[Group]) -> None:
        """Waits for the new weights, and puts them in place."""
        self._check_step(groups)
        for bucket in self._buckets:
            bucket.pull()
        self._pushed = 0
        self._versions = self._present_versions()

    def load_state(self, states: States) -> None:
        """Fills the state as torch has it, from the shards."""
        for bucket in self._buckets:
            read, steps = bucket.read()
            for each, state in zip(bucket.parameters, read, strict=True):
                if self._kind.native == "adam":
                    state["step"] = torch.tensor(float(steps))
                states[each.tensor] = state

    def weights(self) -> dict[str, Tensor]:
        """Returns the float32 weights by name."""
        weights: dict[str, Tensor] = {}
        for bucket in self._buckets:
            values = bucket.weights() if self.is_published else []
            for index, each in enumerate(bucket.parameters):
                local = each.tensor.detach().float().clone()
                weights[each.name] = values[index] if values else local
        return weights

    def check_rule(self, groups: Sequence[Group]) -> None:
        rule = rule_of(groups)
        if rule != self._rule:
            self._fail(f"the groups have {rule}, but were made with {self._rule}: make a new one")

    def check_open(self) -> None:
        """Raises RuntimeError when the job is over."""
        if not self._finalizer.alive:
            raise RuntimeError("thalweg: this ServerOptimizer has been closed")
        failure = self._session.status()
        if failure is not None:
            raise RuntimeError(f"thalweg: {failure}")

    def _begin_step(self, groups: Sequence[Group], states: States) -> None:
        self.check_open()
        if self._loss_scale not in {0.0, 1.0}:
            self._fail(
                f"gradients carry a loss scale of {self._loss_scale:g}, which ServerOptimizer does "
                "not undo: train without GradScaler, in bfloat16"
            )
        if self.is_published:
            self._check_unchanged()
        else:
            self._publish(states)
        settings = settings_of(self._kind, groups)
        if settings != self._settings:
            self.check_rule(groups)
            self._settings_number += 1
            self._settings = settings
            self._session.set_settings(self._settings_number, settings)

    def _publish(self, states: States) -> None:
        if self._is_first:
            for bucket in self._buckets:
                known = [dict(states.get(each.tensor, {})) for each in bucket.parameters]
                bucket.write(known, _steps(known))
        states.clear()
        self.is_published = True

    def _check_step(self, groups: Sequence[Group]) -> None:
        missing = [name for bucket in self._buckets for name in bucket.missing()]
        if missing:
            self._fail(
                f"{_some(missing)} got no gradient in this step: shards update all parameters that "
                "required one when ServerOptimizer was made (freeze others before)"
            )
        overwritten = [name for bucket in self._buckets for name in bucket.overwritten()]
        if overwritten:
            self._fail(
                f"{_some(overwritten)} got another gradient after it was pushed: is the model in "
                "DistributedDataParallel? ServerOptimizer takes its place"
            )
        if settings_of(self._kind, groups) != self._settings:
            self._fail(
                "a group's settings have changed between backward() and step(), when the shards "
                "had used the former ones: change them before backward(), or after step()"
            )

    def _check_unchanged(self) -> None:
        now = self._present_versions()
        for each, before, version in zip(self._parameters(), self._versions, now, strict=True):
            if before != version:
                self._fail(
                    f"{each.name} has been changed since the last step, and the shards do not know "
                    "that: call publish() on all workers after changing parameters"
                )

    def _fail(self, why: str) -> None:
        self.close()
        raise RuntimeError(f"thalweg: {why}")

    def _parameters(self) -> list[Parameter]:
        return [each for bucket in self._buckets for each in bucket.parameters]

    def _present_versions(self) -> list[int]:
        return [each.tensor._version for each in self._parameters()]


def _steps(states: list[dict[str, Any]]) -> int:
    """Returns how many steps these states have seen, all the same. Raises ValueError."""
    found = {int(state["step"]) for state in states if "step" in state}
    if len(found) > 1:
        raise ValueError(f"thalweg: parameters have done {_some(sorted(map(str, found)))} steps")
    if found:
        return found.pop()
    # SGD only knows whether it has begun.
    return int(any(value is not None for state in states for value in state.values()))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _close(session: _C.Session, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not touch its parent's session
        session.close()
