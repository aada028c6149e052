"""Trains and validates, epoch by epoch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.scheduler.scheduler import Scheduler
from torch import nn

from thalweg.data import DevicePrefetcher
from thalweg.examples.swin import meters
from thalweg.examples.swin.config import Config
from thalweg.examples.swin.precision import Level, Reduce, autocast_context_manager
from thalweg.examples.swin.sharding import averaging, inside

if TYPE_CHECKING:
    from thalweg._attach._state import State
    from thalweg.examples.swin.loading import Batch, Loaders


@dataclass
class Run:
    """What one worker trains with."""

    config: Config
    model: nn.Module  # in DistributedDataParallel, or sharded, or with its weights on shards
    optimizer: torch.optim.Optimizer
    level: Level
    schedule: Scheduler
    state: State | None  # None: torch averages the gradients, or `reduce`
    reduce: Reduce | None
    device: torch.device
    loopback: bool
    updates: int = field(default=0, init=False)  # so far


class _Interval:
    """Measures the updates between two lines of the log."""

    def __init__(self, run: Run, batches: DevicePrefetcher[Batch]) -> None:
        self._run, self._batches = run, batches
        self._losses: list[torch.Tensor] = []
        self.begin()

    def begin(self) -> None:
        self._losses.clear()
        self._first = self._run.updates
        self._sent = meters.sent_bytes(loopback=self._run.loopback)
        self._waited = self._batches.wait_seconds
        self._started = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    def end(self, norm: torch.Tensor) -> dict[str, Any]:
        """Returns the interval's metrics. All workers call it together."""
        run = self._run
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        done = run.updates - self._first
        seconds = (time.perf_counter() - self._started) / done
        sent = (meters.sent_bytes(loopback=run.loopback) - self._sent) / done
        micro_batches = run.config.TRAIN.ACCUMULATION_STEPS
        images = run.config.DATA.BATCH_SIZE * micro_batches * dist.get_world_size()
        return {
            "step": run.updates,
            "loss": _mean_over_workers(torch.stack(self._losses).mean() * micro_batches),
            "step_seconds": seconds,
            "data_seconds": (self._batches.wait_seconds - self._waited) / done,
            "images_per_second": images / seconds,
            "memory_mb": meters.memory_mb(run.device),
            "sent_mb": sent / 1e6,
            "grad_norm": float(norm),
            "loss_scale": run.level.loss_scale(),
            "lr": run.optimizer.param_groups[0]["lr"],
        }


def train_one_epoch(run: Run, loaders: Loaders, epoch: int, total: int) -> Iterator[dict[str, Any]]:
    """Trains until the epoch or `total` updates end; yields metrics of every PRINT_FREQ updates."""
    config = run.config
    parts = config.TRAIN.ACCUMULATION_STEPS
    used = len(loaders.train) // parts * parts  # the rest is too little for an update
    smoothing = config.MODEL.LABEL_SMOOTHING
    soft: nn.Module = SoftTargetCrossEntropy()
    criterion = soft if config.AUG.mixes else LabelSmoothingCrossEntropy(smoothing)
    run.model.train()
    interval = _Interval(run, loaders.train)
    with contextlib.closing(iter(loaders.train)) as batches:
        for index, (images, targets) in zip(range(used), batches, strict=False):
            if loaders.mixup is not None:
                images, targets = loaders.mixup(images, targets)  # noqa: PLW2901 - mixed
            images = in_order(images, config)  # noqa: PLW2901 - the same, in another order
            final = (index + 1) % parts == 0
            reduce = run.reduce if final else None
            with averaging(run.model, run.optimizer, final and reduce is None):
                with autocast_context_manager(config, run.device):
                    loss = criterion(run.model(images), targets) / parts
                run.level.backward(loss, final=final, reduce=reduce)
            interval.add(loss)
            if not final:
                continue
            norm = run.level.step(config.TRAIN.CLIP_GRAD)
            run.optimizer.zero_grad()
            run.schedule.step_update((epoch * used + index) // parts)
            run.updates += 1
            ends = run.updates >= total
            if ends or run.updates % config.PRINT_FREQ == 0:
                yield interval.end(norm)
                interval.begin()
            if ends:
                return


@torch.no_grad()
def validate(run: Run, loaders: Loaders) -> dict[str, float]:
    """Returns loss and accuracy in percent, top-1 and top-5, over all images, each counted once."""
    run.model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=run.device)  # loss, top-1, top-5, images
    left = loaders.own_val
    for images, targets in loaders.val:
        with autocast_context_manager(run.config, run.device):
            logits = inside(run.model)(in_order(images, run.config)).float()
        # Where images do not suffice for equal shares, which a sharded model needs, the last is
        # another worker's as well.
        logits, labels = logits[:left], targets[:left]
        left -= len(labels)
        ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss, ranked[:, 0].sum(), ranked.sum(), torch.tensor(len(labels))])
    dist.all_reduce(sums)
    loss, top1, top5, count = sums.tolist()
    return {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}


def in_order(images: torch.Tensor, config: Config) -> torch.Tensor:
    """Returns the images, (n, 3, height, width), in the memory order of MODEL.CHANNELS_LAST."""
    if not config.MODEL.CHANNELS_LAST:
        return images
    return images.contiguous(memory_format=torch.channels_last)


def _mean_over_workers(loss: torch.Tensor) -> float:
    total = loss.float()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
