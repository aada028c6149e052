"""Parameters that workers exchange together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thalweg.ps._local_bucket import LocalBucket


@dataclass
class Fragment:
    """Parameters that are exchanged together."""

    buckets: Sequence[LocalBucket]
    steps: int = 0  # since it has left
    work: float = 0.0  # that the worker has counted since then
    due: int | None = None  # the step after which its new weights take their place
    was_owing: bool = False  # by the state that was loaded; the codec of now may not know

    @property
    def owes(self) -> bool:
        """Whether workers may have changed more than they have sent; equal on all of them."""
        return any(bucket.owes for bucket in self.buckets)

    @property
    def has_rest(self) -> bool:
        """Whether workers have changed it before they began with the codec of now, with which that
        leaves as what they change; equal on all of them if they are in the same step.
        """
        return self.was_owing and not self.owes

    def leave_whole(self, due: int) -> None:
        """Sends all that has not been sent, which is to be no step of the outer optimizer."""
        for bucket in self.buckets:
            bucket.push_rest()
        self.due, self.was_owing = due, False

    def leave(self, factor: float, settings: int, due: int) -> None:
        for bucket in self.buckets:
            bucket.push_change(factor, settings)
        self.steps, self.work, self.due, self.was_owing = 0, 0.0, due, False

    def state(self) -> dict[str, Any]:
        """Returns what load() takes."""
        left_out: dict[str, Tensor] = {}
        for bucket in self.buckets:
            left_out |= bucket.left_out()
        owes = self.owes or self.was_owing
        counts = {"steps": self.steps, "work": self.work, "due": self.due}
        return counts | {"owes": owes, "left_out": left_out}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.steps, self.work, self.due = (state[key] for key in ("steps", "work", "due"))
        self.was_owing = state.get("owes", False)
        for bucket in self.buckets:
            bucket.load_left_out(state.get("left_out", {}))

    def arrive(self) -> None:
        """Waits until the new weights are here. The parameters stay."""
        for bucket in self.buckets:
            bucket.land()

    def land(self, mix: float) -> None:
        """Puts the new weights in place, with `mix` of what is there."""
        self.arrive()
        for bucket in self.buckets:
            bucket.merge(mix)
        self.due = None
