"""Contains trainings with FullyShardedDataParallel, each on two back ends.

A case takes the Groups of both and the number of steps, and returns what compare() does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import fsdp_models as models
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import thalweg.fsdp

LR = 0.1
CPU = torch.device("cpu")
WRAP = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={models.Block})
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


class Groups(NamedTuple):
    """These are process groups of one back end: all ranks, pairs of neighbours, and those at the
    same place of each pair.
    """

    world: Any
    pair: Any
    across: Any

    @classmethod
    def of(cls, backend: str) -> Groups:
        size, rank = dist.get_world_size(), dist.get_rank()
        pairs = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
        acrosses = [list(range(first, size, 2)) for first in range(2)]
        everybody = dist.group.WORLD if backend == "thalweg" else dist.new_group(backend=backend)
        made = [
            [dist.new_group(ranks, backend=backend) for ranks in lists]
            for lists in (pairs, acrosses)
        ]
        return cls(everybody, made[0][rank // 2], made[1][rank % 2])


Case = Callable[[tuple[Groups, Groups], int], dict[str, Any]]


def shard(group: Any, width: int = 16, **options: Any) -> FullyShardedDataParallel:
    chosen = {"auto_wrap_policy": WRAP, "use_orig_params": True} | options
    return FullyShardedDataParallel(
        models.build(width), process_group=group, device_id=CPU, **chosen
    )


def trained(model: FullyShardedDataParallel, losses: list[float]) -> models.Trained:
    whole = thalweg.fsdp.full_state_dict(model)
    return models.Trained(losses, [models.local(p) for p in model.parameters()], whole)


def case(
    *, hybrid: bool = False, units: float = models.UNITS[FULL], width: int = 16, **options: Any
) -> Case:
    """Returns a case that trains with these options of FullyShardedDataParallel."""

    def compare(groups: tuple[Groups, Groups], steps: int) -> dict[str, Any]:
        results = []
        for group in groups:
            model = shard((group.pair, group.across) if hybrid else group.world, width, **options)
            results.append(trained(model, models.plain_loop(model, lr=LR, steps=steps)))
        return models.compare(*results, steps=steps, lr=LR, units=units, width=width)

    return compare


def precision(**types: torch.dtype) -> Case:
    units = max(models.UNITS[dtype] for dtype in types.values())
    return case(units=units, mixed_precision=MixedPrecision(**types))


def accumulated_and_clipped(groups: tuple[Groups, Groups], steps: int) -> dict[str, Any]:
    """Accumulates two micro-batches, the first one without communication; clips the norm to 0.1."""
    results = []
    for group in groups:
        model = shard(group.world)
        with contextlib.ExitStack() as stack:

            def sync(last: bool, model: Any = model, stack: Any = stack) -> None:
                stack.close()
                if not last:
                    stack.enter_context(model.no_sync())

            losses = models.plain_loop(
                model,
                lr=LR,
                steps=steps,
                micro=2,
                sync=sync,
                clip=functools.partial(model.clip_grad_norm_, 0.1),
            )
        results.append(trained(model, losses))
    return models.compare(*results, steps=steps, lr=LR, units=models.UNITS[FULL])


def scaled_float16(groups: tuple[Groups, Groups], steps: int) -> dict[str, Any]:
    """Trains in float16 with a ShardedGradScaler, which skips the steps whose scale is too high."""
    results = []
    for group in groups:
        model = shard(group.world, mixed_precision=MixedPrecision(HALF, HALF, HALF))
        optimizer = torch.optim.SGD(model.parameters(), LR)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**20, process_group=group.world)
        source, losses = models.batches(), []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = models.loss_of(model, next(source))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        losses.append(scaler.get_scale())
        results.append(trained(model, losses))
    scale = results[0].losses[-1]
    assert scale < 2.0**20, "no step was skipped"
    return models.compare(*results, steps=steps, lr=LR, units=models.UNITS[HALF])


FULL_SHARD, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
HYBRID, HYBRID_2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST

CASES: dict[str, Case] = {
    "full_shard": case(sharding_strategy=FULL_SHARD, backward_prefetch=PRE),
    "full_shard_post": case(
        sharding_strategy=FULL_SHARD, backward_prefetch=POST, forward_prefetch=True
    ),
    "full_shard_flat": case(sharding_strategy=FULL_SHARD, use_orig_params=False, width=18),
    "shard_grad_op": case(sharding_strategy=GRAD_OP, backward_prefetch=None),
    "hybrid_shard": case(hybrid=True, sharding_strategy=HYBRID),
    "hybrid_shard_zero2": case(hybrid=True, sharding_strategy=HYBRID_2),
    "all_bf16": precision(param_dtype=BRAIN, reduce_dtype=BRAIN, buffer_dtype=BRAIN),
    "all_fp16": precision(param_dtype=HALF, reduce_dtype=HALF, buffer_dtype=HALF),
    "all_fp32": precision(param_dtype=FULL, reduce_dtype=FULL, buffer_dtype=FULL),
    "gradients_bf16": precision(reduce_dtype=BRAIN),
    "accumulated_and_clipped": accumulated_and_clipped,
    "scaled_float16": scaled_float16,
}
