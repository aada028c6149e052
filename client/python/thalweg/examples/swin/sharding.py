"""Shards a model over all workers with FSDP, and gathers its state for checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from thalweg.examples.swin.config import Config
from thalweg.fsdp import full_state_dict, load_full_state_dict
from thalweg.ps import ServerOptimizer


def shard(model: nn.Module, config: Config, device: torch.device) -> None:
    """Shards each block of a Swin Transformer, and the rest as one unit, in place.

    Shards are float32. At O2 they are gathered in float16, in which forward and backward compute
    and gradients are summed; logits are float32.
    """
    from timm.models.swin_transformer import SwinTransformerBlock

    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    whole: dict[str, Any] = {}
    if config.AMP_OPT_LEVEL == "O2" and config.AMP_ENABLE:
        _halve_buffers(model)
        half = MixedPrecisionPolicy(param_dtype=torch.float16)
        options["mp_policy"] = half
        whole["mp_policy"] = replace(half, output_dtype=torch.float32)
    for module in list(model.modules()):
        if isinstance(module, SwinTransformerBlock):
            fully_shard(module, **options)
    fully_shard(model, **options | whole)


@contextlib.contextmanager
def averaging(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: bool) -> Iterator[None]:
    """Averages the gradients of the backward within over the workers, or lets them add up here."""
    if isinstance(optimizer, ServerOptimizer):
        with contextlib.nullcontext() if wanted else optimizer.accumulate():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
        yield
        return
    assert isinstance(model, DistributedDataParallel)
    with contextlib.nullcontext() if wanted else model.no_sync():
        yield


def inside(model: nn.Module) -> nn.Module:
    """Returns the model in DistributedDataParallel, or a sharded or served model itself."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the states of model and optimizer, whole. All workers call it; of a sharded model
    only rank 0 gets them, the others {}.
    """
    if not isinstance(model, FSDPModule):
        return {"model": inside(model).state_dict(), "optimizer": optimizer.state_dict()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = full_state_dict(model)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": state, "optimizer": optimizer_state} if dist.get_rank() == 0 else {}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads what state_of() returned; of a sharded model, rank 0's state reaches all workers.

    Raises RuntimeError if it is the state of another model.
    """
    if not isinstance(model, FSDPModule):
        inside(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return
    load_full_state_dict(model, state.get("model", {}))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)


def _halve_buffers(model: nn.Module) -> None:
    """Casts masks of attention, which must have the type of what they are added to."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.half()
