"""What the shards keep of a job: float32 weights, the optimizer's state, and the steps done."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.ps._bucket import Bucket
from thalweg.ps._parameters import Parameter
from thalweg.ps._rules import Kind
from thalweg.ps._snapshot_files import Saved
from thalweg.ps._some import some

States = MutableMapping[Tensor, Any]  # a torch optimizer's state


class ShardState:
    """Reads and writes what the shards keep, between two steps."""

    def __init__(self, buckets: Sequence[Bucket], kind: Kind, *, is_first: bool) -> None:
        """`is_first`: this worker's weights and state become the shards'."""
        self._buckets = buckets
        self._kind = kind
        self._is_first = is_first
        self.is_published = False  # the shards have all of it
        # What publish() writes instead of a parameter, by name, unless somebody changes that first:
        # a parameter may be its weight rounded.
        self._weights: Mapping[str, Tensor] = {}

    def read(self, states: States) -> None:
        """Fills the state as torch has it."""
        for bucket in self._buckets:
            read, steps = bucket.read()
            if not steps:
                continue  # torch has no state of parameters that have seen no step
            for each, state in zip(bucket.parameters, read, strict=True):
                if self._kind.counts_steps:
                    state["step"] = torch.tensor(float(steps), device="cpu")
                states[each.tensor] = state

    def check(self, states: States) -> None:
        """Raises ValueError where the shards cannot have this state."""
        for bucket in self._buckets:
            steps_of(bucket.parameters, [states.get(p.tensor, {}) for p in bucket.parameters])

    def weights(self) -> dict[str, Tensor]:
        """Returns the float32 weights by name."""
        weights: dict[str, Tensor] = {}
        for bucket in self._buckets:
            values = bucket.weights() if self.is_published else self._unpublished(bucket)
            weights |= zip((each.name for each in bucket.parameters), values, strict=True)
        return weights

    def fetch(self) -> None:
        """The shards have a state of their own: makes parameters what they are after a step that
        resulted in it. Raises RuntimeError.
        """
        for bucket in self._buckets:
            bucket.place(bucket.weights())
        self._remember()
        self._weights = {}
        self.is_published = True

    def recall(self) -> None:
        """Lets the next step publish. The weights of parameters that nobody changes stay."""
        if self.is_published:
            self._weights = self.weights()
        self.is_published = False

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Makes parameters what they would be after a step that resulted in these float32 weights,
        which the next step publishes. ValueError: they are other parameters'.
        """
        expected = {each.name: each.tensor.shape for b in self._buckets for each in b.parameters}
        got = {name: values.shape for name, values in weights.items()}
        for name in expected | got:
            if expected.get(name) != got.get(name):
                raise ValueError(
                    f"thalweg: weights of {name}: expected {_shape(expected.get(name))}, got "
                    f"{_shape(got.get(name))}"
                )
        for bucket in self._buckets:
            bucket.place([weights[each.name] for each in bucket.parameters])
        self._remember()
        self._weights = {name: values.detach().float() for name, values in weights.items()}
        self.is_published = False

    def await_first(self) -> None:
        """The first worker has got other weights, which the next step publishes."""
        self._weights = {}
        self.is_published = False

    def load(self, saved: Saved, states: States) -> None:
        """Lets the next step publish what was saved. Call it on the first worker. ValueError: it is
        other parameters'.
        """
        self.set_weights(saved.weights)
        states.clear()
        for bucket in self._buckets:
            for each in bucket.parameters:
                states[each.tensor] = saved.states[each.name]

    def publish(self, states: States) -> None:
        """Makes the weights and the state of the first worker those of the shards."""
        if self._is_first:
            for bucket in self._buckets:
                known = [dict(states.get(each.tensor, {})) for each in bucket.parameters]
                bucket.write(self._unpublished(bucket), known, steps_of(bucket.parameters, known))
        self._remember()
        states.clear()
        self._weights = {}
        self.is_published = True

    def _remember(self) -> None:
        """All parameters are what they are to be. A write to one of several views of a tensor has
        counted as one to all of them.
        """
        for bucket in self._buckets:
            bucket.remember()

    def _unpublished(self, bucket: Bucket) -> list[Tensor]:
        own = [each.tensor.detach().float().clone() for each in bucket.parameters]
        if not self._weights:
            return own
        weights = [self._weights[each.name] for each in bucket.parameters]
        changed = set(bucket.differing(weights))
        return [
            tensor if each.name in changed else weight.clone()
            for each, tensor, weight in zip(bucket.parameters, own, weights, strict=True)
        ]


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(list(shape))


def steps_of(parameters: Sequence[Parameter], states: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many steps these parameters, which travel together, have seen. ValueError: not
    equally many; one without a state has seen none.
    """
    if not any("step" in state for state in states):
        # SGD only knows whether it has begun.
        return int(any(value is not None for state in states for value in state.values()))
    counts = [int(state.get("step", 0)) for state in states]
    if len(set(counts)) > 1:
        of_each = {count: each.name for each, count in zip(parameters, counts, strict=True)}
        texts = [f"{name} has seen {count} steps" for count, name in of_each.items()]
        raise ValueError(
            f"thalweg: {some(texts)}, and shards count the steps of parameters that travel "
            "together: make ServerOptimizer with find_unused_parameters=True"
        )
    return counts[0]
