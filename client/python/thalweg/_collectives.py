"""Exchanges values and failures between the workers of a process group.

All workers call these functions together. What raises on one raises on all: a worker's own error
there, and elsewhere a RuntimeError that names its rank. A worker that has only waited in vain
(TimeoutError) raises the error of a rank that failed in another way, because that is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


class Closable(Protocol):
    def close(self) -> None: ...


_Closable = TypeVar("_Closable", bound=Closable)


class _Failure(NamedTuple):
    """Tells the others why a worker failed."""

    text: str
    waited: bool  # for others, in vain


def gather(value: _T, group: dist.ProcessGroup) -> list[_T]:
    """Returns the values of all workers, by rank."""
    values: list[_T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]  # all_gather_object has filled every place


def gather_made(make: Callable[[], _T], group: dist.ProcessGroup) -> list[_T]:
    """Returns what `make` returns on all workers, by rank, if it has raised on none."""
    made, error = _attempt(make)
    answers = gather((made, _describe(error)), group)
    _raise_first(error, [failure for _, failure in answers])
    return [value for value, _ in answers]  # type: ignore[misc]  # `make` has returned everywhere


def together(make: Callable[[], _Closable | None], group: dist.ProcessGroup) -> _Closable | None:
    """Returns what `make` returns if it has raised on no worker; otherwise closes it."""
    made, error = _attempt(make)
    try:
        _raise_first(error, gather(_describe(error), group))
    except Exception:
        if made is not None:
            made.close()
        raise
    return made


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
