"""DistributedDataParallel makes replicas equal when it is built; their masters have to be, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thalweg.amp._masters import master_of


@functools.cache
def install() -> None:
    """From now on, building a DistributedDataParallel gives all workers rank 0's masters.

    torch gives them rank 0's parameters only. Workers that were initialised with other seeds would
    round to the same parameters once, and part from there.
    """
    build: Callable[..., None] = DistributedDataParallel.__init__

    @functools.wraps(build)
    def build_and_share(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        build(self, *args, **kwargs)
        if kwargs.get("init_sync", True):
            share_masters(self)

    DistributedDataParallel.__init__ = build_and_share  # type: ignore[method-assign]


def share_masters(module: DistributedDataParallel) -> None:
    """Collective over the module's process group; afterwards masters have the bits of rank 0's."""
    pairs = [(param, master_of(param)) for param in module.module.parameters()]
    found = [(param, master) for param, master in pairs if master is not None]
    if not found or dist.get_world_size(module.process_group) == 1:
        return
    for param, master in found:
        master.follow(param)
    bytes_at_once = 250 << 20  # as torch does with parameters
    weights = [master.weight.detach() for _, master in found]
    dist._broadcast_coalesced(  # type: ignore[attr-defined]
        module.process_group, weights, bytes_at_once, 0
    )
    for param, master in found:
        master.mark_equal(param)
