"""Trains with weights on the shards, in step and at nodes' own pace, and draws what comes of it.

    thalweg run --nodes 4 -m thalweg.examples.ps_modes --work 0.02 --slow 4 --out out/modes

writes a JSON file and a picture there: the loss of test data over time, and over the bytes that the
first node has sent. A mode is `sync`, `async`, `stale:8` (steps) or `local:25` (steps between two
exchanges). All begin with the same weights, and take the same batches, if not in the same order.
`--work` lets a device work so long in each step, and `--slow` the last worker's so many times
longer.

The task `gpt` needs nothing, `fashion` Debian's package dataset-fashion-mnist. Needs matplotlib
(`pip install thalweg[examples]`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from thalweg.examples.gpt import text
from thalweg.examples.gpt.model import Gpt
from thalweg.ps import LocalOptimizer, ServerOptimizer

_DATA = Path("/usr/share/datasets/fashion-mnist")
_MODES = ("sync", "stale:8", "async", "local:25")


class Task(NamedTuple):
    """What is learned."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]  # of the batch with this number
    test: Callable[[nn.Module], Tensor]
    kind: str  # the optimizer's
    options: dict[str, Any]


def gpt(args: argparse.Namespace) -> Task:
    data, length = text.load(), 64

    def batch(number: int) -> Tensor:
        return data.batch(args.batch or 8, length, args.seed * 10_000_000 + number)

    return Task(
        lambda: Gpt(args.width, 4 if args.width > 64 else 2, length=length),
        lambda model, number: model(batch(number)),
        lambda model: model(data.tests(64, length)),
        "adamw",
        {"lr": args.lr or 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
    )


def fashion(args: argparse.Namespace) -> Task:
    from thalweg.examples import fashion_mnist
    from thalweg.examples.fashion_models import MODELS

    images, labels = fashion_mnist.load(args.data, "train")
    seen, tested = (part[:2000] for part in fashion_mnist.load(args.data, "t10k"))

    def loss(model: nn.Module, number: int) -> Tensor:
        random = torch.Generator().manual_seed(args.seed * 10_000_000 + number)
        chosen = torch.randint(len(labels), (args.batch or 64,), generator=random)
        return functional.cross_entropy(model(images[chosen]), labels[chosen])

    return Task(
        MODELS["cnn"],
        loss,
        lambda model: functional.cross_entropy(model(seen), tested),
        "sgd",
        {"lr": args.lr or 0.02, "momentum": 0.9},
    )


_TASKS = {"gpt": gpt, "fashion": fashion}


def make_optimizer(
    model: nn.Module, task: Task, mode: str, args: argparse.Namespace
) -> ServerOptimizer | LocalOptimizer:
    kind, _, number = mode.partition(":")
    parameters = model.named_parameters()
    if kind == "local":
        makers: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        inner = makers[task.kind](parameters, **task.options)
        outer = {"name": "nesterov", "lr": 0.7, "momentum": args.outer_momentum}
        return LocalOptimizer(inner, every=int(number), outer=outer)
    staleness = int(number) if number else None
    return ServerOptimizer(parameters, task.kind, mode=kind, staleness=staleness, **task.options)


def batches(mode: str, args: argparse.Namespace) -> Iterator[int]:
    """Yields the numbers of this worker's batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if mode != "async":
        yield from range(rank, args.steps * world, world)
        return
    yield rank  # of the first step, for which all wait
    store = dist.distributed_c10d._get_default_store()
    while (number := store.add("ps_modes", 1) + world - 1) < args.steps * world:
        yield number  # fast workers take more of them


def train(task: Task, mode: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """Returns the losses of the first worker's weights after each `args.look` of its steps."""
    torch.manual_seed(args.seed)
    model = task.make()
    optimizer = make_optimizer(model, task, mode, args)
    rank, world = dist.get_rank(), dist.get_world_size()
    work = args.work * (args.slow if rank == world - 1 else 1.0)
    highest = task.options["lr"] / (world if mode == "async" else 1)
    looks: list[tuple[float, float, Tensor]] = []
    dist.barrier()
    begin = time.monotonic()

    def look() -> None:
        seconds, sent = time.monotonic() - begin, optimizer.stats()["wire_bytes_sent"]
        looks.append((seconds, sent, parameters_to_vector(model.parameters()).detach().clone()))

    for step, number in enumerate(batches(mode, args), start=1):
        for group in optimizer.param_groups:
            group["lr"] = highest * (1 - number // world / args.steps)
        optimizer.zero_grad()
        task.loss(model, number).backward()
        time.sleep(work)
        optimizer.step()
        if rank == 0 and step % args.look == 0:
            look()
    optimizer.finish()
    look()
    dist.distributed_c10d._get_default_store().set("ps_modes", "0")
    optimizer.close()
    dist.barrier()
    return [] if rank else [_tested(task, model, *each) for each in looks]


@torch.no_grad()
def _tested(
    task: Task, model: nn.Module, seconds: float, sent: float, weights: Tensor
) -> dict[str, float]:
    vector_to_parameters(weights, model.parameters())
    return {"seconds": seconds, "sent": sent, "loss": float(task.test(model))}


def draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for mode, curve in curves.items():
        losses = [point["loss"] for point in curve]
        by_time.plot([p["seconds"] for p in curve], losses, label=mode, marker="o", ms=3, lw=1)
        by_bytes.plot([p["sent"] / 1e6 for p in curve], losses, label=mode, marker="o", ms=3, lw=1)
    by_time.set(xlabel="seconds", ylabel="loss of test data")
    by_bytes.set(xlabel="MB that the first node has sent", xscale="log")
    by_time.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def table(curves: dict[str, list[dict[str, float]]]) -> str:
    lines = ["mode         loss   seconds          MB"]
    for mode, curve in curves.items():
        last = curve[-1]
        mb = last["sent"] / 1e6
        lines.append(f"{mode:10} {last['loss']:6.4f} {last['seconds']:9.1f} {mb:11.3f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = _TASKS[args.task](args)
    curves = {mode: train(task, mode, args) for mode in args.modes}
    if dist.get_rank() == 0:
        print(table(curves))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            kept = {"arguments": vars(args) | {"out": None, "data": None}, "curves": curves}
            (args.out / f"{args.task}.json").write_text(json.dumps(kept), encoding="utf-8")
            draw(curves, args.out / f"{args.task}.png")
    dist.destroy_process_group()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="four ways to keep weights on shards")
    parser.add_argument("--task", choices=_TASKS, default="gpt")
    parser.add_argument("--modes", nargs="+", default=_MODES, metavar="MODE[:NUMBER]")
    parser.add_argument("--steps", type=int, default=400, help="of each worker, in the mean")
    parser.add_argument("--batch", type=int, help="of a worker; default 8 or 64")
    parser.add_argument("--lr", type=float, help="at the beginning; async: of all workers together")
    parser.add_argument("--outer-momentum", type=float, default=0.5, help="of local updates")
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--work", type=float, default=0.0, metavar="SECONDS", help="of a device")
    parser.add_argument("--slow", type=float, default=1.0, metavar="FACTOR")
    parser.add_argument("--look", type=int, default=25, help="steps from one test to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=_DATA, help="folder of Fashion-MNIST")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
