"""Defines systems that reduce one tensor over all workers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from thalweg import _C
from thalweg_bench import worker
from thalweg_bench.place import Place
from thalweg_bench.rows import BenchError
from thalweg_bench.worker import System, open_session

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PERIOD = 61  # not a divisor of any chunk size, so that a misplaced chunk is detected
_SPREAD = 7


def make_pattern(size: int, dtype: str) -> torch.Tensor:
    """Returns small integers that all workers share: made before the fork, they cost the workers
    nothing.

    Worker r contributes pattern + r + repeat: every partial sum of up to 64 workers is exact in
    fp32, and an encoded one is as inexact as its type.
    """
    tensor = torch.arange(size // DTYPES[dtype].itemsize, dtype=torch.float32)
    return tensor.remainder_(_PERIOD).to(DTYPES[dtype])


class _Reduce:
    """The input of one worker, and the check of the mean or sum over all workers."""

    def __init__(self, pattern: torch.Tensor, place: Place, size: int) -> None:
        pattern = pattern[: size // pattern.itemsize]
        self._pattern = pattern
        self._place = place
        self._offset = 0
        self.tensor = pattern.clone()
        self._tolerance = torch.finfo(pattern.dtype).eps

    def prepare(self, repeat: int) -> None:
        self._offset = repeat % _SPREAD
        torch.add(self._pattern, self._place.rank + self._offset, out=self.tensor)

    def compare(self, result: torch.Tensor, times: int) -> None:
        """Checks that `result` is `times` the mean."""
        size = self._place.world_size
        expected = times * ((size - 1) / 2 + self._offset)
        low, high = torch.sub(result, self._pattern, alpha=times, out=self.tensor).aminmax()
        # The result is rounded to the tensor's type, in which it is compared.
        largest = times * _PERIOD + expected
        allowed = 4 * self._tolerance * largest
        wrong = max(abs(float(low) - expected), abs(float(high) - expected))
        if not wrong <= allowed:  # so that NaN is wrong too
            raise BenchError(
                f"the result is wrong: off by {wrong:g}, expected at most {allowed:g} "
                f"(values up to {largest:g})"
            )


class _Thalweg(_Reduce):
    """In place, by the back end of torch.distributed."""

    def __init__(self, pattern: torch.Tensor, place: Place, size: int) -> None:
        super().__init__(pattern, place, size)
        self._session = open_session(place)
        self._group = _C.ProcessGroup(
            self._session,
            number=1,
            rank=place.rank,
            nodes=[rank // place.workers for rank in range(place.world_size)],
            name="bench",
            timeout=worker.TIMEOUT,
        )
        self._mean = dist.AllreduceOptions()
        self._mean.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def run(self) -> None:
        self._group.allreduce([self.tensor], self._mean).wait()

    def check(self) -> None:
        self.compare(self.tensor, 1)

    def close(self) -> None:
        self._session.close()


class _Gloo(_Reduce):
    def __init__(self, pattern: torch.Tensor, place: Place, size: int) -> None:
        super().__init__(pattern, place, size)
        self._times = place.world_size

    def run(self) -> None:
        dist.all_reduce(self.tensor)

    def check(self) -> None:
        self.compare(self.tensor, self._times)

    def close(self) -> None:
        pass


class _Memcpy:
    """One worker copies the bytes; the others are idle."""

    def __init__(self, pattern: torch.Tensor, place: Place, size: int) -> None:
        self._source = pattern[: size // pattern.itemsize]
        self._target = self._source.clone() if place.rank == 0 else None

    def prepare(self, repeat: int) -> None:
        pass

    def run(self) -> None:
        if self._target is not None:
            self._target.copy_(self._source)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def factories(pattern: torch.Tensor) -> dict[str, Callable[..., System]]:
    """Returns systems for a Worker, whose do_open() gives the size, at most the pattern's."""
    return {
        "thalweg": functools.partial(_Thalweg, pattern),
        "gloo": functools.partial(_Gloo, pattern),
        "memcpy": functools.partial(_Memcpy, pattern),
    }
