#!/usr/bin/env python3
"""Trains the T5 of thalweg.examples.t5_fsdp with a codec in plain torch, without Thalweg.

    python -m thalweg.examples.t5.data --folder data/functions
    scripts/plain_t5.py --codec onebit --steps 300 --seed 1

Prints the mean loss of the last 20 steps, as the example's `--losses` does for 2 nodes x 2 workers
with copies: each worker of a node has one half of each parameter, and a codec computes the mean of
both nodes' gradients. One process does the work of all, but for torch's own PowerSGD, `torch-hook`,
which has a process for each node. `onebit` and `topk` (5 %) begin after 2 steps, factors after 10.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook
from torch.nn.functional import cross_entropy

from thalweg.examples.t5.data import IGNORED, Functions, load_tokenizer
from thalweg.examples.t5.model import build

NODES, WORKERS, BATCH = 2, 2, 8
BLOCK = 1024  # elements that onebit rotates and rounds together
FACTORS_START = 10  # steps


class Half(NamedTuple):
    """A worker's half of a parameter: a matrix within the vector of all."""

    chunk: tuple[str, int]  # the unit of fully_shard() and the worker
    at: int
    shape: tuple[int, int]

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.at : self.at + math.prod(self.shape)].view(self.shape)


class Weights:
    """A model's parameters and gradients as vectors, which begin with what a codec compresses."""

    def __init__(self, model: nn.Module, codec: str) -> None:
        exact = "shared.weight" if codec in ("powersgd", "torch-hook") else ""
        named = [
            (parameter.numel() >= WORKERS * BLOCK and name != exact, name, parameter)
            for name, parameter in model.named_parameters()
        ]
        named.sort(key=lambda one: not one[0])
        self.vector = nn.Parameter(torch.cat([one.detach().flatten() for *_, one in named]))
        self.gradient, at = torch.zeros(len(self.vector)), 0
        self.halves: list[Half] = []
        for is_compressed, name, parameter in named:
            shape, end = parameter.shape, at + parameter.numel()
            parameter.data = self.vector.data[at:end].view(shape)
            parameter.grad = self.gradient[at:end].view(shape)
            if is_compressed:
                unit = ".".join(name.split(".")[:3]) if ".block." in name else "root"
                half = shape[0] // WORKERS, shape[1]
                places = range(at, end, math.prod(half))
                self.halves += [Half((unit, i), place, half) for i, place in enumerate(places)]
            at = end
        self.compressed = sum(math.prod(half.shape) for half in self.halves)


class Codec:
    """Computes means of the nodes' gradients; this one exactly."""

    start = 2  # steps before it compresses
    rest = torch.float32  # in which all is sent that it does not compress

    def __init__(self, weights: Weights, rank: int) -> None:
        self.weights = weights
        self.held_back = [torch.zeros(weights.compressed) for _ in range(NODES)]

    def mean(self, gradients: list[Tensor], step: int) -> Tensor:
        count, mean = self.weights.compressed, torch.stack(gradients).mean(0)
        rest = torch.stack([gradient[count:].to(self.rest).float() for gradient in gradients])
        mean[count:] = rest.mean(0).to(self.rest).float()
        if step >= self.start:
            mean[:count] = self.compressed([gradient[:count] for gradient in gradients])
        return mean

    def compressed(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack(gradients).mean(0)


class OneBit(Codec):
    """Sends signs and mean magnitudes of rotated blocks, both ways."""

    rest = torch.float16

    def __init__(self, weights: Weights, rank: int) -> None:
        super().__init__(weights, rank)
        self.mean_held_back = torch.zeros(weights.compressed)
        self.hadamard = torch.ones(1, 1)
        for _ in range(5):
            self.hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), self.hadamard)
        self.hadamard /= math.sqrt(32)
        self.signs = torch.randint(2, (BLOCK,), generator=torch.Generator().manual_seed(99)) * 2 - 1

    def compressed(self, gradients: list[Tensor]) -> Tensor:
        sent = [self._rounded(*pair) for pair in zip(gradients, self.held_back, strict=True)]
        return self._rounded(sum(sent) / NODES, self.mean_held_back)

    def _rounded(self, vector: Tensor, held_back: Tensor) -> Tensor:
        held_back += vector
        rotated = self._rotated(held_back.view(-1, BLOCK) * self.signs)
        scale = rotated.abs().mean(1, keepdim=True)
        result = self._rotated(torch.where(rotated < 0, -scale, scale)) * self.signs
        held_back -= result.flatten()
        return result.flatten()

    def _rotated(self, blocks: Tensor) -> Tensor:
        return (self.hadamard @ blocks.view(-1, 32, 32) @ self.hadamard).view(-1, BLOCK)


class TopK(Codec):
    """Sends the largest elements of each unit's halves."""

    rest = torch.float16

    def __init__(self, weights: Weights, rank: int) -> None:
        super().__init__(weights, rank)
        chunks: dict[tuple[str, int], list[Tensor]] = {}
        for half in weights.halves:
            places = half.of(torch.arange(weights.compressed)).flatten()
            chunks.setdefault(half.chunk, []).append(places)
        self.chunks = [torch.cat(parts) for parts in chunks.values()]

    def compressed(self, gradients: list[Tensor]) -> Tensor:
        total = torch.zeros(self.weights.compressed)
        for node, gradient in enumerate(gradients):
            held_back = self.held_back[node].add_(gradient)
            for chunk in self.chunks:
                count = math.ceil(0.05 * len(chunk))
                top = chunk[held_back[chunk].abs().topk(count).indices]
                total[top] += held_back[top]
                held_back[top] = 0
        return total / NODES


