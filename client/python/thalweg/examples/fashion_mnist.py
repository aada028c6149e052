"""Trains on Fashion-MNIST with DistributedDataParallel, averaged by Thalweg or (--plain) by Gloo,
or (--ps) with the optimizer on the shards.

    thalweg run --nodes 2 --nproc 2 --shards 2 --codec fp16 -m thalweg.examples.fashion_mnist
    thalweg run --nodes 2 -m thalweg.examples.fashion_mnist --ps --codec int8 --pull int8

The images are Debian's package dataset-fashion-mnist. Needs tqdm (`pip install thalweg[examples]`).
Exit code 1: the workers' parameters differ, or --min-accuracy was missed.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import thalweg.ddp
from thalweg.examples.fashion_models import MODELS
from thalweg.ps import ServerOptimizer

_DATA = "/usr/share/datasets/fashion-mnist"


def load(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads images (n, 1, 28, 28), centred, and labels (n) of "train" or "t10k" from IDX files."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
    pixels = torch.from_numpy(images.astype(np.float32) / 255)
    return (pixels - 0.286) / 0.353, torch.from_numpy(labels)


class Trained(NamedTuple):
    """What is trained, and by whom."""

    by: str
    codec: str
    model: nn.Module  # what is called
    own: nn.Module  # the model itself
    optimizer: torch.optim.Optimizer
    stats: Callable[[], dict[str, Any] | None]


def make(args: argparse.Namespace) -> Trained:
    model = MODELS[args.model]()
    options = {"lr": args.lr, "momentum": 0.9, "nesterov": True}
    if args.ps:
        optimizer = ServerOptimizer(
            model.named_parameters(), "sgd", codec=args.codec, pull=args.pull, **options
        )
        codec = f"{args.codec or 'as set'}, weights in {args.pull or 'fp32'}"
        return Trained("thalweg's shards", codec, model, model, optimizer, optimizer.stats)
    ddp_model = DistributedDataParallel(model)
    state = None if args.plain else thalweg.ddp.attach(ddp_model, codec=args.codec)
    by, codec = ("gloo", "fp32") if state is None else ("thalweg", state.codec)
    sgd = torch.optim.SGD(ddp_model.parameters(), **options)
    return Trained(
        by, codec, ddp_model, model, sgd, (lambda: None) if state is None else state.stats
    )


def train_batches(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    data: tuple[torch.Tensor, torch.Tensor],
    batches: Iterable[torch.Tensor],
) -> list[float]:
    """Trains on batches given as rows of indices; returns the workers' mean loss of each step."""
    images, labels = data
    losses = []
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    result = torch.stack(losses)
    dist.all_reduce(result)
    return (result / dist.get_world_size()).tolist()


def batches_of_epoch(samples: int, epoch: int, batch: int, seed: int) -> torch.Tensor:
    """Returns this worker's (steps, batch) indices of a shuffle that all workers agree on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))
    steps = samples // (batch * world)
    return order[: steps * batch * world].view(steps, world, batch)[:, rank]


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the accuracy on the whole test set, of which each worker evaluates its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    hits = torch.zeros(1)
    for start in range(rank * 500, len(labels), world * 500):
        part = slice(start, start + 500)
        hits += (model(images[part]).argmax(1) == labels[part]).sum()
    dist.all_reduce(hits)
    return float(hits.item()) / len(labels)


def digests_of_parameters(model: nn.Module) -> list[str | None]:
    """Returns the SHA-256 of the parameters of each worker."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return digests


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the training's history; only the statistics differ between workers."""
    torch.manual_seed(args.seed)
    images, labels = load(args.data, "train")
    train_set, test_set = (images[: args.images], labels[: args.images]), load(args.data, "t10k")
    made = make(args)
    steps = len(train_set[1]) // (args.batch * dist.get_world_size())
    schedule = torch.optim.lr_scheduler.OneCycleLR(made.optimizer, args.lr, args.epochs * steps)

    every = args.curve_every or steps
    epochs, losses, curve = [], [], []
    started = time.monotonic()
    for epoch in range(args.epochs):
        title = f"epoch {epoch + 1}/{args.epochs}"
        batches = batches_of_epoch(len(train_set[1]), epoch, args.batch, args.seed)
        with tqdm(batches, desc=title, unit="step", disable=dist.get_rank() != 0) as shown:
            left = iter(shown)
            for _ in range(0, steps, every):
                part = islice(left, every)
                new = train_batches(made.model, made.optimizer, schedule, train_set, part)
                losses += new
                test = accuracy(made.own, *test_set)
                curve.append({"step": len(losses), "loss": mean(new), "accuracy": test})
        loss, seconds = mean(losses[-steps:]), time.monotonic() - started
        epochs.append({"epoch": epoch + 1, "loss": loss, "accuracy": test, "seconds": seconds})
        if dist.get_rank() == 0:
            print(f"{title}: training loss {loss:.4f}, test accuracy {test:.4f}, {seconds:.1f} s")
    digests = digests_of_parameters(made.own)
    return {
        "by": made.by,
        "codec": made.codec,
        "model": args.model,
        "workers": dist.get_world_size(),
        "epochs": epochs,
        "curve": curve,
        "step_losses": losses,
        "accuracy": epochs[-1]["accuracy"],
        "train_seconds": time.monotonic() - started,
        "parameters_sha256": digests[0],
        "replicas_identical": len(set(digests)) == 1,
        "stats": made.stats(),
    }


