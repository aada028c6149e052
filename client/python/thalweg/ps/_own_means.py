"""Means of what workers have changed that workers take themselves: each sends to all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thalweg import _C
from thalweg._job import _buckets
from thalweg._job._member import Job
from thalweg._torch import _nonfinite
from thalweg.codecs import OfWorkers, Signs, Sparse
from thalweg.ps._entries import Entries
from thalweg.ps._means import CodecMeans, Layouts, beside_nothing, is_lost
from thalweg.ps._signs import SignBlocks
from thalweg.ps._unsent import Unsent


class Coder(Protocol):
    """Writes float32 changes, [elements], as bytes. `turn` counts a bucket's exchanges."""

    elements: int

    def encode(self, changes: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        """Returns the payload, uint8 and of the same size on all workers, and what of the changes
        it does not have.
        """

    def add(self, payload: Tensor, turn: int, total: Tensor) -> None:
        """Adds to float32 `total`, [elements], what the payload has. Raises RuntimeError where it
        is none.
        """


_CODERS: dict[type[OfWorkers], Callable[..., Coder]] = {Sparse: Entries, Signs: SignBlocks}


class OwnMeans:
    """Means in a codec of workers, a bucket each.

    What a worker does not send stays in its own weights, and is a part of what it has changed in
    the next exchange.
    """

    def __init__(
        self,
        job: Job,
        group: dist.ProcessGroup,
        layouts: Layouts,
        codec: OfWorkers,
        *,
        weighted: bool,
    ) -> None:
        """`weighted`: workers count in the mean by what they have done."""
        assert job.session is not None
        place = job.place
        rank = place.ranks[place.local_rank]
        self._me = f"rank {rank} of {len(job.workers)}"
        self._codec = codec.spec()
        self._group = group
        everybody = _C.ProcessGroup(
            job.session,
            number=1,  # all workers
            rank=rank,
            nodes=list(job.nodes),
            name="changes",
            timeout=job.workers[0].step_timeout,
        )
        filled = [layout for layout in layouts if layout]
        make = _CODERS[type(codec)]
        coders: list[Coder] = [make([shape for _, shape in each], codec) for each in filled]
        whole = _Whole(job.session, filled, group)
        self._means = [
            _OwnMean(everybody, coder, len(job.workers), whole, number, weighted=weighted)
            for number, coder in enumerate(coders)
        ]
        self._shapes = [dict(layout) for layout in filled]
        self.of_buckets = beside_nothing(layouts, self._means)
        self._copies = (place.num_nodes - 1) * place.local_size

    def bytes_sent(self) -> int:
        """Returns what session.stats() does not count: what this node has sent to others."""
        return self._copies * sum(each.sent for each in self._means)

    def nonfinite_elems(self) -> int:
        """Returns what session.stats() does not count: NaN and infinities in means."""
        return sum(each.nonfinite for each in self._means)

    def forget_rests(self) -> None:
        """The parameters are about to be equal on all workers."""
        for mean in self._means:
            mean.rest, mean.unsent, mean.owes = None, Unsent(), False

    def state(self) -> dict[str, Any]:
        """Returns how far the exchanges are, and by parameter what this worker has not sent of
        changes that are on their way ("held"). "counted" is what it has not sent as it counts in
        the mean, and by what that is to be divided.
        """
        turns: dict[str, tuple[int, bool]] = {}
        held: dict[str, Tensor] = {}
        counted: dict[str, tuple[Tensor, float]] = {}
        for shapes, mean in zip(self._shapes, self._means, strict=True):
            turns |= dict.fromkeys(shapes, (mean.turn, mean.owes))
            held |= _by_name(shapes, mean.rest)
            unsent = _by_name(shapes, mean.unsent.values)
            counted |= {name: (each, mean.unsent.divisor) for name, each in unsent.items()}
        saved = {"codec": self._codec, "saved_by": self._me}
        return saved | {"turns": turns, "held": held, "counted": counted}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, in rank 0's turns. What another worker has not sent is left out, and
        that is said, but for what is in the parameters that were saved with it. All workers call
        it.
        """
        turns = self._turns_of_rank_0(state)
        owes = any(owes for _, owes in turns.values())
        held = state["held"] if owes and "turns" in state else {}
        counted = state.get("counted", {})
        if held and is_lost(state, state["codec"], self._me):
            counted = {name: each for name, each in counted.items() if name not in held}
            held = {}
        for shapes, mean in zip(self._shapes, self._means, strict=True):
            mean.turn, _ = turns.get(next(iter(shapes)), (0, False))
            mean.owes = any(name in turns and turns[name][1] for name in shapes)
            mean.rest = _flat(shapes, held)
            mean.unsent = _unsent(shapes, counted)

    def _turns_of_rank_0(self, state: Mapping[str, Any]) -> Mapping[str, tuple[int, bool]]:
        mine = state.get("turns", {})
        if state.get("codec") != self._codec:  # which has other parts, and counts from 0
            mine = {name: (0, owes) for name, (_, owes) in mine.items()}
        found: list[Any] = [mine if dist.get_rank(self._group) == 0 else None]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        turns: Mapping[str, tuple[int, bool]] = found[0]
        return turns


Means = CodecMeans | OwnMeans


def warn_of_loss(state: Mapping[str, Any], rank: int) -> None:
    """Says that what was held back is lost, if shards have no place for it."""
    if state.get("held"):
        is_lost(state, "a codec of floats", f"rank {rank}")


def _by_name(shapes: Mapping[str, torch.Size], values: Tensor | None) -> dict[str, Tensor]:
    if values is None:
        return {}
    parts = values.split([shape.numel() for shape in shapes.values()])
    return {name: part.clone() for name, part in zip(shapes, parts, strict=True)}


def _flat(shapes: Mapping[str, torch.Size], parts: Mapping[str, Tensor]) -> Tensor | None:
    """Returns what _by_name() was given."""
    own = [parts[name].flatten() for name in shapes if name in parts]
    return torch.cat(own) if own else None


def _unsent(
    shapes: Mapping[str, torch.Size], counted: Mapping[str, tuple[Tensor, float]]
) -> Unsent:
    own = {name: counted[name] for name in shapes if name in counted}
    divisors = {divisor for _, divisor in own.values()}
    result = Unsent()
    if len(divisors) == 1:  # several buckets were one then: it counts as what comes next
        result.values = _flat(shapes, {name: values for name, (values, _) in own.items()})
        [result.divisor] = divisors
    return result


class _Whole:
    """Means of all that there is, in float32, which shards take. All workers use it in the same
    order. Nothing is there before the first one.
    """

    def __init__(self, session: _C.Session, layouts: Layouts, group: dist.ProcessGroup) -> None:
        self._session, self._layouts, self._group = session, layouts, group
        self._buckets: list[_buckets.Bucket] = []

    def begin(self, number: int, values: Tensor) -> Future[list[Tensor]]:
        self._buckets = self._buckets or _buckets.make(self._session, self._layouts, self._group)
        return self._buckets[number].begin(values)


class _OwnMean:
    def __init__(
        self,
        group: _C.ProcessGroup,
        coder: Coder,
        workers: int,
        whole: _Whole,
        number: int,
        *,
        weighted: bool = False,
    ) -> None:
        self._group, self._coder, self._workers = group, coder, workers
        self._whole, self._number = whole, number
        self._coming: Future[list[Tensor]] | None = None  # of all that there is
        self._work: dist.Work | None = None
        self.turn = 0
        self.owes = False  # workers may have more than they have sent
        self.rest: Tensor | None = None  # of changes that are on their way
        self._weighted = weighted
        self.unsent = Unsent()  # if weighted
        self.sent = 0  # bytes of this worker
        self.nonfinite = 0  # elements of means

    def begin(self, values: Tensor, *, factor: float, whole: bool) -> None:
        self.owes = not whole
        if whole:
            if self._weighted:
                values, self.unsent = values * self.unsent.divisor, Unsent()
            self._coming = self._whole.begin(self._number, values)
            return
        if self._weighted:
            values = self.unsent.join(values, factor)
        payload, self.rest = self._coder.encode(values, self.turn)
        if self._weighted:
            self.unsent.values, self.rest = self.rest, self.rest / self.unsent.divisor
        self._got = torch.empty(self._workers, len(payload), dtype=torch.uint8, device="cpu")
        self._work = self._group._allgather_base(self._got.flatten(), payload)
        self.sent += len(payload)

    def wait(self) -> Tensor:
        if self._coming is not None:
            [mean] = self._coming.wait()
            self._coming = None
            return mean
        assert self._work is not None
        self._work.wait()
        mean = torch.zeros(self._coder.elements, device="cpu")
        for payload in self._got:
            self._coder.add(payload, self.turn, mean)
        self.turn += 1
        mean /= self._workers
        self.nonfinite += int(_nonfinite.count(mean))
        return mean

    def take_rest(self) -> Tensor | None:
        rest, self.rest = self.rest, None
        return rest
