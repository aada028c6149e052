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

    @property
    def owes(self) -> bool:
        """Whether workers may have changed more than they have sent; equal on all of them."""
        return any(bucket.owes for bucket in self.buckets)

    def leave_whole(self, due: int) -> None:
        """Sends all that has not been sent, which is to be no step of the outer optimizer."""
        for bucket in self.buckets:
            bucket.push_rest()
        self.due = due

    def leave(self, factor: float, settings: int, due: int) -> None:
        for bucket in self.buckets:
            bucket.push_change(factor, settings)
        self.steps, self.work, self.due = 0, 0.0, due

    def state(self) -> dict[str, Any]:
        """Returns what load() takes."""
        left_out: dict[str, Tensor] = {}
        for bucket in self.buckets:
            left_out |= bucket.left_out()
        return {"steps": self.steps, "work": self.work, "due": self.due, "left_out": left_out}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.steps, self.work, self.due = (state[key] for key in ("steps", "work", "due"))
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
