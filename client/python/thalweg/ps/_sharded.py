"""What shards keep, as a checkpoint of which each worker writes and reads a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg._job import _collectives
from thalweg._job._collectives import Meeting
from thalweg.ps._bucket import Bucket
from thalweg.ps._rules import Kind
from thalweg.ps._serving import Serving
from thalweg.ps._shard_state import steps_of


class ShardedState:
    """A Stateful of torch.distributed.checkpoint. No worker has more of it than its part, which are
    whole parameters: each one's float32 weight, moments, and the steps done.
    """

    def __init__(
        self,
        serving: Serving,
        buckets: Sequence[Bucket],
        kind: Kind,
        optimizer: Optimizer,
        meeting: Meeting,
    ) -> None:
        self._serving = serving
        self._own = buckets[meeting.rank :: meeting.world]
        self._kind = kind
        self._optimizer = optimizer
        self._meeting = meeting

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's part, between two steps."""
        self._serving.wait()
        if not self._serving.state.is_published:
            _collectives.gather_made(self._publish, self._meeting)
        return {name: values for bucket in self._own for name, values in self._of(bucket)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives the shards this worker's part, and all parameters what they are then. All workers
        call it, between two steps. Raises on all.
        """
        _collectives.gather_made(lambda: self._write(state), self._meeting)
        self._serving.fetch(self._serving.updates)

    def _publish(self) -> None:
        self._serving.publish(self._optimizer.state)

    def _of(self, bucket: Bucket) -> list[tuple[str, dict[str, Tensor]]]:
        states, steps = bucket.read()
        found = []
        for each, weight, state in zip(bucket.parameters, bucket.weights(), states, strict=True):
            moments = {
                name: state.get(name, torch.zeros_like(weight))
                for name in self._moments(each.group)
            }
            done = {"step": torch.tensor(float(steps), device="cpu"), "weight": weight}
            found.append((each.name, moments | done))
        return found

    def _moments(self, group: int) -> tuple[str, ...]:
        has_them = self._optimizer.param_groups[group].get("momentum", 1) != 0
        return self._kind.moments if has_them else ()

    def _write(self, state: Mapping[str, Any]) -> None:
        for bucket in self._own:
            own = [state[each.name] for each in bucket.parameters]
            steps = steps_of(bucket.parameters, own)
            # Moments of parameters that have seen no step are zeros here, and none on the shards.
            moments = own if steps else [{}] * len(own)
            bucket.write([one["weight"] for one in own], moments, steps)
