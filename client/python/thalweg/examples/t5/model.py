"""Builds a T5 and shards it, by strategy, precision and kind of FSDP."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thalweg.fsdp
from thalweg import policy

STRATEGIES = ("full", "grad-op", "hybrid", "ddp")
SHARD_CODECS = ("fp32", "fp16", "bf16", "int8")
PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}


class Precision(NamedTuple):
    """A policy of mixed precision; what is None is not cast."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp16": Precision(torch.float16, torch.float16, torch.float16),
    "gradients-bf16": Precision(reduce=torch.bfloat16),
}


class Setup(NamedTuple):
    """How a model is sharded."""

    strategy: str = "full"  # one of STRATEGIES
    precision: str = "fp32"  # a key of PRECISIONS
    kind: int = 2  # FSDP1 or FSDP2
    prefetch: str = "pre"  # a key of PREFETCH, or "none"; for FSDP1
    checkpointing: bool = False  # of activations
    # How shards are sent, one of SHARD_CODECS; if hybrid, how copies are, any or a policy.
    codec: str = "fp32"

    def problem(self) -> str:
        """Returns why there is no such training; "" if there is."""
        if self.strategy == "ddp" and self.precision != "fp32":
            return "--strategy ddp trains in fp32 only: DistributedDataParallel casts nothing"
        if self.kind == 2 and self.prefetch == "none":
            return "--prefetch none is for FSDP1: fully_shard() always prefetches"
        if self.codec != "fp32" and (self.kind == 1 or self.strategy == "ddp"):
            return f"--codec {self.codec} is for --fsdp 2 and strategies other than ddp"
        try:
            asked = policy.parse(self.codec, "--codec")
        except ValueError as error:
            return str(error)
        if (asked.rules or asked.default.name not in SHARD_CODECS) and self.strategy != "hybrid":
            return f"--codec {self.codec} is for --strategy hybrid: it sums over copies of shards"
        return ""


def build(folder: Path | None, size: str, vocabulary: int, seed: int = 0) -> Any:  # noqa: ANN401
    """Returns a T5ForConditionalGeneration: the weights in `folder`, or a random model, "tiny",
    "small" or "base", with one seed on all ranks.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    if folder is not None:
        return T5ForConditionalGeneration.from_pretrained(folder)
    width, layers, heads = {"tiny": (32, 1, 2), "small": (128, 2, 4), "base": (512, 6, 8)}[size]
    config = T5Config(
        vocab_size=-(-vocabulary // 64) * 64,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(config)


def shard(model: Any, setup: Setup) -> nn.Module:  # noqa: ANN401 - of the optional package
    """Returns the model, wrapped or sharded in place, over the default process group."""
    from transformers.models.t5.modeling_t5 import T5Block

    def checkpoint_blocks() -> None:
        if setup.checkpointing:
            apply_activation_checkpointing(
                model, check_fn=lambda module: isinstance(module, T5Block)
            )

    mesh = _mesh() if setup.strategy == "hybrid" else None
    if setup.kind == 1 and setup.strategy != "ddp":
        sharded = _fsdp1(model, setup, mesh, T5Block)
        checkpoint_blocks()  # within their units, or checkpoints would not know their names
        return sharded
    checkpoint_blocks()
    if setup.strategy == "ddp":
        return DistributedDataParallel(model)
    precision = PRECISIONS[setup.precision]
    options: dict[str, Any] = {
        "mesh": mesh or init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": setup.strategy != "grad-op",
        "mp_policy": MixedPrecisionPolicy(precision.param, precision.reduce),
    }
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            fully_shard(block, **options)
    whole: nn.Module = fully_shard(model, **options)
    if setup.codec != "fp32":
        asked = policy.parse(setup.codec)
        thalweg.fsdp.compress(whole, asked.default, copies=asked)
    return whole


def _fsdp1(
    model: nn.Module, setup: Setup, mesh: DeviceMesh | None, block: type[nn.Module]
) -> FullyShardedDataParallel:
    strategies = {
        "full": ShardingStrategy.FULL_SHARD,
        "grad-op": ShardingStrategy.SHARD_GRAD_OP,
        "hybrid": ShardingStrategy.HYBRID_SHARD,
    }
    precision = PRECISIONS[setup.precision]
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={block}
        ),
        sharding_strategy=strategies[setup.strategy],
        backward_prefetch=PREFETCH.get(setup.prefetch),
        mixed_precision=MixedPrecision(precision.param, precision.reduce, precision.buffer),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        use_orig_params=True,
    )


def _mesh() -> DeviceMesh:
    """Returns a mesh of nodes and the workers of each."""
    world, workers = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return init_device_mesh("cpu", (world // workers, workers), mesh_dim_names=("nodes", "workers"))


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Returns how many bytes this worker keeps of parameters, gradients and optimizer state."""
    kept = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    kept += [v for state in optimizer.state.values() for v in state.values()]
    return sum(_bytes(value) for value in kept if isinstance(value, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.numel() * tensor.element_size()
