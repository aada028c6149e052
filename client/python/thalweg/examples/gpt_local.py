"""Trains a small GPT with gradients in every step and with local updates, and compares them.

    thalweg run --nodes 2 -m thalweg.examples.gpt_local --out out/gpt --seed 1
    python -m thalweg.examples.gpt.plot out/gpt

A way to train is `ddp` for DistributedDataParallel, or the steps from one exchange of a
LocalOptimizer to the next; then, after a colon, a codec, as in `50:signs`. All begin with the same
weights and see the same text, which is that of Python's standard library. The table has the loss of
files in which nobody trains.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

import thalweg.ddp
from thalweg.examples.gpt import text
from thalweg.examples.gpt.model import Gpt
from thalweg.ps import LocalOptimizer

_WAYS = ("ddp", "25", "50", "100")


class Training(NamedTuple):
    """A model in training; `exchanging` counts what this node has sent so far."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    exchanging: Sequence[thalweg.ddp.State | LocalOptimizer]

    def sent(self) -> float:
        return sum(float(each.stats()["wire_bytes_sent"]) for each in self.exchanging)


def optimizers_of(model: nn.Module, args: argparse.Namespace) -> list[Optimizer]:
    """Returns a worker's own optimizers: Muon, if asked for, has the matrices of the blocks."""
    matrices = {name: p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2}
    others = {name: p for name, p in model.named_parameters() if name not in matrices}
    settings = {"lr": args.lr, "weight_decay": 0.1}
    if args.inner == "adamw":
        return [AdamW(model.named_parameters(), betas=(0.9, 0.95), **settings)]
    return [
        Muon(matrices.items(), adjust_lr_fn="match_rms_adamw", **settings),
        AdamW(others.items(), betas=(0.9, 0.95), **settings),
    ]


def begin(way: str, args: argparse.Namespace) -> Training:
    torch.manual_seed(args.seed)
    model = Gpt(args.width, args.blocks, length=args.length)
    inner = optimizers_of(model, args)
    kind, _, codec = way.partition(":")
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        return Training(wrapped, inner, [thalweg.ddp.attach(wrapped, codec or "fp32")])
    outer = {"name": "nesterov", "lr": args.outer_lr, "momentum": args.outer_momentum}
    if args.outer_momentum == 0:
        outer = {"name": "sgd", "lr": args.outer_lr}
    local = [
        LocalOptimizer(one, every=int(kind), outer=outer, codec=codec or "fp32") for one in inner
    ]
    return Training(model, local, local)


def train(way: str, args: argparse.Namespace, data: text.Text) -> list[dict[str, float]]:
    """Returns the loss, and the bytes sent, after each `args.look` steps."""
    training = begin(way, args)
    parameters = list(training.model.parameters())
    schedules: list[LRScheduler] = []
    for one in training.optimizers:
        schedules.append(LinearLR(one, 0.05, total_iters=args.steps // 10))
        schedules.append(CosineAnnealingLR(one, args.steps))
    rank, workers = dist.get_rank(), dist.get_world_size()
    curve = []
    for step in range(1, args.steps + 1):
        seed = (args.seed * args.steps + step) * workers + rank
        training.model.zero_grad()
        training.model(data.batch(args.batch, args.length, seed)).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in training.optimizers:
            optimizer.step()
            if step == args.steps and isinstance(optimizer, LocalOptimizer):
                optimizer.finish()
        for schedule in schedules:
            schedule.step()
        if step % args.look == 0 or step == args.steps:
            loss = evaluate(training.model, data.tests(args.tests, args.length))
            curve.append({"step": step, "loss": loss, "sent": training.sent()})
            if rank == 0:
                print(f"{way}, step {step}: loss {loss:.4f}", flush=True)
    for exchanging in training.exchanging:
        exchanging.close()
    return curve


@torch.no_grad()
def evaluate(model: nn.Module, pieces: torch.Tensor) -> float:
    """Returns the mean loss of pieces of text, of which each worker has its share."""
    losses = torch.zeros(2, dtype=torch.float64)
    for piece in pieces[dist.get_rank() :: dist.get_world_size()].split(32):
        losses += torch.tensor([float(model(piece)) * len(piece), len(piece)])
    dist.all_reduce(losses)
    total, count = losses.tolist()
    return float(total / count)


def table(curves: dict[str, list[dict[str, float]]]) -> str:
    """Returns the last losses, beside that of the first way."""
    lines = ["way                        loss   more    bytes a step"]
    first = next(iter(curves.values()))[-1]["loss"]
    for way, curve in curves.items():
        last = curve[-1]
        more = 100 * (last["loss"] / first - 1)
        each = last["sent"] / last["step"]
        lines.append(f"{way:24} {last['loss']:6.4f} {more:+5.1f}% {each:13.0f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = text.load()
    curves = {}
    for way in args.ways:
        curves[way] = train(way, args, data)
        if args.out and dist.get_rank() == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            kept: dict[str, Any] = {"way": way, "seed": args.seed, "curve": curves[way]}
            name = f"{way}-{args.seed}.json".replace(":", "-")
            (args.out / name).write_text(json.dumps(kept), encoding="utf-8")
    if dist.get_rank() == 0:
        print(table(curves))
    gc.collect()  # modules are in reference cycles, and keep Gloo's threads alive
    dist.destroy_process_group()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a small GPT with local updates")
    parser.add_argument("--ways", nargs="+", default=_WAYS, metavar="WAY[:CODEC]")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8, help="pieces per worker and step")
    parser.add_argument("--length", type=int, default=64, help="bytes of a piece")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate of a worker")
    parser.add_argument("--inner", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    # 0.9, which is DiLoCo's, takes more exchanges than there are here.
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--look", type=int, default=100, help="steps from one test to the next")
    parser.add_argument("--tests", type=int, default=256, help="pieces of a test")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write each way's curve to this folder, as JSON")
    args = parser.parse_args(argv)
    for name in ("steps", "look", "tests"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, expected 1 or more")
    for way in args.ways:
        kind = way.partition(":")[0]
        if kind != "ddp" and not (kind.isdecimal() and int(kind)):
            parser.error(f"--ways has {way!r}, expected ddp or a number of steps, such as 50:int8")
    return args


if __name__ == "__main__":
    sys.exit(main())