class Factors(Codec):
    """Sends PowerSGD's factors of each half, where they are less than half of it."""

    start = FACTORS_START

    def __init__(self, weights: Weights, rank: int) -> None:
        super().__init__(weights, rank)
        self.alike: dict[tuple[int, int], list[Half]] = {}
        for half in weights.halves:
            self.alike.setdefault(half.shape, []).append(half)
        generator, self.right = torch.Generator().manual_seed(0), {}
        for (rows, columns), halves in self.alike.items():
            k = min(rank, rows, columns)
            if (rows + columns) * k * 2 < rows * columns:
                first = torch.randn(len(halves), columns, k, generator=generator)
                self.right[rows, columns] = first

    def compressed(self, gradients: list[Tensor]) -> Tensor:
        result = super().compressed(gradients)
        vectors = [sum(pair) for pair in zip(gradients, self.held_back, strict=True)]
        for shape, last in self.right.items():
            halves, right = self.alike[shape], torch.linalg.qr(last)[0]
            nodes = [torch.stack([half.of(vector) for half in halves]) for vector in vectors]
            left = torch.linalg.qr(torch.stack([node @ right for node in nodes]).mean(0))[0]
            right = self.right[shape] = torch.stack([node.mT @ left for node in nodes]).mean(0)
            for half, product in zip(halves, left @ right.mT, strict=True):
                half.of(result).copy_(product)
                for vector, held_back in zip(vectors, self.held_back, strict=True):
                    half.of(held_back).copy_(half.of(vector) - product)
        return result


class Hook(Codec):
    """Calls torch's hook in a process for each node, which has that one's gradient alone."""

    def __init__(self, weights: Weights, rank: int) -> None:
        super().__init__(weights, rank)
        given = {"start_powerSGD_iter": FACTORS_START, "min_compression_rate": 2}
        self.state = torch_hook.PowerSGDState(None, matrix_approximation_rank=rank, **given)

    def mean(self, gradients: list[Tensor], step: int) -> Tensor:
        count, mean = self.weights.compressed, gradients[0]
        matrices = [half.of(mean) for half in self.weights.halves]
        bucket = SimpleNamespace(
            buffer=lambda: mean[:count],
            gradients=lambda: matrices,
            index=lambda: 0,
            is_last=lambda: True,
        )
        mean[:count] = torch_hook.powerSGD_hook(self.state, bucket).wait()
        dist.all_reduce(mean[count:])
        mean[count:] /= NODES
        return mean


CODECS = {"fp32": Codec, "onebit": OneBit, "topk": TopK, "powersgd": Factors, "torch-hook": Hook}


def batches(count: int, steps: int, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Yields each step's epoch and functions, int64 [nodes, functions of its workers]."""
    size = NODES * WORKERS * BATCH
    for step in range(steps):
        epoch, place = divmod(step, count // size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
        yield epoch, order[place * size :][:size].view(NODES, WORKERS * BATCH)


def losses_of(model: nn.Module, data: Functions, rows: Tensor) -> list[Tensor]:
    """Returns the losses of a node's workers."""
    sources, targets = data.sources[rows], data.targets[rows]
    sources = sources[:, : int((sources != 0).sum(1).max())]
    targets = targets[:, : int((targets != IGNORED).sum(1).max())].contiguous()
    given = {"attention_mask": (sources != 0).long(), "use_cache": False}
    logits = model(input_ids=sources, labels=targets, **given).logits
    workers = zip(logits.split(BATCH), targets.split(BATCH), strict=True)
    return [cross_entropy(a.flatten(0, 1), b.flatten(), ignore_index=IGNORED) for a, b in workers]


def train(options: argparse.Namespace, nodes: list[int]) -> float:
    """Returns the mean loss of the last steps on these nodes, which this process computes."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(options.data)
    data = Functions(options.data, "train", tokenizer, 96, 16)
    model = build(None, "small", len(tokenizer), options.seed)
    weights, found = Weights(model, options.codec), []
    optimizer = torch.optim.AdamW([weights.vector], weight_decay=0.01, foreach=False)
    codec = CODECS[options.codec](weights, options.rank)
    for step, (epoch, rows) in enumerate(batches(len(data), options.steps, options.seed)):
        optimizer.param_groups[0]["lr"] = 3e-3 * 0.85**epoch
        gradients, losses = [], []
        for node in nodes:
            weights.gradient.zero_()
            of_workers = losses_of(model, data, rows[node])
            (sum(of_workers) / WORKERS).backward()
            gradients.append(weights.gradient.clone())
            losses += [loss.item() for loss in of_workers]
        weights.vector.grad = codec.mean(gradients, step)
        optimizer.step()
        found.append(sum(losses) / len(losses))
    return sum(found[-20:]) / len(found[-20:])


def train_node(node: int, options: argparse.Namespace, store: str) -> None:
    """Trains one node in this process; the first one prints the loss of both."""
    dist.init_process_group("gloo", init_method=store, rank=node, world_size=NODES)
    loss = torch.tensor(train(options, [node]), dtype=torch.float64)
    dist.all_reduce(loss)
    if node == 0:
        print(f"loss {loss / NODES:.4f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", choices=CODECS, default="fp32")
    parser.add_argument("--rank", type=int, default=4, help="of powersgd and torch-hook")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("data/functions"))
    options = parser.parse_args()
    if options.codec != "torch-hook":
        print(f"loss {train(options, list(range(NODES))):.4f}")
        return
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        torch.multiprocessing.spawn(train_node, (options, store), nprocs=NODES)


if __name__ == "__main__":
    main()
