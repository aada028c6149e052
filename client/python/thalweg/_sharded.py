"""Says that what the environment asks of gradients is not done for parameters that torch shards.

Their gradients are reduced by the process group's back end itself. No part of Thalweg sees such a
model being made, nor may it load torch's FSDP, which takes seconds, to see that: it looks at the
parameters in the first step of each optimizer.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from thalweg import _left_behind, _logging
from thalweg._config import Activation, ConfigError

_FSDP1 = "_fsdp_flattened"  # an attribute of flat parameters, and of those that are parts of them
_EXACT = "fp32"
_watch: list[RemovableHandle] = []
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def activate() -> None:
    """From now on the first optimizer whose parameters are sharded leads to a warning of rank 0."""
    if not _watch:
        _watch.append(register_optimizer_step_pre_hook(_disable_dynamo(_look)))


def remark(activation: Activation, names: list[str], backend: str) -> str:
    """Returns what is to be said; "" if what is asked for is done. `names`: kinds of sharding."""
    if not activation.codec or (activation.codec == _EXACT and backend == "thalweg"):
        return ""
    what = "does not average" if activation.codec == _EXACT else "does not compress"
    asked = ", ".join(activation.variables)
    return (
        f"{asked} does nothing for parameters that torch shards ({' and '.join(names)}): Thalweg "
        f"{what} their gradients, which the back end {backend!r} of the process group reduces as "
        "they are (docs/fsdp.md)"
    )


def kinds(parameters: list[torch.Tensor]) -> list[str]:
    """Returns by what the parameters are sharded that no attached module has."""
    found = []
    if any(getattr(parameter, _FSDP1, False) for parameter in parameters):
        found.append("FullyShardedDataParallel")
    tensors = sys.modules.get("torch.distributed.tensor")  # without it, there are no DTensors
    if tensors is not None and any(_is_spread(tensors, parameter) for parameter in parameters):
        found.append("fully_shard() or another sharding by DTensor")
    return found


def _is_spread(tensors: Any, parameter: torch.Tensor) -> bool:  # noqa: ANN401 - a module
    return (
        isinstance(parameter, tensors.DTensor)
        and any(placement.is_shard() for placement in parameter.placements)
        and not _left_behind.is_owned(parameter)
    )


def _look(optimizer: Optimizer, *_: object) -> None:
    if optimizer in _seen or not dist.is_initialized():
        return
    _seen.add(optimizer)
    found = kinds([one for group in optimizer.param_groups for one in group["params"]])
    if not found:
        return
    for handle in _watch:
        handle.remove()
    try:
        activation = Activation.from_env()
    except ConfigError as error:
        raise ConfigError(f"thalweg: {error}") from None
    text = remark(activation, found, dist.get_backend())
    if text and dist.get_rank() == 0:
        _logging.prepare(activation.log_level).log(logging.WARNING, "%s", text)
