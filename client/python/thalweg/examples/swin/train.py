"""Is a worker of a training; launch_single_task starts it, as torchrun and `thalweg run` can."""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg
from thalweg.examples.swin import SwinError, checkpoint, precision
from thalweg.examples.swin.config import Config
from thalweg.examples.swin.loading import Loaders, load
from thalweg.examples.swin.logger import (
    create_logger,
    enable_torchacc_compiler,
    enable_torchacc_kernel,
    log_metrics,
    log_params,
)
from thalweg.examples.swin.loop import Run, train_one_epoch, validate
from thalweg.examples.swin.model import build
from thalweg.examples.swin.sharding import shard
from thalweg.ps import ServerOptimizer


@dataclass(frozen=True)
class Place:
    """A worker's place, as torchrun tells it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    loopback: bool  # all nodes are on this machine

    @classmethod
    def from_env(cls) -> Place:
        """Raises SwinError if this process was not started by torchrun or `thalweg run`."""
        try:
            return cls(
                rank=int(os.environ["RANK"]),
                local_rank=int(os.environ["LOCAL_RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
                node=int(os.environ["GROUP_RANK"]),
                loopback=os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"),
            )
        except KeyError as error:
            raise SwinError(
                f"{error.args[0]} is not set: start this with "
                "python -m thalweg.examples.swin.launch_single_task, or with torchrun"
            ) from None


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Returns AdamW, torch's, the fused one, or on shards, which decays matrices only."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_table = name.endswith("relative_position_bias_table")
        (others if parameter.ndim < 2 or is_table else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.TRAIN.WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.BACKEND == "ps":
        return ServerOptimizer(
            groups,
            "adamw",
            lr=config.TRAIN.BASE_LR,
            codec=config.CODEC,
            max_grad_norm=config.TRAIN.CLIP_GRAD or math.inf,
            loss_scaling=config.AMP_OPT_LEVEL != "O0" and config.AMP_ENABLE,
        )
    if config.TRAIN.FUSED_OPTIMIZER:
        from thalweg.optim import FusedAdamW

        return FusedAdamW(groups, lr=config.TRAIN.BASE_LR)
    return torch.optim.AdamW(groups, lr=config.TRAIN.BASE_LR)


def set_up(config: Config, place: Place, device: torch.device, loaders: Loaders) -> Run:
    """Builds everything that trains, in the order that amp, FSDP and DistributedDataParallel
    need.
    """
    from timm.scheduler import CosineLRScheduler

    torch.manual_seed(config.SEED)  # all workers build the same model
    model = build(config.MODEL.NAME, loaders.num_classes, config.MODEL.DROP_PATH_RATE).to(device)
    if config.MODEL.CHANNELS_LAST:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.BACKEND == "fsdp":
        shard(model, config, device)
    optimizer = make_optimizer(model, config)
    level = precision.prepare(model, optimizer, config, device)
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=updates(config, loaders),
        lr_min=config.TRAIN.MIN_LR,
        warmup_t=config.TRAIN.WARMUP_STEPS,
        warmup_lr_init=config.TRAIN.WARMUP_LR,
        t_in_epochs=False,
    )
    if config.MODEL.COMPILE:
        model.compile()
    state, reduce = None, None
    if config.BACKEND not in {"fsdp", "ps"}:
        model = DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, broadcast_buffers=False
        )
    if config.TRAIN.REDUCE_BY_HAND:
        scale = 1 / place.world_size
        reduce = functools.partial(thalweg.all_reduce, scale=scale, codec=config.CODEC)
    elif config.BACKEND == "thalweg" and place.world_size > 1:
        assert isinstance(model, DistributedDataParallel)
        state = thalweg.ddp.attach(model, config.CODEC)
    torch.manual_seed(config.SEED + place.rank)  # they mix and drop differently
    np.random.seed(config.SEED + place.rank)
    return Run(config, model, optimizer, level, schedule, state, reduce, device, place.loopback)


def updates(config: Config, loaders: Loaders) -> int:
    """Returns how many updates the training has."""
    total = config.TRAIN.EPOCHS * updates_per_epoch(config, loaders)
    return min(total, config.TRAIN.STEPS) if config.TRAIN.STEPS else total


def updates_per_epoch(config: Config, loaders: Loaders) -> int:
    return len(loaders.train) // config.TRAIN.ACCUMULATION_STEPS


def train(config: Config, place: Place) -> None:
    """Trains, validates and logs. All workers call it together."""
    device = _device(place)
    loaders = load(config, device)
    run = set_up(config, place, device, loaders)
    folder = Path(config.OUTPUT, f"{config.MODEL.NAME}_{config.TAG}", config.SUFFIX)
    folder = folder / config.OUTPUT_SUFFIX
    logger = _begin_log(folder, config, place)
    first = checkpoint.resume(run, config.MODEL.RESUME) if config.MODEL.RESUME else 0
    total, len_epoch = updates(config, loaders), updates_per_epoch(config, loaders)
    if first >= config.TRAIN.EPOCHS or run.updates >= total:
        text = "%s has %d epochs and %d updates: nothing is left to train"
        logger.info(text, config.MODEL.RESUME, first, run.updates)
        return
    log_params(logger, _params(config, place, run))
    for epoch in range(first, config.TRAIN.EPOCHS):
        loaders.begin_epoch(epoch)
        for metrics in train_one_epoch(run, loaders, epoch, total):
            log_metrics(logger, {"kind": "train", "epoch": epoch, **metrics})
        validation = validate(run, loaders)
        done = {"kind": "validation", "epoch": epoch, "step": run.updates}
        log_metrics(logger, {**done, **validation})
        if config.SAVE_FREQ and (epoch + 1) % config.SAVE_FREQ == 0:
            checkpoint.save(run, folder / f"checkpoint_{epoch + 1}", epoch + 1)
            if run.updates == total and total % len_epoch:
                logger.info("TRAIN.STEPS cut epoch %d short: who resumes skips its rest", epoch)
        if run.updates >= total:
            break
    if run.state is not None:
        logger.info("%s", run.state.summary())


def _begin_log(folder: Path, config: Config, place: Place) -> logging.Logger:
    """Returns a logger, which on a node's first worker alone writes, and says what trains."""
    if place.local_rank != 0:
        return logging.Logger("silent", level=logging.CRITICAL + 1)
    logger = create_logger(folder / str(place.node), shown=place.rank == 0)
    if config.BACKEND == "thalweg":
        enable_torchacc_compiler(logger)
    if config.BACKEND == "fsdp":
        logger.info("the model is sharded by FSDP over the back end %s", dist.get_backend())
    if config.BACKEND == "ps":
        logger.info("shards keep the weights, and run AdamW")
    if config.TRAIN.FUSED_OPTIMIZER:
        enable_torchacc_kernel(logger)
    return logger


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train", description="A worker of a training.")
    parser.add_argument("--opts", nargs="*", default=[], metavar="KEY VALUE")
    args = parser.parse_args(argv)
    try:
        config = Config()
        if enable_torchacc_compiler():
            config.accelerate()
        config.merge(args.opts)
        place = Place.from_env()
        config.complete(place.world_size // place.local_world_size, place.local_world_size)
        config.check()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        dist.init_process_group(_group(config))
        train(config, place)
    except SwinError as error:
        print(f"swin: {error}", file=sys.stderr, flush=True)
        # The others may wait for this worker; its launcher ends them.
        os._exit(2)
    # The DDP module is in a reference cycle and would keep Gloo's threads until Python exits.
    gc.collect()
    dist.destroy_process_group()
    return 0


def _group(config: Config) -> str:
    """Returns the back end of the process group. Raises SwinError where there is none."""
    on_gpu = torch.cuda.is_available()
    if on_gpu and config.BACKEND in {"fsdp", "ps"}:
        what = "collectives take" if config.BACKEND == "fsdp" else "ServerOptimizer takes"
        raise SwinError(
            f"BACKEND {config.BACKEND} trains on CPUs, and there is a GPU: Thalweg's {what} CPU "
            "tensors; hide it with CUDA_VISIBLE_DEVICES=, or choose ddp or thalweg"
        )
    if config.BACKEND == "fsdp":
        return "thalweg"
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def _device(place: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def _params(config: Config, place: Place, run: Run) -> dict[str, Any]:
    return {
        "config": config.as_dict(),
        "workers": place.world_size,
        "device": str(run.device),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "codec": "" if run.state is None else run.state.codec,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
