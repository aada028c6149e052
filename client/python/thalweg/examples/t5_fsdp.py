"""T5 learns to summarise functions of Python's standard library, sharded by FSDP.

    python -m thalweg.examples.t5.data --folder data/functions
    thalweg run --nodes 2 --nproc 2 -m thalweg.examples.t5_fsdp

The first command makes the data set. The second trains a small random model on it; --model takes a
folder of weights. Loss and ROUGE on the test part are printed after each epoch, with samples.
--compare measures precisions and strategies instead, --losses trains with each codec and compares.
Needs `pip install thalweg[examples]` in an environment that has the wheel (docs/install.md).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from tqdm import tqdm

import thalweg.fsdp
from thalweg.examples.t5 import compare, loop, losses
from thalweg.examples.t5.data import Functions, load_tokenizer
from thalweg.examples.t5.model import (
    PRECISIONS,
    STRATEGIES,
    Setup,
    build,
    shard,
    state_bytes,
)
from thalweg.optim import FusedAdamW


def setup_of(args: argparse.Namespace) -> Setup:
    return Setup(
        args.strategy,
        args.precision,
        args.fsdp,
        args.prefetch,
        args.activation_checkpointing,
        args.codec,
    )


class Trainer:
    """A trainer holds the data, makes models, and trains one of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.model or args.data)
        lengths = args.source_length, args.target_length
        self.train_set = Functions(args.data, "train", self.tokenizer, *lengths)
        self.test_set = Functions(args.data, "test", self.tokenizer, *lengths)
        loop.steps_of(self.train_set, args.batch_size)  # or ValueError, before anything is made
        if args.validation:
            loop.tests_of(self.test_set, args.test_batch_size, args.test_limit)

    def start(
        self, setup: Setup, seed: int = 0
    ) -> tuple[nn.Module, Optimizer, Callable[[torch.Tensor], None]]:
        """Returns a sharded model, its optimizer, and what takes a step by a loss."""
        model = shard(build(self.args.model, self.args.size, len(self.tokenizer), seed), setup)
        optimizer = FusedAdamW(model.parameters(), lr=self.args.lr)
        if setup.precision != "fp16":
            return model, optimizer, lambda loss: (loss.backward(), optimizer.step(), None)[-1]
        scaler: Any = (
            ShardedGradScaler("cpu", init_scale=2.0**12)
            if setup.kind == 1
            else GradScaler("cpu", init_scale=2.0**12)
        )

        def update(loss: torch.Tensor) -> None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return model, optimizer, update

    def train(self) -> dict[str, Any]:
        """Trains; returns the history, the same on all workers."""
        args, started = self.args, time_of_run()
        model, optimizer, update = self.start(setup_of(args))
        history: dict[str, Any] = {"epochs": [], "step_losses": []}
        if args.resume is not None:
            history = loop.load(args.resume, model, optimizer)
            say(f"goes on from {args.resume} after epoch {len(history['epochs'])}")
        for epoch in range(len(history["epochs"]), args.epochs):
            for group in optimizer.param_groups:
                group["lr"] = args.lr * args.gamma**epoch
            begun = time.monotonic()
            with loop.peak_memory() as peak:
                losses, tokens = self._epoch(epoch, model, optimizer, update)
            seconds = time.monotonic() - begun
            history["step_losses"] += losses
            result: dict[str, Any] = {
                "epoch": epoch + 1,
                "loss": mean(losses[-20:]),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
            if args.track_memory:
                result |= {"peak_mb": peak, "state_mb": state_bytes(model, optimizer) / 1e6}
            say(" ".join(f"{name} {_short(value)}" for name, value in result.items()))
            if args.validation:
                result |= self._validate(model)
            history["epochs"].append(result)
            if args.save:
                path = thalweg.fsdp.checkpoint_path(args.out, "t5", started, epoch + 1)
                loop.save(path.with_suffix(""), model, optimizer, history)
                say(f"saved {path.with_suffix('')}")
        if args.save_model:
            path = thalweg.fsdp.checkpoint_path(args.out, "t5", started, args.epochs)
            thalweg.fsdp.save(model, path)
            say(f"saved {path}")
        return history

    def _epoch(
        self,
        epoch: int,
        model: nn.Module,
        optimizer: Optimizer,
        update: Callable[[torch.Tensor], None],
    ) -> tuple[list[float], float]:
        """Trains one epoch; returns the workers' mean loss of each step, and all their tokens."""
        rows = loop.batches(self.train_set, self.args.batch_size, epoch, self.args.seed)
        rows = rows[: self.args.steps or None]
        title = f"epoch {epoch + 1}/{self.args.epochs}"
        losses, tokens = [], 0
        with tqdm(rows, desc=title, unit="step", disable=dist.get_rank() != 0) as shown:
            for batch in shown:
                optimizer.zero_grad()
                loss = loop.loss_of(model, self.train_set, batch)
                update(loss)
                losses.append(loss.detach().double())
                tokens += loop.tokens_of(self.train_set, batch)
                shown.set_postfix_str(f"loss {losses[-1].item():.3f}", refresh=False)
        result = torch.stack([*losses, torch.tensor(float(tokens), dtype=torch.float64)])
        dist.all_reduce(result)
        return (result[:-1] / dist.get_world_size()).tolist(), float(result[-1])

    def _validate(self, model: nn.Module) -> dict[str, Any]:
        args = self.args
        outcome = loop.test(
            model, self.test_set, self.tokenizer, size=args.test_batch_size, limit=args.test_limit
        )
        scores = ", ".join(f"{name} {value:.3f}" for name, value in outcome.scores.items())
        say(f"test: loss {outcome.loss:.3f}, {scores}")
        for name, summary, reference in outcome.samples[: args.samples]:
            say(f"  {name}\n    is:     {reference}\n    chosen: {summary}")
        return {"test_loss": outcome.loss, **outcome.scores}

    def compare(self) -> list[compare.Measured]:
        """Measures all precisions with all strategies; rank 0 writes the table."""
        args, setups = self.args, compare.setups(self.args.fsdp)
        size, steps = args.batch_size, args.steps or 10

        def measure(setup: Setup, steps: int) -> compare.Measured:
            row = compare.measure(setup, self.start, self.train_set, batch=size, steps=steps)
            say(compare.text([row]).splitlines()[-1])
            return row

        say("not counted, because libraries are loaded meanwhile:")
        measure(setups[0], 1)
        say("measured:")
        rows = [measure(setup, steps) for setup in setups]
        if dist.get_rank() == 0:
            about = {"workers": dist.get_world_size(), "by": dist.get_backend(), "fsdp": args.fsdp}
            compare.write(args.out, rows, about | {"size": args.size, "batch": args.batch_size})
            print(f"\n{compare.text(rows)}\n{args.out}/table.md, .json and .png written")
        return rows

    def compare_losses(self) -> list[losses.Trained]:
        """Trains with each codec and seed; rank 0 writes the table."""
        args = self.args
        plan = losses.Plan(args.steps or 300, args.seeds, args.batch_size, args.lr, args.gamma)
        rows: list[losses.Trained] = []
        for setup in losses.setups(args.codecs):
            rows.append(losses.train(setup, self.start, self.train_set, plan))
            say(losses.text(rows).splitlines()[-1])
        if dist.get_rank() == 0:
            about = {"workers": dist.get_world_size(), "size": args.size, **plan._asdict()}
            losses.write(args.out, rows, about)
            print(f"\n{losses.text(rows)}\n{args.out}/losses.md and .json written")
        return rows


def time_of_run() -> datetime:
    """Returns rank 0's time, by which all workers name what they save."""
    now: list[Any] = [datetime.now()]
    dist.broadcast_object_list(now)
    started: datetime = now[0]
    return started


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _short(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        prog="python -m thalweg.examples.t5_fsdp",
        description=lines[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/functions"), help="folder of the data set")
    add("--model", type=Path, help="folder of weights in Hugging Face's format")
    add("--size", choices=("tiny", "small", "base"), default="small", help="without --model")
    add("--source-length", type=int, default=96, help="tokens of a function at most")
    add("--target-length", type=int, default=16, help="tokens of a summary at most")
    add("--batch-size", type=int, default=8, help="functions per worker and step")
    add("--test-batch-size", type=int, default=16, help="the same in tests")
    add("--epochs", type=int, default=4)
    add("--steps", type=int, default=0, help="of an epoch at most, unless 0")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--gamma", type=float, default=0.85, help="its factor after each epoch")
    add("--seed", type=int, default=1)
    add("--backend", default="thalweg", help="of the process group")
    add("--fsdp", type=int, choices=(1, 2), default=2, help="fully_shard() is 2")
    add("--strategy", choices=STRATEGIES, default="full")
    add("--precision", choices=PRECISIONS, default="fp32")
    add("--codec", default="fp32", help="in which fully_shard() sends shards, or sums over copies")
    add("--prefetch", choices=("pre", "post", "none"), default="pre", help="of FSDP1")
    boolean = argparse.BooleanOptionalAction
    add("--activation-checkpointing", action=boolean, default=False)
    add("--track-memory", action=boolean, default=True)
    add("--validation", action=boolean, default=True, help="test after each epoch")
    add("--test-limit", type=int, default=256, help="functions to test with at most")
    add("--samples", type=int, default=3, help="summaries to print after each epoch")
    add("--save", action=boolean, default=True, help="a checkpoint of shards after each epoch")
    add("--save-model", action=boolean, default=False, help="the whole model at the end")
    add("--resume", type=Path, help="checkpoint of shards to go on from")
    add("--out", type=Path, default=Path("output/t5"), help="folder for all that is written")
    add("--compare", action=boolean, default=False, help="measure, in the place of training")
    add("--losses", action=boolean, default=False, help="train with each codec and seed instead")
    add("--codecs", nargs="+", default=[], help="of --losses, or policies, unless all")
    add("--seeds", type=int, default=3, help="of --losses")
    args = parser.parse_args(argv)
    problem = setup_of(args).problem()
    if args.resume is not None and not loop.is_complete(args.resume):
        problem = f"--resume {args.resume}: there is no complete checkpoint"
    if not (args.data / "test.jsonl").exists():
        problem = f"--data {args.data}: run python -m thalweg.examples.t5.data --folder {args.data}"
    for codec in args.codecs:
        problem = problem or Setup("hybrid", codec=codec).problem()
    if problem:
        parser.error(problem)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    if args.precision in ("bf16", "gradients-bf16"):
        say(f"bfloat16: {thalweg.fsdp.bf16_ready('cpu')}")
    trainer = Trainer(args)
    if args.compare:
        trainer.compare()
    elif args.losses:
        trainer.compare_losses()
    else:
        history = trainer.train()
        if dist.get_rank() == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "history.json").write_text(json.dumps(history) + "\n", encoding="utf-8")
    del trainer
    gc.collect()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
