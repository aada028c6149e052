"""Means of what workers have changed that shards take, in the codecs of gradients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thalweg._attach import _codec_states
from thalweg._job import _buckets
from thalweg._job._member import Job
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
        self.of_buckets = beside_nothing(layouts, [_CodecMean(bucket) for bucket in buckets])

    def bytes_sent(self) -> int:
        """Returns what session.stats() does not count."""
        return 0

    def nonfinite_elems(self) -> int:
        """Returns what session.stats() does not count."""
        return 0

    def forget_rests(self) -> None:
        """The parameters are about to be others, equal on all workers: what the codec holds back of
        what has become of the former ones is forgotten. Counts of exchanges and factors stay.
        """
        if self._is_keeper:
            held = self._session.save_codec_state()
            self._session.load_codec_state(_codec_states.without_residuals(held))

    def state(self) -> dict[str, Any]:
        """Returns what the codec carries on this node; nothing on all workers but its first."""
        if not self._is_keeper:
            return {}
        held = self._session.save_codec_state()
        return {"codec": self._codec, "saved_by": self._me, "held": held}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, and from nothing where that has nothing. What another node holds back
        is left out, and that is said; counts of exchanges and factors, which are equal on all
        nodes, are then rank 0's. All workers call it. Raises ValueError on all.
        """
        shared = self._of_rank_0(state)
        if not self._is_keeper:
            return
        lost = is_lost(state, self._codec, self._me)
        if shared is None:  # nodes must count alike
            shared, lost = _codec_states.nothing(), True
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
    owes = False  # the codec's own residuals come with later exchanges

    def __init__(self, bucket: _buckets.Bucket) -> None:
        self._bucket = bucket
        self._coming: Future[list[Tensor]] | None = None

    def begin(self, values: Tensor, *, factor: float, whole: bool) -> None:
        self._coming = self._bucket.begin(values)

    def wait(self) -> Tensor:
        assert self._coming is not None
        [mean] = self._coming.wait()
        return mean

    def take_rest(self) -> None:
        pass


class _Nothing:
    """The mean of a bucket whose parameters have no elements."""

    owes = False

    def begin(self, values: Tensor, *, factor: float, whole: bool) -> None:
        pass

    def wait(self) -> Tensor:
        return torch.empty(0, device="cpu")

    def take_rest(self) -> None:
        pass


def beside_nothing(layouts: Layouts, means: Sequence[Mean]) -> list[Mean]:
    """Returns the mean of each bucket; `means` has those of the buckets that have elements."""
    rest = iter(means)
    return [next(rest) if layout else _Nothing() for layout in layouts]


def is_lost(state: Mapping[str, Any], codec: str, me: str) -> bool:
    """Returns whether what was held back is another's, and says so if there was anything."""
    if state.get("codec") == codec and state["saved_by"] == me:
        return False
    if state and not state["held"]:  # workers hold back nothing between their exchanges
        return True
    theirs = f"by {state['saved_by']} with {state['codec']}" if state else "by nobody"
    _log.warning(
        "what LocalOptimizer's codec holds back begins at zero: it was saved %s, and this is %s "
        "with %s (state_dict() of each worker, loaded by the same one, keeps it)",
        theirs,
        me,
        codec,
    )
    return True
