"""Contains trainings with fully_shard(), each on two back ends; see fsdp1_cases.py."""

from __future__ import annotations

import functools
from typing import Any

import fsdp_models as models
import torch
import torch.distributed as dist
from fsdp1_cases import BRAIN, FULL, HALF, LR, Case, Groups
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import thalweg.fsdp


def mesh_of(groups: Groups, hybrid: bool) -> DeviceMesh:
    """Returns a mesh of these groups: shards, or with `hybrid` copies of them."""
    if not hybrid:
        return DeviceMesh.from_group(groups.world, "cpu")
    places = torch.arange(dist.get_world_size()).view(-1, 2)
    return DeviceMesh.from_group(
        [groups.across, groups.pair], "cpu", mesh=places, mesh_dim_names=("copies", "shards")
    )


def shard(groups: Groups, width: int = 16, hybrid: bool = False, **options: Any) -> nn.Module:
    model = models.build(width)
    mesh = mesh_of(groups, hybrid)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(model: nn.Module, losses: list[float]) -> models.Trained:
    """Checks by the way that full_tensor() and full_state_dict() agree."""
    whole = thalweg.fsdp.full_state_dict(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        full = parameter.full_tensor().detach()
        assert name not in whole or torch.equal(full, whole[name])
    return models.Trained(losses, [models.local(p) for p in model.parameters()], whole)


def case(
    *,
    hybrid: bool = False,
    units: float = models.UNITS[FULL],
    width: int = 16,
    prefetch: bool = False,
    factor: float = 0.0,
    **options: Any,
) -> Case:
    """Returns a case that trains with these options of fully_shard()."""

    def compare(groups: tuple[Groups, Groups], steps: int) -> dict[str, Any]:
        results = []
        for group in groups:
            model = shard(group, width, hybrid, **options)
            if prefetch:
                first, second = model.blocks
                first.set_modules_to_forward_prefetch([second])
                second.set_modules_to_backward_prefetch([first])
            if factor:
                assert isinstance(model, FSDPModule)
                model.set_gradient_divide_factor(factor)
                # Gloo does not scale what it sums.
                model.set_force_sum_reduction_for_comms(group is groups[1])
            results.append(trained(model, models.plain_loop(model, lr=LR, steps=steps)))
        return models.compare(*results, steps=steps, lr=LR, units=units, width=width)

    return compare


def precision(**types: torch.dtype) -> Case:
    units = max(models.UNITS[dtype] for dtype in types.values())
    return case(units=units, mp_policy=MixedPrecisionPolicy(**types))


def accumulated(hybrid: bool) -> Case:
    """Returns a case that accumulates two micro-batches, the first without communication, or, with
    `hybrid`, without that between copies; and clips the norm.
    """

    def compare(groups: tuple[Groups, Groups], steps: int) -> dict[str, Any]:
        results = []
        for group in groups:
            model = shard(group, hybrid=hybrid)
            assert isinstance(model, FSDPModule)
            sync = model.set_requires_all_reduce if hybrid else model.set_requires_gradient_sync
            clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.1)
            losses = models.plain_loop(model, lr=LR, steps=steps, micro=2, sync=sync, clip=clip)
            results.append(trained(model, losses))
        return models.compare(*results, steps=steps, lr=LR, units=models.UNITS[FULL])

    return compare


CASES: dict[str, Case] = {
    "fully_shard": case(),
    "prefetched": case(prefetch=True),
    "kept_after_forward": case(reshard_after_forward=False),
    "uneven": case(width=9),
    "mesh_of_copies": case(hybrid=True),
    "parameters_bf16": precision(param_dtype=BRAIN, reduce_dtype=FULL),
    "parameters_and_gradients_bf16": precision(param_dtype=BRAIN, reduce_dtype=BRAIN),
    "parameters_fp16": precision(param_dtype=HALF, reduce_dtype=HALF),
    "offloaded": case(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "divided_by_3": case(factor=3.0),
    "reduced_in_bf16": precision(reduce_dtype=BRAIN),
    "clipped": accumulated(hybrid=False),
    "clipped_copies": accumulated(hybrid=True),
}
