"""Exchanges values and failures between the workers of a process group.

All workers call these functions together. What raises on one raises on all: a worker's own error
there, and elsewhere a RuntimeError that names its rank. A worker that has only waited in vain
(TimeoutError) raises the error of a rank that failed in another way, because that is the cause.

They meet through the store, because the group's own collectives would wait for a worker that hangs
as long as the group does, and not say which one it is.
"""

from __future__ import annotations

import base64
import math
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from thalweg._job import _rendezvous

_T = TypeVar("_T")


class Closable(Protocol):
    def close(self) -> None: ...


_Closable = TypeVar("_Closable", bound=Closable)


class Meeting(NamedTuple):
    """The workers of a process group, and how long they wait for one of them: twice `timeout`
    seconds, because what each does in between, such as connecting, waits no longer than that.
    """

    group: dist.ProcessGroup | None  # None: it is about to be made
    name: str
    rank: int
    world: int
    timeout: float
    shared: Store | None = None  # None: the default process group's store
    where: str = "the others inside attach()"  # in messages, as is what has the timeout
    variable: str = "THALWEG_TIMEOUT"
    quiet: float = math.inf  # seconds, after which it is said for whom they wait

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: float) -> Meeting:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        return cls(group, group.group_name, rank, world, timeout)


class _Failure(NamedTuple):
    """Tells the others why a worker failed."""

    text: str
    waited: bool  # for others, in vain


def gather(value: _T, workers: Meeting) -> list[_T]:
    """Returns the values of all workers, by rank. Raises TimeoutError, naming those that have not
    come.
    """
    try:
        store = workers.shared or _rendezvous.default_store()
    except RuntimeError:  # the group is MPI's; its collectives wait on their own terms
        values: list[_T | None] = [None] * workers.world
        dist.all_gather_object(values, value, group=workers.group)
        return values  # type: ignore[return-value]  # all_gather_object has filled every place
    texts = _rendezvous.gather(
        store,
        f"exchange/{workers.name}",
        base64.b85encode(zlib.compress(pickle.dumps(value))).decode(),
        where=workers.where,
        rank=workers.rank,
        world=workers.world,
        timeout=2 * workers.timeout,
        variable=workers.variable,
        quiet=workers.quiet,
    )
    return [pickle.loads(zlib.decompress(base64.b85decode(text))) for text in texts]


def gather_made(make: Callable[[], _T], workers: Meeting) -> list[_T]:
    """Returns what `make` returns on all workers, by rank, if it has raised on none."""
    made, error = _attempt(make)
    answers = _gather_after(error, (made, _describe(error)), workers)
    _raise_first(error, [failure for _, failure in answers])
    return [value for value, _ in answers]  # type: ignore[misc]  # `make` has returned everywhere


def together(make: Callable[[], _Closable | None], workers: Meeting) -> _Closable | None:
    """Returns what `make` returns if it has raised on no worker; otherwise closes it."""
    made, error = _attempt(make)
    try:
        _raise_first(error, _gather_after(error, _describe(error), workers))
    except Exception:
        if made is not None:
            made.close()
        raise
    return made


def _gather_after(error: Exception | None, value: _T, workers: Meeting) -> list[_T]:
    """As gather(), but a worker that has failed raises its own error where others do not come."""
    try:
        return gather(value, workers)
    except TimeoutError:
        if error is not None:
            raise error from None
        raise


def _attempt(make: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return make(), None
    except Exception as failure:  # noqa: BLE001 - all workers must hear of it before it is raised
        return None, failure


def _describe(error: Exception | None) -> _Failure | None:
    if error is None:
        return None
    return _Failure(str(error) or type(error).__name__, isinstance(error, TimeoutError))


def _raise_first(error: Exception | None, failures: Sequence[_Failure | None]) -> None:
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    causes = [(rank, failure) for rank, failure in failed if not failure.waited]
    if error is not None and (not causes or not isinstance(error, TimeoutError)):
        raise error
    for rank, failure in causes or failed:
        text = failure.text.removeprefix("thalweg: ")
        raise RuntimeError(f"thalweg: rank {rank}: {text}") from error
