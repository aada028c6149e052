"""Trains on Fashion-MNIST, and goes on when nodes are lost or come back (docs/elastic.md).

    export THALWEG_ELASTIC=node-a,node-b,node-c   # on each of them
    torchrun --standalone --nproc-per-node 2 --max-restarts 100 -m thalweg.examples.fashion_elastic

The images are Debian's package dataset-fashion-mnist. Exit code 1: the workers' parameters differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import thalweg.ddp
import thalweg.elastic
from thalweg.examples import fashion_mnist
from thalweg.examples.fashion_models import MODELS

_DATA = Path("/usr/share/datasets/fashion-mnist")
_WARM_UP = 0.1  # of the training; then follows a cosine down to 0


class _Log:
    """Appends JSON values to a file, a line each; to none without a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, **values: Any) -> None:  # noqa: ANN401 - whatever JSON has
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def rate(highest: float, done: float) -> float:
    """Returns the learning rate when the fraction `done` of the training is over."""
    if done < _WARM_UP:
        return highest * (0.1 + 0.9 * done / _WARM_UP)
    return highest * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))) / 2


def train(args: argparse.Namespace) -> bool:
    """Returns whether all workers have the same parameters at the end."""
    torch.manual_seed(args.seed)
    images, labels = fashion_mnist.load(args.data, "train")
    dataset = TensorDataset(images[: args.images], labels[: args.images])
    test = fashion_mnist.load(args.data, "t10k")
    model = MODELS[args.model]()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    sampler = thalweg.elastic.Sampler(dataset, seed=args.seed)
    state = thalweg.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    log = _Log(args.out)

    @thalweg.elastic.run
    def steps(state: thalweg.elastic.State) -> bool:
        assert state.membership is not None
        workers = state.membership.world_size
        ddp_model = DistributedDataParallel(model)
        thalweg.ddp.attach(ddp_model, codec=args.codec)
        while state.epoch < args.epochs:
            model.train()
            sampler.set_epoch(state.epoch)
            for x, y in DataLoader(dataset, batch_size=args.batch, sampler=sampler):
                epochs = state.epoch + 1 - sampler.left / len(dataset)
                # The more workers, the larger the batch, and the longer the steps.
                optimizer.param_groups[0]["lr"] = workers * rate(args.lr, epochs / args.epochs)
                optimizer.zero_grad()
                loss = functional.cross_entropy(ddp_model(x), y)
                loss.backward()
                optimizer.step()
                sampler.took(len(y))
                log.write(step=state.commits + 1, epochs=epochs, workers=workers, loss=loss.item())
                state.commit()
            accuracy = fashion_mnist.accuracy(model, *test)
            log.write(epoch=state.epoch + 1, workers=workers, accuracy=accuracy)
            if state.membership.rank == 0:
                print(f"epoch {state.epoch + 1}/{args.epochs}: test accuracy {accuracy:.4f}")
            state.epoch += 1
        return len(set(fashion_mnist.digests_of_parameters(model))) == 1

    is_same = bool(steps(state))
    log.write(replicas_identical=is_same)
    return is_same


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Fashion-MNIST on nodes that may be lost and come back"
    )
    parser.add_argument("--data", type=Path, default=_DATA, help="folder of the IDX files")
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, help="train on the first so many; default: all")
    parser.add_argument("--batch", type=int, default=64, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.0125, help="highest learning rate per worker")
    parser.add_argument("--codec", help="such as fp16 or powersgd:4 (default: THALWEG_CODEC)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append each step and epoch to this file, as JSON")
    args = parser.parse_args(argv)
    if not (args.data / "train-images-idx3-ubyte.gz").exists():
        parser.error(f"no Fashion-MNIST in {args.data}: apt-get install dataset-fashion-mnist")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return 0 if train(args) else 1


if __name__ == "__main__":
    sys.exit(main())
