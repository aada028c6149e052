"""Finds what the workers of a profiled training exchange, and through whom."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_LOCAL_HEAD = "optimizers step on each worker alone, and Thalweg exchanges what they have changed"
_SERVED_HEAD = "Thalweg's shards take gradients and step: the optimizer's phase waits for weights"


@dataclass(frozen=True)
class Exchange:
    """What is exchanged: gradients that are averaged, gradients for weights, or weights alone."""

    kind: Literal["averaged", "served", "local"]
    codec: str = ""  # of gradients that Thalweg's hook averages, in text; empty: it averages none
    averager: str = ""  # the back end that averages gradients without a hook; empty: none does

    @property
    def averages(self) -> bool:
        """Whether workers average gradients in every step."""
        return self.kind == "averaged"

    def said(self) -> str:
        """Returns what a report says of it."""
        if self.kind == "local":
            return _LOCAL_HEAD
        if self.kind == "served":
            return _SERVED_HEAD
        if self.codec:
            return f"codec {self.codec}"
        return f"torch averages gradients{self.averager and f' over {self.averager}'}"


class _Counting(Protocol):
    def stats(self) -> dict[str, float]: ...


def find(modules: Sequence[DistributedDataParallel], optimizers: Sequence[Optimizer]) -> Exchange:
    """Returns what the workers of a training exchange that has these."""
    from thalweg import ddp

    for optimizer in _of_shards(modules, optimizers):
        return Exchange("served" if _is_served(optimizer) else "local")
    for module in modules:
        if state := ddp.state_of(module):
            return Exchange("averaged", codec=state.codec)
    back_ends = (dist.get_backend(module.process_group) for module in modules)
    return Exchange("averaged", averager=next(back_ends, ""))


def sent_bytes(
    modules: Sequence[DistributedDataParallel], optimizers: Sequence[Optimizer]
) -> float:
    """Returns what Thalweg has counted as sent over the link of this worker's node."""
    from thalweg import ddp

    counting: list[_Counting] = [state for each in modules if (state := ddp.state_of(each))]
    counting += _of_shards(modules, optimizers)
    return sum(each.stats()["link_bytes_sent"] for each in counting)


def _of_shards(
    modules: Sequence[DistributedDataParallel], optimizers: Sequence[Optimizer]
) -> Iterator[_Counting]:
    """Yields the optimizers whose weights are on shards, of the script and of the environment."""
    if "thalweg.ps" not in sys.modules:  # which takes a while to import
        return
    from thalweg import ps
    from thalweg._activation import _local_updates

    ours = (ps.ServerOptimizer, ps.LocalOptimizer)
    yield from (each for each in optimizers if isinstance(each, ours))
    yield from filter(None, map(_local_updates.optimizer_of, modules))


def _is_served(optimizer: _Counting) -> bool:
    from thalweg import ps

    return isinstance(optimizer, ps.ServerOptimizer)
