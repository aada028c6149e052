"""Trains on Fashion-MNIST with local updates: workers exchange every so many steps what changed.

    thalweg run --nodes 2 --nproc 2 -m thalweg.examples.fashion_local --every 50

The images are Debian's package dataset-fashion-mnist. Needs tqdm (`pip install thalweg[examples]`).
Exit code 1: the workers' parameters differ, or --min-accuracy was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from tqdm import tqdm

from thalweg.examples import fashion_mnist
from thalweg.examples.fashion_models import MODELS
from thalweg.ps import LocalOptimizer

_DATA = Path("/usr/share/datasets/fashion-mnist")


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what became of the training."""
    torch.manual_seed(args.seed)
    images, labels = fashion_mnist.load(args.data, "train")
    model = MODELS[args.model]()
    inner = torch.optim.SGD(model.named_parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    outer = {"name": "nesterov", "lr": args.outer_lr, "momentum": args.outer_momentum}
    optimizer = LocalOptimizer(
        inner,
        every=args.every,
        outer=outer,
        fragments=args.fragments,
        delay=args.delay,
        mix=args.mix,
        codec=args.codec,
    )
    images, labels = images[: args.images], labels[: args.images]
    steps = len(labels) // (args.batch * dist.get_world_size())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * steps)
    for epoch in range(args.epochs):
        batches = fashion_mnist.batches_of_epoch(len(labels), epoch, args.batch, args.seed)
        title = f"epoch {epoch + 1}/{args.epochs}"
        for batch in tqdm(batches, desc=title, unit="step", disable=dist.get_rank() != 0):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            scheduler.step()
    optimizer.finish()
    digests = fashion_mnist.digests_of_parameters(model)
    stats = optimizer.stats()
    optimizer.close()
    return {
        "every": args.every,
        "accuracy": fashion_mnist.accuracy(model, *fashion_mnist.load(args.data, "t10k")),
        "replicas_identical": len(set(digests)) == 1,
        "bytes_per_step": stats["wire_bytes_sent"] / (args.epochs * steps),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fashion-MNIST with local updates")
    parser.add_argument("--data", type=Path, default=_DATA, help="folder of the IDX files")
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="images per worker and step")
    parser.add_argument("--images", type=int, help="train on the first so many; default: all")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate of a worker")
    parser.add_argument("--every", type=int, default=50, help="steps between two exchanges")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    # Nine exchanges in an epoch are few: 0.9 is worse (docs/measurements/ps.md).
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--fragments", type=int, default=1, help="parts of the model, in turn")
    parser.add_argument("--delay", type=int, default=0, help="steps for which weights may travel")
    parser.add_argument("--mix", type=float, default=0.0, help="of a worker's own weights then")
    parser.add_argument("--codec", help="any codec, or signs or sparse (default: THALWEG_CODEC)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    parser.add_argument("--min-accuracy", type=float, default=0.0)
    args = parser.parse_args(argv)
    if not (args.data / "train-images-idx3-ubyte.gz").exists():
        parser.error(f"no Fashion-MNIST in {args.data}: apt-get install dataset-fashion-mnist")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    result = train(args)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        same = "bit-identical" if result["replicas_identical"] else "DIFFERENT"
        print(
            f"test accuracy {result['accuracy']:.4f}; each node sent {result['bytes_per_step']:.0f}"
            f" bytes per step; replicas: {same}"
        )
        if args.out:
            args.out.write_text(json.dumps(result), encoding="utf-8")
    good = result["replicas_identical"] and result["accuracy"] >= args.min_accuracy
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
