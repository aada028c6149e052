"""Defines systems that do one collective of torch.distributed, and check what it gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg import _C
from thalweg_bench import worker
from thalweg_bench.place import Place
from thalweg_bench.rows import BenchError
from thalweg_bench.worker import Factories, System, open_session

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PERIOD = 61  # not a divisor of any chunk size, so that a misplaced chunk is detected
_SPREAD = 7  # inputs differ from repeat to repeat
_MEAN = dist.AllreduceOptions()
_MEAN.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)


def make_pattern(size: int, dtype: str) -> Tensor:
    """Returns small integers that all workers share: made before the fork, they cost the workers
    nothing.

    Worker r contributes pattern + r + repeat: every partial sum of up to 64 workers is exact in
    fp32, and an encoded one is as inexact as its type.
    """
    tensor = torch.arange(size // _DTYPES[dtype].itemsize, dtype=torch.float32)
    return tensor.remainder_(_PERIOD).to(_DTYPES[dtype])


class Collective:
    """One worker's part in a collective. Rank r gives pattern + r + repeat, or a part of that."""

    def __init__(self, kind: Kind, backend: Any, pattern: Tensor, place: Place) -> None:  # noqa: ANN401
        self._kind, self._backend = kind, backend
        self._pattern = pattern
        self.rank, self.world = place.rank, place.world_size
        self._own = len(pattern) // self.world  # elements of what belongs to one rank
        self._offset = 0
        self.given = pattern[: self._own * self.world].clone() if kind.gets else pattern.clone()
        parts = {"part": 1, "all": self.world}.get(kind.gets)
        self.got = torch.zeros(self._own * parts) if parts else self.given

    def prepare(self, repeat: int) -> None:
        self._offset = repeat % _SPREAD
        torch.add(self._pattern[: len(self.given)], self.rank + self._offset, out=self.given)

    def run(self) -> None:
        self._kind.start(self, self._backend).wait()

    def check(self) -> None:
        expected = self._kind.expected(self)
        if expected is None:
            return
        largest = float(expected.max())
        low, high = torch.sub(self.got, expected, out=expected).aminmax()
        wrong = max(-float(low), float(high))
        # The result is rounded to the tensor's type, in which it is compared.
        allowed = 4 * torch.finfo(self._pattern.dtype).eps * largest
        if not wrong <= allowed:  # so that NaN is wrong too
            raise BenchError(
                f"the result is wrong: off by {wrong:g}, expected at most {allowed:g} "
                f"(values up to {largest:g})"
            )

    def close(self) -> None:
        if isinstance(self._backend, _Ours):
            self._backend.session.close()

    def of(self, rank: int) -> Tensor:
        """Returns what a rank gives, if it gives all."""
        return self._pattern + (rank + self._offset)

    def reduced(self, times: float = 1) -> Tensor:
        """Returns `times` the mean of what all give."""
        mean_rank = (self.world - 1) / 2
        return (self._pattern * times).add_(times * (mean_rank + self._offset))

    def part(self, whole: Tensor, rank: int) -> Tensor:
        return whole[rank * self._own : (rank + 1) * self._own]

    def parts(self, of_rank: Callable[[int], int]) -> Tensor:
        """Returns the parts that all ranks give, `of_rank` says which."""
        return torch.cat([self.part(self.of(rank), of_rank(rank)) for rank in range(self.world)])


@dataclass(frozen=True)
class Kind:
    """A collective: how it is begun with a back end, and what this rank then has."""

    start: Callable[[Collective, Any], Any]
    expected: Callable[[Collective], Tensor | None]  # None: this rank gets nothing
    gets: str = ""  # "part" or "all" of what all ranks give; empty: in the place of what it gives


KINDS = {
    "all_reduce": Kind(
        lambda c, backend: backend.allreduce([c.given], dist.AllreduceOptions()),
        lambda c: c.reduced(c.world),
    ),
    "all_gather": Kind(
        lambda c, backend: backend._allgather_base(c.got, c.part(c.given, c.rank)),
        lambda c: c.parts(lambda rank: rank),
        "all",
    ),
    "reduce_scatter": Kind(
        lambda c, backend: backend._reduce_scatter_base(c.got, c.given),
        lambda c: c.part(c.reduced(c.world), c.rank),
        "part",
    ),
    "broadcast": Kind(
        lambda c, backend: backend.broadcast([c.given], dist.BroadcastOptions()),
        lambda c: c.of(0),
    ),
    "reduce": Kind(
        lambda c, backend: backend.reduce([c.given], dist.ReduceOptions()),
        lambda c: c.reduced(c.world) if c.rank == 0 else None,
    ),
    "all_to_all": Kind(
        lambda c, backend: backend.alltoall_base(c.got, c.given, [], []),
        lambda c: c.parts(lambda _: c.rank),
        "all",
    ),
    "barrier": Kind(lambda _, backend: backend.barrier(dist.BarrierOptions()), lambda _: None),
}
MEAN = Kind(lambda c, backend: backend.allreduce([c.given], _MEAN), lambda c: c.reduced())


class _Memcpy(Collective):
    """One worker copies the bytes; the others are idle."""

    def run(self) -> None:
        if self.rank == 0:
            self.got.copy_(self._pattern)

    def check(self) -> None:
        pass


class _Ours(_C.ProcessGroup):
    """Thalweg's back end, with a session of its own."""

    def __init__(self, place: Place) -> None:
        self.session = open_session(place)
        super().__init__(
            self.session,
            number=1,
            rank=place.rank,
            nodes=[rank // place.workers for rank in range(place.world_size)],
            name="bench",
            timeout=worker.TIMEOUT,
        )


def _gloo(_: Place) -> Any:  # noqa: ANN401
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def factories(pattern: Tensor) -> Factories:
    """Returns the systems for a Worker, whose do_open() gives the bytes, at most the pattern's:
    "thalweg", which averages; "gloo", which adds up; "memcpy"; and for each collective "thalweg
    all_reduce", "gloo all_reduce" and so on.
    """

    def make(place: Place, size: int, *, kind: Kind, backend: Callable[[Place], Any]) -> System:
        return Collective(kind, backend(place), pattern[: size // pattern.itemsize], place)

    def memcpy(place: Place, size: int) -> System:
        return _Memcpy(MEAN, None, pattern[: size // pattern.itemsize], place)

    systems: dict[str, Callable[..., System]] = {
        "thalweg": functools.partial(make, kind=MEAN, backend=_Ours),
        "gloo": functools.partial(make, kind=KINDS["all_reduce"], backend=_gloo),
        "memcpy": memcpy,
    }
    for name, kind in KINDS.items():
        systems[f"thalweg {name}"] = functools.partial(make, kind=kind, backend=_Ours)
        systems[f"gloo {name}"] = functools.partial(make, kind=kind, backend=_gloo)
    return systems
