"""The steps of an optimizer whose work shards do: what is pushed when, and what must stay."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from thalweg import _C
from thalweg._torch import _precision
from thalweg.ps import _step_faults
from thalweg.ps._arrivals import Arrivals
from thalweg.ps._bucket import Bucket
from thalweg.ps._leaving import leaving
from thalweg.ps._left import is_unused, left, sparse_fault
from thalweg.ps._look import Look
from thalweg.ps._pace import Apart
from thalweg.ps._parameters import Parameter
from thalweg.ps._rules import Group, Kind, Rule, rule_of
from thalweg.ps._shard_state import ShardState, States
from thalweg.ps._snapshots import Snapshots
from thalweg.ps._step_faults import change_of, failing, fault_of, without
from thalweg.ps._step_settings import StepSettings
from thalweg.ps._trust import trust_ratios
from thalweg.ps._unused import Used


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
        commits: bool,
        is_first: bool,
        snapshots: Snapshots | None = None,
        apart: Apart | None = None,
        used: Used | None = None,
    ) -> None:
        """`commits`: gradients are looked at as a whole before any weight changes. `is_first`: this
        worker's weights become the shards'. With `snapshots`, what shards have lost is no failure
        before step(). `apart`: nodes need not be in the same step. `used`: not all parameters need
        gradients; then each has a bucket of its own, and `commits`.
        """
        self._buckets = buckets
        self._kind, self._rule = kind, rule
        self._commits, self._snapshots = commits, snapshots
        self._apart, self._used = apart, used
        self.asked_by = ""  # the variable that has moved a script's optimizer to the shards
        self.state = ShardState(buckets, kind, is_first=is_first)
        self.updates = 0  # steps that the shards have done, and that have ended here
        self._look: Look | None = None
        self._arrivals = Arrivals(buckets, weakref.WeakMethod(self.fail))
        self._parameters = [each for bucket in buckets for each in bucket.parameters]
        self._enter(session)

    def _enter(self, session: _C.Session) -> None:
        """Begins in a session whose buckets are empty."""
        self._session = session
        self._finalizer = leaving(self, session, self._arrivals, keeps=bool(self._snapshots))
        self._end_step()
        self._arrivals.forget()
        last = self._apart.series if self._apart else 0
        self._settings = StepSettings(session, self._kind, self._parameters, last)

    def reconnect(self, session: _C.Session) -> None:
        """Goes on in another session, between two steps. Raises RuntimeError."""
        self._enter(session)
        for bucket in self._buckets:
            bucket.connect(session)

    def fetch(self, updates: int) -> None:
        """Makes parameters what they are after so many updates, whose weights the shards have."""
        self.state.fetch()
        self.updates = updates
        self._note_new_state()

    def publish(self, states: States) -> None:
        """Makes the first worker's weights, and its part of `states`, those of the shards."""
        self.state.publish(states)
        self._note_new_state()

    def _note_new_state(self) -> None:
        if self._snapshots is not None:
            self._snapshots.note_new_state(self.updates)

    def meet(self) -> None:
        """Returns when all nodes are here, if they may be apart. Raises TimeoutError."""
        if self._apart:
            self._apart.meet()

    @property
    def has_lost(self) -> bool:
        """Whether shards have lost weights of which there are snapshots."""
        return self._snapshots is not None and self._session.has_lost_weights()

    @property
    def is_idle(self) -> bool:
        """Whether no gradient of the next step has been gathered."""
        return all(bucket.is_empty for bucket in self._buckets)

    def stats(self) -> dict[str, Any]:
        """Returns what the session has counted, and how long this worker has waited for weights."""
        return _precision.shown(self._session.stats()) | self._arrivals.stats()

    def close(self, *, gives_up: bool = False) -> None:
        """Leaves the job. Snapshots stay where the worker gives up, which waits for nothing."""
        if gives_up:
            (self._session.abort if self._snapshots else self._session.close)()
        self._finalizer()

    def note_precision(self, loss_scale: float, skipped_steps: int) -> None:
        """Hears of loss scalers. What has been gathered carries what it did before."""
        scale = loss_scale if self.is_idle else self._session.stats()["loss_scale"]
        self._session.note_precision(scale, skipped_steps)

    @property
    def loss_scale(self) -> float:
        """What gradients carry, as far as this process knows."""
        return _precision.carried()

    def gather(
        self, bucket: Bucket, parameter: Parameter, groups: Sequence[Group], states: States
    ) -> None:
        """Takes a parameter's gradient, and pushes the buckets that are full."""
        try:
            self._gather(bucket, parameter, groups, states)
        except RuntimeError:
            if not self.has_lost:
                raise

    def complete(self, groups: Sequence[Group], states: States) -> None:
        """Pushes what the backward passes have left; zeros, too, if not all need gradients."""
        asks = self._used is not None and not self._used.is_asked
        for bucket, each in left(self._buckets, groups, with_none=asks):
            if fault := sparse_fault(each):
                self.fail(fault)
            if self._arrivals.has(each.tensor) and is_unused(each):
                self._arrivals.take(each.tensor)  # nothing in this step has waited for it
            self._gather(bucket, each, groups, states)
        if self._used is not None and asks:
            self._used.ask()

    def _gather(
        self, bucket: Bucket, parameter: Parameter, groups: Sequence[Group], states: States
    ) -> None:
        if self.is_idle:
            self._begin_step(groups, states)
        if self._arrivals.has(parameter.tensor) and parameter.has_gradient:
            self.fail(f"{parameter.name} {_step_faults.USED_TOO_EARLY}")
        if bucket.has(parameter):
            self.fail(f"{parameter.name} {_step_faults.PUSHED_TWICE}")
        if bucket.gather(parameter) and self._used:
            self._used.note(parameter)
        # All workers push in the same order, whatever their backward passes do.
        while self._pushed < len(self._buckets) and self._buckets[self._pushed].is_full:
            self._buckets[self._pushed].push(0 if self._commits else self._settings.number)
            self._pushed += 1

    def look(self, groups: Sequence[Group]) -> Look:
        """Waits for what the step's gradients are as a whole. Requires `commits`."""
        if self._look is None:
            self._check_step(groups)
            self._look = Look.at(self._buckets, groups, self._used)
        return self._look

    def skip_step(self) -> None:
        """Lets the weights stay as they are."""
        for bucket in self._buckets:
            bucket.drop()
        self._end_step()

    def finish_step(
        self, groups: Sequence[Group], *, grad_scale: float = 1.0, max_grad_norm: float = 0.0
    ) -> None:
        """From now on the new weights are on their way."""
        updated = self._buckets
        if self._commits:
            squares, updated = self.look(groups).squares, self.look(groups).buckets
            of_all = {
                "grad_scale": grad_scale,
                "max_grad_norm": max_grad_norm,
                "grad_squares": squares if max_grad_norm else 0.0,
            }
            ratios = None
            if self._kind.measures:
                self._announce(groups, None, measures=True, **of_all)
                ratios = trust_ratios(updated, groups, self._settings.number)
            self._announce(groups, ratios, **of_all)
            for bucket in self._buckets:
                if bucket not in updated:
                    bucket.drop()
            for bucket in reversed(updated):  # the order in which a forward pass needs them
                bucket.commit(self._settings.number)
        else:
            self._check_step(groups)
            for bucket in self._buckets:
                bucket.expect()
        self._arrivals.expect(updated)
        self._end_step()

    def wait(self) -> None:
        """Waits for all weights that are on their way, and puts them in place."""
        self._arrivals.take_all()

    def wait_for(self, parameters: Iterable[Tensor | None]) -> None:
        """Does so for those that these parameters are among."""
        if not self._arrivals:
            return
        for parameter in parameters:
            if self._arrivals.has(parameter):
                try:
                    self._arrivals.take(parameter)
                except RuntimeError:
                    if not self.has_lost:
                        raise

    def _end_step(self) -> None:
        self._pushed = 0  # buckets of this step
        self._look = None
        if self._used:
            self._used.forget()

    def check_rule(self, groups: Sequence[Group]) -> None:
        rule = rule_of(groups)
        if rule != self._rule:
            self.fail(f"the groups have {rule}, but were made with {self._rule}: make a new one")

    def check_unchanged(self) -> None:
        """Ends the job where parameters have been changed since the shards have got all."""
        if self.state.is_published and (fault := change_of(self._buckets)):
            self.fail(fault)

    @property
    def is_apart(self) -> bool:
        """Whether nodes may be in different steps."""
        return self._apart is not None

    @property
    def is_over(self) -> bool:
        return not self._finalizer.alive or self._session.status() is not None

    def check_open(self) -> None:
        """Raises RuntimeError when the job is over."""
        if not self._finalizer.alive:
            raise RuntimeError("thalweg: this optimizer has been closed")
        if (failure := self._session.status()) is not None:
            raise RuntimeError(f"thalweg: {failure}")

    def _begin_step(self, groups: Sequence[Group], states: States) -> None:
        self.check_open()
        self._session.note_precision(_precision.followed(), 0)
        if self.loss_scale != 1 and not self._commits:
            self.fail(_step_faults.scaled(self.loss_scale))
        if self.state.is_published:
            self.check_unchanged()
        else:
            self.meet()  # nobody pushes while weights change
            with failing(self.fail):
                self.publish(states)
            self.meet()
        if self._snapshots is not None and self._snapshots.is_due(self.updates):
            for bucket in self._buckets:  # then no shard has an update left to do
                self._arrivals.land(bucket)
            self._snapshots.take(self._session, self.updates)
        if not self._commits:
            self._announce(groups)

    def number_of(self, groups: Sequence[Group], **of_all: float) -> int:
        """Returns shards' number of what these groups have now, and `of_all`; `anew`: a new one."""
        self._announce(groups, None, **of_all)
        return self._settings.number

    def _announce(
        self, groups: Sequence[Group], ratios: Mapping[int, float] | None = None, **of_all: float
    ) -> None:
        """Lets the shards know the settings, if they have changed."""
        if not self._settings.are(groups, ratios, **of_all):
            self.check_rule(groups)
            self._settings.announce(groups, ratios, **of_all)

    def _check_step(self, groups: Sequence[Group]) -> None:
        if fault := fault_of(self._buckets):
            self.fail(fault)
        if not self._commits and not self._settings.are(groups):
            self.fail(_step_faults.OTHER_SETTINGS)

    def fail(self, why: str) -> None:
        self.close(gives_up=True)
        raise RuntimeError(f"thalweg: {why}{without(self.asked_by)}")
