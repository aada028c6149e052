"""Compresses models of fully_shard() whose script does not mention Thalweg.

It is loaded in the first step of an optimizer that has such a model's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from thalweg import _backend, policy
from thalweg._sharded import _compression, _units


class Outcome(NamedTuple):
    """What became of an optimizer's parameters."""

    covered: Sequence[Tensor]  # those of models that are compressed
    is_new: bool  # they are so only now
    obstacle: str = ""  # why the others are not; "": there are none of fully_shard()


def have_run(parameters: Sequence[Tensor]) -> bool:
    """Returns whether a module of fully_shard() that has any of the parameters has run, or there is
    none. Before its first forward pass, none knows whether it is the outermost. All ranks agree.
    """
    wanted = set(map(id, parameters))
    theirs = [
        state._is_root is not None
        for module, state in _modules()
        if any(id(one) in wanted for one in module.parameters())
    ]
    return any(theirs) or not theirs


def compress(parameters: Sequence[Tensor], codec: str) -> Outcome:
    """Compresses the models of fully_shard() that have any of the parameters, unless the script has
    done so. All ranks call it in the same step. `codec` is a policy, as text.
    """
    wanted = set(map(id, parameters))
    roots = [root for root in _roots() if any(id(one) in wanted for one in root.parameters())]
    fresh = [root for root in roots if _compression.state_of(root) is None]
    covered = [one for root in roots if root not in fresh for one in root.parameters()]
    if not fresh:
        return Outcome(covered, False)
    if obstacle := _obstacle(fresh, codec):
        return Outcome(covered, False, obstacle)
    model = fresh[0] if len(fresh) == 1 else nn.ModuleList(fresh)
    try:
        _compression.compress(model, policy.parse(codec).default)
    except ValueError as error:
        return Outcome(covered, False, str(error).removeprefix("thalweg: "))
    return Outcome([*covered, *model.parameters()], True)


def _roots() -> list[nn.Module]:
    """Returns the outermost modules of fully_shard() that have run, in the order of their calls."""
    return [module for module, state in _modules() if state._is_root]


def _modules() -> list[tuple[nn.Module, FSDPState]]:
    """Returns all modules of fully_shard(), with their states."""
    states = [(module, ref()) for module, ref in _composable_state._module_state_mapping.items()]
    return [
        (module, state)
        for module, state in states
        if isinstance(state, FSDPState) and isinstance(module, FSDPModule)
    ]


def _obstacle(roots: list[nn.Module], codec: str) -> str:
    """Returns why the environment leaves the models alone; "" if it does not."""
    asked = policy.parse(codec)
    if asked.rules:
        return "rules of a policy are for DistributedDataParallel"
    for unit in _units.units_of(nn.ModuleList(roots)):
        if (name := dist.get_backend(unit.shards)) != _backend.NAME:
            return f"shards are compressed by the back end {_backend.NAME!r}, and not by {name!r}"
        comms = unit.parameters._all_gather_comm, unit.parameters._reduce_scatter_comm
        if tuple(map(type, comms)) != (DefaultAllGather, DefaultReduceScatter):
            return "the script has set an all-gather or a reduce-scatter of its own"
    return ""
