"""Copies batches to a device before they are asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_iter, tree_map_only

_Batch = TypeVar("_Batch")


class _Ahead(NamedTuple):
    """A batch whose copy may still be under way."""

    batch: Any
    copied: torch.cuda.Event | None


class DevicePrefetcher(Generic[_Batch]):
    """Iterates over a loader's batches, whose tensors it copies to `device` `depth` batches ahead.

    Batches are tensors, or tuples, lists and dictionaries that contain some; all else in them stays
    as it is. Copies to a GPU go through pinned memory on a stream of their own, so that they take
    place beside computation; let the loader pin (`pin_memory=True`), which it does in a thread. On
    the CPU batches are only loaded ahead: they are the loader's own tensors, which it must not fill
    anew for the batches that follow. Loading happens in the thread that iterates, so that
    random numbers are drawn in the same order in every run; give the loader `num_workers` to load
    beside computation.

    Each iter() starts the loader anew. Errors of the loader are raised when the batch that they
    belong to is asked for.

    Attributes:
        loader: what was given.
        device: where tensors go.
        batches: how many batches have been taken, in all iterations.
        wait_seconds: how long taking these waited for the loader, without the first `depth` of
            every iteration, with which nothing can overlap.
        fill_seconds: how long these first ones took.
    """

    def __init__(
        self, loader: Iterable[_Batch], device: torch.device | str = "cpu", *, depth: int = 2
    ) -> None:
        """Raises ValueError unless `depth` is a positive whole number, and RuntimeError for an
        unknown device.
        """
        if depth < 1 or depth != int(depth):
            raise ValueError(f"thalweg: depth is {depth!r}, expected a whole number, 1 or more")
        self.loader = loader
        self.device = torch.device(device)
        self.batches = 0
        self.wait_seconds = 0.0
        self.fill_seconds = 0.0
        self._depth = depth
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __len__(self) -> int:
        """Returns the loader's length. Raises TypeError if it has none."""
        return len(self.loader)  # type: ignore[arg-type]  # it says so itself

    def __iter__(self) -> Generator[_Batch, None, None]:
        started = time.perf_counter()
        source = iter(self.loader)
        ahead: deque[_Ahead] = deque()
        failure: Exception | None = None
        while failure is None and len(ahead) < self._depth:
            failure = self._load(source, ahead)
        self.fill_seconds += time.perf_counter() - started
        while ahead:
            taken = ahead.popleft()
            if failure is None:
                started = time.perf_counter()
                failure = self._load(source, ahead)
                self.wait_seconds += time.perf_counter() - started
            self.batches += 1
            yield self._arrived(taken)
        if not isinstance(failure, StopIteration):
            assert failure is not None
            raise failure

    def _load(self, source: Iterator[_Batch], ahead: deque[_Ahead]) -> Exception | None:
        """Appends the next batch; returns what the loader raised instead of giving one."""
        try:
            batch = next(source)
        except Exception as failure:  # noqa: BLE001 - it is raised where its batch is due
            return failure
        ahead.append(self._send(batch))
        return None

    def _send(self, batch: _Batch) -> _Ahead:
        """Begins to copy a batch."""
        if self._stream is None:
            return _Ahead(tree_map_only(torch.Tensor, lambda t: t.to(self.device), batch), None)
        with torch.cuda.stream(self._stream):
            copy = tree_map_only(torch.Tensor, self._send_tensor, batch)
            return _Ahead(copy, self._stream.record_event())

    def _send_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _arrived(self, ahead: _Ahead) -> _Batch:
        """Makes the current stream wait for a copy, and keeps its memory while that stream uses
        it.
        """
        if ahead.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ahead.copied)
            for leaf in tree_iter(ahead.batch):
                if isinstance(leaf, torch.Tensor):
                    leaf.record_stream(current)
        batch: _Batch = ahead.batch
        return batch
