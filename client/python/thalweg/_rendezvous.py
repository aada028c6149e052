"""Workers meet through the process group's store, within a deadline, and learn who is missing.

The group's collectives may need a device that the script has not chosen, and their own timeout is
half an hour.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_meetings: collections.Counter[str] = collections.Counter()  # by process group and occasion


def default_store() -> Store:
    """Returns the store of the default process group. Raises RuntimeError for MPI's."""
    store: Store | None = dist.distributed_c10d._get_default_store()
    if store is None:
        raise RuntimeError("thalweg: MPI process groups have no store: use gloo or nccl")
    return store


def missing(shared: Store, keys: Sequence[str], timeout: float) -> list[int]:
    """Returns the places of those keys that nobody has set within `timeout` seconds."""
    try:
        shared.wait(list(keys), timedelta(seconds=timeout))
    except RuntimeError:
        return [place for place, key in enumerate(keys) if not shared.check([key])]
    return []


def next_key(occasion: str, group: dist.ProcessGroup) -> str:
    """Returns a key for this meeting, equal on all workers if they have met equally often."""
    name = f"thalweg/{occasion}/{group.group_name}"
    _meetings[name] += 1
    return f"{name}/{_meetings[name]}"


def meet(shared: Store, key: str, *, rank: int, world: int, timeout: float) -> None:
    """Returns when all workers have called it with this key.

    Raises TimeoutError, which names the ranks that have not, after `timeout` seconds. A worker that
    comes after that gets TimeoutError as well, at once.
    """
    keys = [f"{key}/{other}" for other in range(world)]
    given_up = f"{key}/given up"
    shared.set(keys[rank], "1")
    absent = missing(shared, keys, timeout)
    if absent:
        shared.set(given_up, "1")
        raise TimeoutError(
            f"thalweg: rank {', '.join(map(str, absent))} has not come to attach() within "
            f"{timeout:g} s (THALWEG_TIMEOUT). All workers must attach, which without code they do "
            "in their first training step: a worker that has no batch at all, or is later than "
            "that, cannot take part"
        )
    if shared.check([given_up]):
        raise TimeoutError(
            f"thalweg: rank {rank} has come to attach() when others had waited {timeout:g} s for "
            "it (THALWEG_TIMEOUT), and had given up"
        )
