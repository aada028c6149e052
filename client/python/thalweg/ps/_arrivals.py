"""New weights on their way from the shards, and who waits for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from thalweg.ps._bucket import Bucket
from thalweg.ps._step_faults import overtaking_of


class Arrivals:
    """The weights of a job that a worker has not put in place yet."""

    def __init__(
        self, buckets: Sequence[Bucket], fail: weakref.WeakMethod[Callable[[str], None]]
    ) -> None:
        """`fail` ends the job, and raises RuntimeError with what the script has done wrong."""
        self._buckets = buckets
        self._fail = fail
        self._bucket_of = {id(each.tensor): b for b in buckets for each in b.parameters}
        tensors = (each.tensor for bucket in buckets for each in bucket.parameters)
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._shares_memory = len(storages) < len(self._bucket_of)
        self._awaited: set[int] = set()  # ids of parameters whose new weights nobody has asked for

    def stats(self) -> dict[str, Any]:
        """Returns the seconds that this worker has waited for weights, and the same of each bucket,
        by the names of its first and last parameter, in the order of a forward pass.
        """
        waits: dict[str, float] = {}
        for bucket in reversed(self._buckets):
            first, last = bucket.parameters[-1].name, bucket.parameters[0].name
            waits[first if first == last else f"{first} … {last}"] = bucket.waited
        return {"pull_wait_seconds": sum(waits.values()), "pull_wait_seconds_of": waits}

    def expect(self, buckets: Collection[Bucket]) -> None:
        """Hears that new weights of these buckets are on their way."""
        self._awaited |= {id(each.tensor) for bucket in buckets for each in bucket.parameters}

    def forget(self) -> None:
        """Hears that none are on their way any more."""
        self._awaited.clear()

    def has(self, parameter: Tensor | None) -> bool:
        """Whether the parameter's new weights are on their way, and nobody has asked for them."""
        return id(parameter) in self._awaited

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def take(self, parameter: Tensor | None) -> None:
        """Waits for the weights of a parameter that is on its way. Raises RuntimeError."""
        self.land(self._bucket_of[id(parameter)])
        self._awaited.remove(id(parameter))

    def take_all(self) -> None:
        """Waits for the weights of all parameters. Raises RuntimeError."""
        for bucket in reversed(self._buckets):
            self.land(bucket)
        self._awaited.clear()

    def land(self, bucket: Bucket) -> None:
        """Waits for the bucket's weights if they are on their way, and puts them in place. Raises
        RuntimeError, also where other code has changed what they would replace.
        """
        fail = self._fail()
        if fail is not None and (fault := overtaking_of([bucket])):
            fail(fault)
        self._put(bucket)

    def leave(self) -> list[str]:
        """Waits for all that is on its way, because other nodes wait for this one's part in it, and
        puts weights in place if all have come. Returns the names of parameters that stay as other
        code has changed them since.
        """
        has_all = True
        for bucket in reversed(self._buckets):
            try:
                bucket.settle()
            except RuntimeError:
                has_all = False
        if not (has_all and self._awaited):
            return []
        for bucket in self._buckets:
            if not bucket.overtaken():
                self._put(bucket)
        return [name for bucket in self._buckets for name in bucket.overtaken()]

    def _put(self, bucket: Bucket) -> None:
        # A write to one of the views of a tensor counts as one to all of them.
        others = [b for b in self._buckets if self._shares_memory and not b.changed()]
        bucket.land()
        for other in others:
            other.remember()
