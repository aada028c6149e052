"""Exchanges values and failures between the workers of a process group.

All workers call these functions together. What raises on one raises on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


class Closable(Protocol):
    def close(self) -> None: ...


_Closable = TypeVar("_Closable", bound=Closable)


def gather(value: _T, group: dist.ProcessGroup) -> list[_T]:
    """Returns the values of all workers, by rank."""
    values: list[_T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]  # all_gather_object has filled every place


def gather_made(make: Callable[[], _T], group: dist.ProcessGroup) -> list[_T]:
    """Returns what `make` returns on all workers, by rank, if it has raised on none."""
    made, error = _attempt(make)
    answers = gather((made, _text(error)), group)
    _raise_first(error, [text for _, text in answers])
    return [value for value, _ in answers]  # type: ignore[misc]  # `make` has returned everywhere


def together(make: Callable[[], _Closable | None], group: dist.ProcessGroup) -> _Closable | None:
    """Returns what `make` returns if it has raised on no worker; otherwise closes it."""
    made, error = _attempt(make)
    try:
        _raise_first(error, gather(_text(error), group))
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


def _text(error: Exception | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def _raise_first(error: Exception | None, texts: Sequence[str]) -> None:
    """Raises the own error, else the first other one."""
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise RuntimeError(f"thalweg: rank {rank}: {text.removeprefix('thalweg: ')}")