def report(history: dict[str, Any]) -> None:
    print(f"test accuracy {history['accuracy']:.4f} after {history['train_seconds']:.1f} s")
    if stats := history["stats"]:
        print(f"raw gradients: {stats['raw_bytes']:.0f} bytes per worker")
        ratio = stats["raw_bytes"] / max(stats["wire_bytes_sent"], 1)
        less = f" ({ratio:.2f}x less)" if stats["wire_bytes_sent"] and ratio > 1 else ""
        print(
            f"on the wire:   {stats['wire_bytes_sent']:.0f} bytes sent per node, "
            f"{stats['wire_bytes_received']:.0f} received{less}"
        )
        print(
            f"time of worker 0 and its node: copy {stats['copy_seconds']:.2f} s, "
            f"wait {stats['wait_seconds']:.2f} s, reduce {stats['reduce_seconds']:.2f} s, "
            f"wire {stats['wire_seconds']:.2f} s"
        )
    same = "bit-identical" if history["replicas_identical"] else "DIFFERENT"
    print(f"replicas: {same} on {history['workers']} workers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fashion-MNIST with DistributedDataParallel")
    parser.add_argument("--data", type=Path, default=Path(_DATA), help="folder of the IDX files")
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--curve-every", type=int, metavar="STEPS", help="test that often; default: every epoch"
    )
    parser.add_argument("--images", type=int, help="train on the first so many; default: all")
    parser.add_argument("--batch", type=int, default=64, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--codec", help="such as fp16 or powersgd:4 (default: THALWEG_CODEC)")
    parser.add_argument("--plain", action="store_true", help="without Thalweg: Gloo's allreduce")
    parser.add_argument("--ps", action="store_true", help="the optimizer on the shards")
    parser.add_argument("--pull", help="with --ps, what weights come in, such as bf16 or int8")
    parser.add_argument("--out", type=Path, help="write the history to this JSON file")
    parser.add_argument("--min-accuracy", type=float, default=0.0)
    args = parser.parse_args(argv)
    if args.curve_every is not None and args.curve_every < 1:
        parser.error(f"--curve-every is {args.curve_every}, expected 1 or more steps")
    if args.plain and args.ps:
        parser.error("--plain is without Thalweg, and --ps with its shards: expected one of them")
    if args.pull and not args.ps:
        parser.error("--pull is for weights that come from shards: expected --ps with it")
    if not (args.data / "train-images-idx3-ubyte.gz").exists():
        parser.error(f"no Fashion-MNIST in {args.data}: apt-get install dataset-fashion-mnist")

    if args.plain and args.codec:
        parser.error("--plain is without Thalweg, and --codec is Thalweg's: expected one of them")
    if args.plain:
        os.environ["THALWEG_ENABLE"] = "0"  # whatever `thalweg run` has set
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    history = train(args)
    rank = dist.get_rank()
    # The DDP module, which is in a reference cycle, would keep Gloo's threads alive until Python
    # exits, where torch sometimes aborts.
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        report(history)
        if args.out:
            args.out.write_text(json.dumps(history), encoding="utf-8")
    good = history["replicas_identical"] and history["accuracy"] >= args.min_accuracy
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
