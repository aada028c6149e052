"""Means of what workers have changed, and what their codecs hold back of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thalweg import _C
from thalweg._attach import _codec_states
from thalweg._job import _buckets
from thalweg._job._member import Job
from thalweg._torch import _nonfinite
from thalweg.codecs import Sparse
from thalweg.ps._entries import Entries
from thalweg.ps._kept import Mean

_log = logging.getLogger("thalweg")
# Names and shapes of each bucket's parameters that have elements.
Layouts = Sequence[Sequence[tuple[str, torch.Size]]]


class CodecMeans:
    """Means in the codec of the job's session, a bucket each."""

    def __init__(self, job: Job, group: dist.ProcessGroup, layouts: Layouts) -> None:
        assert job.session is not None
        self._session = job.session
        self._group = group
        self._is_keeper = job.place.local_rank == 0
        size = f"{len(job.workers)} workers on {job.place.num_nodes} nodes"
        self._me = f"the first worker of node {job.place.node} of {size}"
        self._codec = job.workers[0].codec
        buckets = _buckets.make(self._session, [each for each in layouts if each], group)
        self.of_buckets = _beside_nothing(layouts, [_CodecMean(bucket) for bucket in buckets])

    def bytes_sent(self) -> int:
        """Returns what session.stats() does not count."""
        return 0

    def nonfinite_elems(self) -> int:
        """Returns what session.stats() does not count."""
        return 0

    def state(self) -> dict[str, Any]:
        """Returns what the codec carries on this node; nothing on all workers but its first."""
        if not self._is_keeper:
            return {}
        held = self._session.save_codec_state()
        return {"codec": self._codec, "saved_by": self._me, "held": held}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. What another node holds back is left out, and that is said; counts of
        exchanges and factors, which are equal on all nodes, are then rank 0's. All workers call it.
        Raises ValueError on all.
        """
        shared = self._of_rank_0(state)
        if not self._is_keeper:
            return
        lost = _is_lost(state, self._codec, self._me)
        # Without rank 0's nobody loads: nodes must count alike.
        if shared is not None:
            self._session.load_codec_state(shared if lost else state["held"])

    def _of_rank_0(self, state: Mapping[str, Any]) -> bytes | None:
        """Returns what rank 0's state has that is equal on all nodes."""
        found: list[Any] = [None]
        if dist.get_rank(self._group) == 0 and state.get("codec") == self._codec:
            try:
                found = [_codec_states.without_residuals(state["held"])]
            except ValueError as error:
                found = [error]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        if isinstance(found[0], ValueError):
            raise found[0]
        shared: bytes | None = found[0]
        return shared


class _CodecMean:
    def __init__(self, bucket: _buckets.Bucket) -> None:
        self._bucket = bucket
        self._coming: Future[list[Tensor]] | None = None

    def begin(self, values: Tensor) -> None:
        self._coming = self._bucket.begin(values)

    def wait(self) -> Tensor:
        assert self._coming is not None
        [mean] = self._coming.wait()
        return mean


class SparseMeans:
    """Means of entries that every worker sends to all others, a bucket each."""

    def __init__(self, job: Job, layouts: Layouts, codec: Sparse) -> None:
        assert job.session is not None
        place = job.place
        rank = place.ranks[place.local_rank]
        self._me = f"rank {rank} of {len(job.workers)}"
        self._codec = codec.spec()
        group = _C.ProcessGroup(
            job.session,
            number=1,  # all workers
            rank=rank,
            nodes=list(job.nodes),
            name="changes",
            timeout=job.workers[0].step_timeout,
        )
        filled = [layout for layout in layouts if layout]
        self._names = [[name for name, _ in layout] for layout in filled]
        self._coders = [Entries([shape.numel() for _, shape in each], codec) for each in filled]
        self._means = [_SparseMean(group, each, len(job.workers)) for each in self._coders]
        self.of_buckets = _beside_nothing(layouts, self._means)
        self._copies = (place.num_nodes - 1) * place.local_size

    def bytes_sent(self) -> int:
        """Returns what session.stats() does not count: what this node has sent to others."""
        return self._copies * sum(each.sent for each in self._means)

    def nonfinite_elems(self) -> int:
        """Returns what session.stats() does not count: NaN and infinities in means."""
        return sum(each.nonfinite for each in self._means)

    def state(self) -> dict[str, Any]:
        """Returns what this worker holds back, by parameter."""
        held: dict[str, Tensor] = {}
        for names, coder in zip(self._names, self._coders, strict=True):
            held |= zip(names, (part.clone() for part in coder.split_held()), strict=True)
        return {"codec": self._codec, "saved_by": self._me, "held": held}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. What another worker holds back is left out, and that is said."""
        lost = _is_lost(state, self._codec, self._me)
        for names, coder in zip(self._names, self._coders, strict=True):
            for name, part in zip(names, coder.split_held(), strict=True):
                if lost:
                    part.zero_()
                else:
                    part.copy_(state["held"][name])


class _SparseMean:
    def __init__(self, group: _C.ProcessGroup, coder: Entries, workers: int) -> None:
        self._group, self._coder = group, coder
        self._got = torch.empty(workers, coder.payload_bytes, dtype=torch.uint8, device="cpu")
        self._work: dist.Work | None = None
        self.sent = 0  # bytes of this worker
        self.nonfinite = 0  # elements of means

    def begin(self, values: Tensor) -> None:
        self._work = self._group._allgather_base(self._got.flatten(), self._coder.encode(values))
        self.sent += self._coder.payload_bytes

    def wait(self) -> Tensor:
        assert self._work is not None
        self._work.wait()
        mean = torch.zeros(self._coder.elements, device="cpu")
        for payload in self._got:
            places, values = self._coder.decode(payload)
            mean[places] += values  # no place comes twice
        mean /= len(self._got)
        self.nonfinite += int(_nonfinite.count(mean))
        return mean


class _Nothing:
    """The mean of a bucket whose parameters have no elements."""

    def begin(self, values: Tensor) -> None:
        pass

    def wait(self) -> Tensor:
        return torch.empty(0, device="cpu")


Means = CodecMeans | SparseMeans


def _beside_nothing(layouts: Layouts, means: Sequence[Mean]) -> list[Mean]:
    """Returns the mean of each bucket; `means` has those of the buckets that have elements."""
    rest = iter(means)
    return [next(rest) if layout else _Nothing() for layout in layouts]


def _is_lost(state: Mapping[str, Any], codec: str, me: str) -> bool:
    """Returns whether what was held back is another's, and says so."""
    if state.get("codec") == codec and state["saved_by"] == me:
        return False
    theirs = f"by {state['saved_by']} with {state['codec']}" if state else "by nobody"
    _log.warning(
        "what LocalOptimizer's codec holds back begins at zero: it was saved %s, and this is %s "
        "with %s (state_dict() of each worker, loaded by the same one, keeps it)",
        theirs,
        me,
        codec,
    )
    return True
