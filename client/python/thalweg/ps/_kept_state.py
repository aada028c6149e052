"""What the shards keep of an optimizer: checkpoints of it, and how it comes back from snapshots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch import Tensor

from thalweg import _collectives
from thalweg.optim._state import load_unrounded
from thalweg.ps._committing import Committing
from thalweg.ps._fixed_groups import FixedGroups
from thalweg.ps._joining import Joined
from thalweg.ps._rolling_back import RolledBack, roll_back
from thalweg.ps._serving import Serving
from thalweg.ps._snapshots import Snapshots

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
        come.
        """
        self._serving.wait()
        if self._serving.meet() and self._serving.state.is_published:
            self._serving.state.fetch()
            self._serving.meet()

    @or_rolled_back
    def publish(self) -> None:
        """Makes rank 0's parameters, as they will be when the next step's first gradient is pushed,
        those of the shards. Call it on all workers after changing parameters by hand. The shards'
        float32 weights of parameters that have not been changed stay.
        """
        if self._serving.state.is_published:
            self._serving.wait()
            self._serving.meet()
            self._serving.state.read(self.state)
            self._serving.state.recall()

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
            self.state.clear()

    @or_rolled_back
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what torch's optimizer of this kind returned. Call it on all workers; the shards
        get rank 0's, with its parameters, when the next step's first gradient is pushed.
        """
        self._serving.wait()
        self._serving.meet()
        load_unrounded(self, super().load_state_dict, state_dict)
        self._serving.check_rule(self.param_groups)
        self._serving.state.recall()

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
        if self._serving.state.is_published:
            self.publish()  # keeps the optimizer's state
        self._serving.state.set_weights(weights)

    def _begin_snapshots(
        self, joined: Joined, join: Callable[..., Joined], *, is_first: bool
    ) -> Snapshots | None:
        """Returns None where none are wanted. Raises RuntimeError on all workers where a shard can
        take none.
        """
        self._snapshots, self._joined = None, joined
        self._rejoin = functools.partial(join, secret=joined.job.secret)
        if joined.snapshot_every:
            ask = joined.session.snapshots if is_first else list
            _collectives.gather_made(ask, joined.meeting)
            self._snapshots = Snapshots(joined.snapshot_every, is_first=is_first)
        return self._snapshots

    def _go_back(self, why: str) -> int:
        assert self._snapshots is not None
        self.state.clear()
        self.zero_grad()
        self._committing.forget_step()
        return roll_back(self._serving, self._snapshots, self._rejoin, self._joined.meeting, why)
