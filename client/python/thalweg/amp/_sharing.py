"""Gives all workers rank 0's masters, as DistributedDataParallel does with its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thalweg._torch import _patches
from thalweg.amp._masters import master_of


def share_when_distributed() -> None:
    """Gives all workers rank 0's masters whenever a DistributedDataParallel is built from now on.

    torch gives them rank 0's parameters only. Workers that were initialised with other seeds would
    round to the same parameters once, and diverge from there.
    """
    _patches.install("amp", DistributedDataParallel, "__init__", _build_and_share)


def share_masters(module: DistributedDataParallel) -> None:
    """Gives masters the bits of rank 0's. This is a collective over the module's process group."""
    pairs = [(param, master_of(param)) for param in module.module.parameters()]
    found = [(param, master) for param, master in pairs if master is not None]
    if not found or dist.get_world_size(module.process_group) == 1:
        return
    for param, master in found:
        master.follow(param)
    bytes_at_once = 250 << 20  # torch does the same with parameters
    weights = [master.weight.detach() for _, master in found]
    dist._broadcast_coalesced(  # type: ignore[attr-defined]
        module.process_group, weights, bytes_at_once, 0
    )
    for param, master in found:
        master.mark_equal(param)


def _build_and_share(
    build: Callable[..., None],
    module: DistributedDataParallel,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> None:
    build(module, *args, **kwargs)
    if kwargs.get("init_sync", True):
        share_masters(module)
