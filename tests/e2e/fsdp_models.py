"""Contains a small transformer that jobs shard, its data, and the comparison of two trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

VOCABULARY, LENGTH, BATCH = 40, 12, 4
UNITS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class Block(nn.Module):
    """A Block is attention and two linear layers, each beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix = nn.Linear(width, 3 * width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps [batch, length, width] to the same shape."""
        query, key, value = self.mix(self.norms[0](values)).chunk(3, -1)
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
        values = values + weights @ value
        return values + self.narrow(functional.gelu(self.wide(self.norms[1](values))))


class Transformer(nn.Module):
    """A Transformer maps tokens, int64 [batch, length], to logits."""

    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("places", torch.linspace(-1, 1, LENGTH)[:, None])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.places))


def build(width: int = 16) -> Transformer:
    """Returns the same model on all ranks."""
    torch.manual_seed(3)
    return Transformer(width)


def batches() -> Iterator[torch.Tensor]:
    """Yields this rank's batches: each token is followed by itself plus a step of the sequence."""
    source = torch.Generator().manual_seed(dist.get_rank())
    while True:
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=source)
        step = torch.randint(1, 3, (BATCH, 1), generator=source)
        yield (first + step * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Trained(NamedTuple):
    """A Trained is what one training leaves on this rank."""

    losses: list[float]
    shards: list[torch.Tensor]  # this rank's
    whole: dict[str, torch.Tensor]  # on rank 0; {} elsewhere


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def compare(
    ours: Trained, theirs: Trained, *, steps: int, lr: float, units: float, width: int = 16
) -> dict[str, Any]:
    """Returns whether both have the same bits, how far apart they are, and how far they may be.

    N values are summed in some order, each addition with a relative error of `units` at most: two
    means differ by at most 2 (N - 1) units G where G is the largest gradient of a worker. A step
    carries that to the parameters with the factor lr. Adding it to them rounds both once more, to
    the float32 that they are kept in. What differs grows with further steps, less than twofold in
    so few; gradients shrink. A loss may differ in the last bits of the type that it is computed in.
    """
    assert len(ours.losses) == len(theirs.losses)
    pairs = list(zip(ours.shards, theirs.shards, strict=True))
    assert ours.whole.keys() == theirs.whole.keys()
    pairs += [(ours.whole[name], theirs.whole[name]) for name in ours.whole]
    apart = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
    largest = max(float(b.abs().max()) for _, b in pairs if b.numel())
    world = dist.get_world_size()
    step = (
        lr * 2 * (world - 1) * units * largest_gradient(width) + 2 * UNITS[torch.float32] * largest
    )
    start = build(width).state_dict()
    return {
        "same bits": all(torch.equal(a, b) for a, b in pairs) and ours.losses == theirs.losses,
        "apart": max(apart, default=0.0),
        "bound": 2 * steps * step,
        "losses": [ours.losses, theirs.losses],
        "loss bound": 8 * units * max(theirs.losses),
        "change": max(
            (float((value - start[name]).abs().max()) for name, value in ours.whole.items()),
            default=0.0,
        ),
        "names": list(ours.whole),
    }


def largest_gradient(width: int) -> float:
    """Returns the largest element of any rank's gradient in the first step."""
    model = build(width)
    loss_of(model, next(batches())).backward()
    grads = [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
    largest = torch.stack(grads).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def plain_loop(
    model: nn.Module,
    *,
    lr: float,
    steps: int,
    micro: int = 1,
    sync: Callable[[bool], Any] | None = None,
    clip: Callable[[], torch.Tensor] | None = None,
) -> list[float]:
    """Trains with SGD; returns the losses. `sync(last)` comes before each micro-batch.

    `clip` returns the norm, which counts as another loss.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr)
    source, losses = batches(), []
    for _ in range(steps):
        optimizer.zero_grad()
        for index in range(micro):
            if sync is not None:
                sync(index == micro - 1)
            loss = loss_of(model, next(source))
            (loss / micro).backward()
        if clip is not None:
            losses.append(float(local(clip())))
        optimizer.step()
        losses.append(loss.item())
    return losses
