"""Does what the environment asks of models that torch shards, or says that it is not done.

No part of Thalweg sees such a model being made, nor may it load torch's FSDP, which takes seconds,
to see that: it looks at the parameters in the first step of each optimizer.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from thalweg._activation import _first_steps
from thalweg._attach import _left_behind
from thalweg._settings import _logging
from thalweg._settings._config import Activation

_FSDP1 = "_fsdp_flattened"  # an attribute of flat parameters, and of those that are parts of them
_EXACT = "fp32"
_FSDP = "torch.distributed.fsdp"
_watch: list[RemovableHandle] = []
_said: set[str] = set()


def activate() -> None:
    """From now on models of fully_shard() are compressed in the first step of their optimizer, or
    rank 0 warns, once.
    """
    if not _watch:
        _watch.append(_first_steps.before_each(_look))


def remark(activation: Activation, names: list[str], backend: str, obstacle: str = "") -> str:
    """Returns what is to be said; "" if what is asked for is done. `names`: kinds of sharding;
    `obstacle`: why those that could be compressed are not.
    """
    if not activation.codec or (activation.codec == _EXACT and backend == "thalweg"):
        return ""
    what = "does not average" if activation.codec == _EXACT else "does not compress"
    asked = ", ".join(activation.variables)
    return (
        f"{asked} does nothing for parameters that torch shards ({' and '.join(names)}): Thalweg "
        f"{what} their gradients, which the back end {backend!r} of the process group reduces as "
        f"they are{obstacle and ': '}{obstacle} (docs/fsdp.md)"
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


def _look(optimizer: Optimizer) -> bool:
    """Returns False in a step before the first forward pass, as one that only makes a state is."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not kinds(parameters):
        return True
    activation = _first_steps.read(Activation.from_env)
    obstacle = ""
    if activation.codec not in ("", _EXACT) and _FSDP in sys.modules:
        from thalweg._activation import _fsdp

        if not _fsdp.have_run(parameters):
            return False
        _logging.prepare(activation.log_level)
        covered, is_new, obstacle = _fsdp.compress(parameters, activation.codec)
        known = set(map(id, covered))
        parameters = [one for one in parameters if id(one) not in known]
        if is_new:
            asked = ", ".join(activation.variables)
            text = f"{asked}: shards are compressed from the next step on (docs/fsdp.md)"
            _logging.say(logging.INFO, text)
    _warn(activation, kinds(parameters), obstacle)
    return True


def _warn(activation: Activation, found: list[str], obstacle: str) -> None:
    text = remark(activation, found, dist.get_backend(), obstacle) if found else ""
    if text and text not in _said:
        _logging.say(logging.WARNING, text)
    _said.add(text)
