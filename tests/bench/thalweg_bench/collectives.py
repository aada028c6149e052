"""Defines systems that do one collective of torch.distributed, and check what it gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg import _C
from thalweg_bench import worker
from thalweg_bench.allreduce import make_pattern
from thalweg_bench.place import Place
from thalweg_bench.rows import BenchError
from thalweg_bench.worker import System, open_session

_SPREAD = 7  # inputs differ from repeat to repeat; sums of up to 64 workers stay exact in fp32


class _Collective:
    """One worker's part in a collective of `pattern`, whose values are small integers.

    Rank r gives pattern + r + repeat, or a part of that.
    """

    def __init__(self, backend: Any, pattern: Tensor, place: Place) -> None:  # noqa: ANN401
        self.backend = backend
        self.pattern = pattern
        self.rank, self.world = place.rank, place.world_size
        self.own = len(pattern) // self.world  # elements of what belongs to one rank
        self._offset = 0

    def given(self, rank: int) -> Tensor:
        return self.pattern + (rank + self._offset)

    def summed(self) -> Tensor:
        ranks = self.world * (self.world - 1) / 2
        return self.pattern * self.world + (ranks + self.world * self._offset)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        return whole[rank * self.own : (rank + 1) * self.own]

    def prepare(self, repeat: int) -> None:
        self._offset = repeat % _SPREAD
        self.fill()

    def fill(self) -> None:
        self.tensor = self.given(self.rank)

    def expected(self) -> Tensor | None:
        """Returns what `tensor` must be afterwards; None: this rank gets nothing."""
        raise NotImplementedError

    def run(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        expected = self.expected()
        if expected is not None and not torch.equal(self.tensor, expected):
            wrong = int((self.tensor != expected).sum())
            raise BenchError(f"{wrong} of {expected.numel()} elements are wrong")

    def close(self) -> None:
        """The back end is everybody's."""


class _AllReduce(_Collective):
    def run(self) -> None:
        self.backend.allreduce([self.tensor], dist.AllreduceOptions()).wait()

    def expected(self) -> Tensor:
        return self.summed()


class _Reduce(_Collective):
    def run(self) -> None:
        self.backend.reduce([self.tensor], dist.ReduceOptions()).wait()

    def expected(self) -> Tensor | None:
        return self.summed() if self.rank == 0 else None


class _Broadcast(_Collective):
    def run(self) -> None:
        self.backend.broadcast([self.tensor], dist.BroadcastOptions()).wait()

    def expected(self) -> Tensor:
        return self.given(0)


class _AllGather(_Collective):
    def fill(self) -> None:
        self._mine = self.part(self.given(self.rank), self.rank).clone()
        self.tensor = torch.zeros(self.own * self.world)

    def run(self) -> None:
        self.backend._allgather_base(self.tensor, self._mine).wait()

    def expected(self) -> Tensor:
        return torch.cat([self.part(self.given(rank), rank) for rank in range(self.world)])


class _ReduceScatter(_Collective):
    def fill(self) -> None:
        self._all = self.given(self.rank)[: self.own * self.world]
        self.tensor = torch.zeros(self.own)

    def run(self) -> None:
        self.backend._reduce_scatter_base(self.tensor, self._all).wait()

    def expected(self) -> Tensor:
        return self.part(self.summed(), self.rank)


class _AllToAll(_Collective):
    def fill(self) -> None:
        self._all = self.given(self.rank)[: self.own * self.world]
        self.tensor = torch.zeros(self.own * self.world)

    def run(self) -> None:
        self.backend.alltoall_base(self.tensor, self._all, [], []).wait()

    def expected(self) -> Tensor:
        return torch.cat([self.part(self.given(rank), self.rank) for rank in range(self.world)])


class _Barrier(_Collective):
    def run(self) -> None:
        self.backend.barrier(dist.BarrierOptions()).wait()

    def expected(self) -> None:
        return None


KINDS: dict[str, type[_Collective]] = {
    "all_reduce": _AllReduce,
    "all_gather": _AllGather,
    "reduce_scatter": _ReduceScatter,
    "broadcast": _Broadcast,
    "reduce": _Reduce,
    "all_to_all": _AllToAll,
    "barrier": _Barrier,
}


class _Thalweg:
    """Opens the worker's session once, for all collectives."""

    def __init__(self) -> None:
        self._group: _C.ProcessGroup | None = None

    def group(self, place: Place) -> _C.ProcessGroup:
        if self._group is None:
            nodes = [rank // place.workers for rank in range(place.world_size)]
            self._group = _C.ProcessGroup(
                open_session(place),
                number=1,
                rank=place.rank,
                nodes=nodes,
                name="bench",
                timeout=worker.TIMEOUT,
            )
        return self._group


def factories(size: int) -> dict[str, Callable[..., System]]:
    """Returns the systems for a Worker, whose do_open() gives the collective's name and its bytes,
    at most `size`. Their names are "thalweg all_reduce", "gloo all_reduce" and so on.
    """
    pattern, ours = make_pattern(size, "fp32"), _Thalweg()

    def open_ours(place: Place, bytes_: int, *, kind: type[_Collective]) -> System:
        return kind(ours.group(place), pattern[: bytes_ // 4], place)

    def open_gloo(place: Place, bytes_: int, *, kind: type[_Collective]) -> System:
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        return kind(backend, pattern[: bytes_ // 4], place)

    return {
        f"{system} {name}": functools.partial(make, kind=kind)
        for system, make in (("thalweg", open_ours), ("gloo", open_gloo))
        for name, kind in KINDS.items()
    }
