"""What the shards keep of an optimizer: checkpoints of it, and how it comes back from snapshots."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch import Tensor

from thalweg._attach import _codec_states
from thalweg._job import _collectives
from thalweg.optim._state import load_unrounded
from thalweg.ps import _joining
from thalweg.ps._committing import Committing
from thalweg.ps._fixed_groups import FixedGroups
from thalweg.ps._joining import Joined
from thalweg.ps._rolling_back import RolledBack, roll_back
from thalweg.ps._rules import KINDS
from thalweg.ps._serving import Serving
from thalweg.ps._shown_state import ShownState
from thalweg.ps._snapshot_files import read_latest
from thalweg.ps._snapshots import Snapshots
from thalweg.ps._upward import are_dense
from thalweg.ps._wishes import Wishes

_log = logging.getLogger("thalweg")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def or_rolled_back(
    method: Callable[Concatenate[Any, _P], _T],
) -> Callable[Concatenate[Any, _P], _T]:
    """Makes a method go back to a snapshot, and raise RolledBack, where shards lost weights."""

    @functools.wraps(method)
    def bearing(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _T:  # noqa: ANN401
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            if not self._serving.has_lost:
                raise
            step = self._go_back(str(error))
            raise RolledBack(step) from error

    return cast("Callable[Concatenate[Any, _P], _T]", bearing)


class KeptState(FixedGroups):
    """The part of ServerOptimizer that is about the state on the shards as a whole."""

    _wishes: Wishes
    _serving: Serving
    _committing: Committing
    _snapshots: Snapshots | None
    _rejoin: Callable[[], Joined]
    _joined: Joined

    @property
    def updates(self) -> int:
        """How many updates the weights have seen on the shards, since the optimizer was made. A
        step that a GradScaler leaves out is none.
        """
        return self._serving.updates

    def finish(self) -> None:
        """Waits for all workers' steps: then all have the same weights. Call it on all workers, at
        the end of a training, or before an evaluation or a checkpoint. TimeoutError: one has not
        come. RuntimeError, which ends the job: parameters have been changed by hand.
        """
        self._serving.wait()
        if self._serving.is_apart:
            self._serving.check_unchanged()
        self._serving.meet()
        if self._serving.is_apart and self._serving.state.is_published:
            self._serving.state.fetch()
            self._serving.meet()

    @or_rolled_back
    def publish(self) -> None:
        """Makes rank 0's parameters everybody's, and those of the shards when the next step's first
        gradient is pushed. Call it on all workers after changing parameters by hand. The shards'
        float32 weights of parameters that have not been changed stay.
        """
        self._recall()
        _joining.broadcast(self._wishes.group, self.param_groups)

    def _recall(self) -> None:
        """Takes the state from the shards, which get it again when the next step begins."""
        if self._serving.state.is_published:
            self._serving.wait()
            self._serving.meet()
            self._serving.state.read(self.state)
            self._serving.state.recall()
            self._forget_rests()

    def _forget_rests(self) -> None:
        """The weights are about to be others: what codecs hold back is of the former ones."""
        if self._joined.job.place.local_rank == 0 and not are_dense(self._joined.codecs):
            self._joined.session.load_codec_state(_codec_states.nothing())

    @or_rolled_back
    def state_dict(self) -> dict[str, Any]:
        """Returns what torch's optimizer of this kind returns. One worker may call it alone,
        between two steps.
        """
        if not self._serving.state.is_published:
            return super().state_dict()
        self._serving.wait()
        self._serving.state.read(self.state)
        try:
            return super().state_dict()
        finally:
            dict.clear(self.state)  # without a word

    @or_rolled_back
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what torch's optimizer of this kind returned. Call it on all workers; the shards
        get rank 0's, with its parameters, when the next step's first gradient is pushed.
        ValueError: parameters have seen different numbers of steps.
        """
        self._serving.wait()
        self._serving.meet()
        load_unrounded(self, super().load_state_dict, state_dict)
        self._show_state()
        self._serving.check_rule(self.param_groups)
        self._serving.state.check(self.state)
        self._serving.state.recall()
        self._forget_rests()

    def _show_state(self) -> None:
        """torch has made `state` a dictionary of its own."""
        self.state = ShownState(self.state, self._serving.state)

    @or_rolled_back
    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the float32 weights by name. One worker may call it alone, between two steps."""
        self._serving.wait()
        return self._serving.state.weights()

    @or_rolled_back
    def load_full_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Takes what full_state_dict() returned, and fills the parameters. Call it on all workers,
        with the same weights, after load_state_dict(), between two steps. Raises ValueError where
        names or shapes differ.
        """
        self._recall()
        self._serving.state.set_weights(weights)

    @or_rolled_back
    def load_snapshot(self, folders: Iterable[str | Path], *, identity: str | None = None) -> int:
        """Takes the latest snapshot that all shards of an earlier job have written to these
        folders, however many they were and are. Call it on all workers, between two steps; rank 0
        reads the folders. Returns after how many updates it is, from which `updates` goes on.
        `identity` says whose, where several jobs have some. Raises on all workers; on rank 0
        ValueError: there is none, or it is of other parameters or another optimizer.
        """
        self._serving.wait()
        meeting = self._joined.meeting
        read = functools.partial(self._read_snapshot, list(folders), identity)
        steps = _collectives.gather_made(read if meeting.rank == 0 else _nothing, meeting)[0]
        assert steps is not None
        if meeting.rank != 0:
            self._serving.state.await_first()
        _joining.broadcast(self._wishes.group, self.param_groups)
        self._serving.updates = steps
        self._forget_rests()
        return steps

    def _read_snapshot(self, folders: list[str | Path], identity: str | None) -> int:
        saved = read_latest(folders, KINDS[self._wishes.kind], identity)
        self._serving.state.load(saved, self.state)
        return saved.step

    def _begin_snapshots(
        self, joined: Joined, join: Callable[..., Joined], *, is_first: bool
    ) -> Snapshots | None:
        """Returns None where none are wanted. Raises RuntimeError on all workers where a shard can
        take none.
        """
        self._snapshots, self._joined = None, joined
        self._rejoin = functools.partial(join, secret=joined.job.secret)
        if joined.snapshot_every:
            if is_first and joined.no_way_back:
                _log.warning("job %s: %s", joined.job.name, joined.no_way_back)
            ask = joined.session.snapshots if is_first else list
            _collectives.gather_made(ask, joined.meeting)
            self._snapshots = Snapshots(joined.snapshot_every, is_first=is_first)
        return self._snapshots

    def _go_back(self, why: str) -> int:
        assert self._snapshots is not None
        dict.clear(self.state)
        self.zero_grad(set_to_none=True)  # others cannot be had in a step that is not over
        self._committing.forget_step()
        return roll_back(self._serving, self._snapshots, self._rejoin, self._joined.meeting, why)


def _nothing() -> int | None:
    return None
