"""Trains and tests a sharded T5: steps, summaries by greedy choice, checkpoints."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.optim import Optimizer

import thalweg.fsdp
from thalweg.examples.t5.data import IGNORED, Functions, Tokenizer
from thalweg.examples.t5.rouge import rouge

_COMPLETE = ".metadata"  # torch.distributed.checkpoint writes it last, when all shards are there


def batches(data: Functions, size: int, epoch: int, seed: int) -> torch.Tensor:
    """Returns this worker's rows of `data`, int64 [steps, size], of a shuffle that all agree on.

    ValueError: there are too few for a step.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch))
    steps = steps_of(data, size)
    return order[: steps * size * world].view(steps, world, size)[:, rank]


def steps_of(data: Functions, size: int) -> int:
    """Returns how many steps batches() has. ValueError: none."""
    return _count(len(data), size, "--batch-size")


def tests_of(data: Functions, size: int, limit: int) -> int:
    """Returns how many batches test() has for each worker. ValueError: none."""
    return _count(min(limit, len(data)), size, "--test-batch-size, with --test-limit,")


def _count(functions: int, size: int, option: str) -> int:
    world = dist.get_world_size()
    if functions < size * world:
        raise ValueError(
            f"{option} is {size} on {world} workers, with {functions} functions for all: expected "
            f"{functions // world} at most"
        )
    return functions // (size * world)


def loss_of(model: nn.Module, data: Functions, rows: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of the tokens of these targets."""
    sources, targets = data.sources[rows], data.targets[rows]
    length = int((sources != 0).sum(1).max())
    sources = sources[:, :length]
    targets = targets[:, : int((targets != IGNORED).sum(1).max())].contiguous()  # T5 views it
    # Blocks that are computed again in backward must not find their first keys and values cached.
    given = {"attention_mask": (sources != 0).long(), "use_cache": False}
    output = model(input_ids=sources, labels=targets, **given)
    loss: torch.Tensor = output.loss
    return loss


def tokens_of(data: Functions, rows: torch.Tensor) -> int:
    """Returns how many tokens these sources and targets have."""
    return int((data.sources[rows] != 0).sum() + (data.targets[rows] != IGNORED).sum())


def mean_over_workers(value: float, weight: float = 1.0) -> float:
    """Returns the mean over all workers."""
    sums = torch.tensor([value * weight, weight], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


@torch.no_grad()
def summarise(
    model: nn.Module,
    data: Functions,
    rows: torch.Tensor,
    tokenizer: Tokenizer,
) -> list[str]:
    """Returns a summary of each of these functions, word for word the likeliest.

    All workers call it with equally many rows: each step goes through the whole sharded model.
    """
    sources = data.sources[rows]
    mask = (sources != 0).long()
    chosen = torch.zeros(len(rows), 1, dtype=torch.long)
    encoded = None
    for _ in range(data.targets.shape[1]):
        given = {"input_ids": sources} if encoded is None else {"encoder_outputs": (encoded,)}
        output = model(attention_mask=mask, decoder_input_ids=chosen, use_cache=False, **given)
        encoded = output.encoder_last_hidden_state
        chosen = torch.cat([chosen, output.logits[:, -1:].argmax(-1)], 1)
    ended = (chosen[:, 1:] == tokenizer.eos_token_id).cumsum(1) > 0
    texts = chosen[:, 1:].masked_fill(ended, 0)
    return [text.strip() for text in tokenizer.batch_decode(texts, skip_special_tokens=True)]


class Test(NamedTuple):
    """The outcome of a test, the same on all workers."""

    loss: float
    scores: dict[str, float]
    samples: list[tuple[str, str, str]]  # name, summary, reference


def test(
    model: nn.Module,
    data: Functions,
    tokenizer: Tokenizer,
    *,
    size: int,
    limit: int,
) -> Test:
    """Returns the loss and ROUGE of `limit` functions at most, in whole batches, of which each
    worker has a part. ValueError: there are too few for a batch.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    count = tests_of(data, size, limit)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    rows = order[: count * size * world].view(count, world, size)[:, rank]
    model.eval()
    loss, texts = 0.0, []
    with torch.no_grad():
        for batch in rows:
            loss += float(loss_of(model, data, batch)) / count
            texts += summarise(model, data, batch, tokenizer)
    model.train()
    examples = [data.examples[row] for row in rows.flatten().tolist()]
    mine = [
        (example.name, text, example.summary) for example, text in zip(examples, texts, strict=True)
    ]
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    samples = [sample for part in gathered for sample in part]
    scores = rouge([text for _, text, _ in samples], [reference for *_, reference in samples])
    return Test(mean_over_workers(loss), scores, samples)


def save(folder: Path, model: nn.Module, optimizer: Optimizer, history: dict[str, Any]) -> None:
    """Writes a checkpoint of shards, from which any number of workers can go on."""
    parts = _parts(model, optimizer, history)
    if (codec := thalweg.fsdp.state_of(model)) is not None:
        parts["codec"] = codec.state_dict()
    save_parts(parts, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Loads a checkpoint; returns its history."""
    parts = _parts(model, optimizer, {})
    load_parts(parts, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    if (codec := thalweg.fsdp.state_of(model)) is not None:
        held = {"codec": codec.state_dict()}
        # Other numbers of workers have other parts in it, which load_state_dict() then says.
        load_parts(held, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
        codec.load_state_dict(held["codec"])
    history: dict[str, Any] = json.loads(parts["history"])
    return history


def _parts(model: nn.Module, optimizer: Optimizer, history: dict[str, Any]) -> dict[str, Any]:
    state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": state, "optimizer": optimizer_state, "history": json.dumps(history)}


def is_complete(folder: Path) -> bool:
    """Returns whether a checkpoint was written to its end."""
    return (folder / _COMPLETE).exists()


@contextlib.contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Yields a list that gets the peak of this process's memory within, in MB (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free already
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is the present
    peak: list[float] = []
    yield peak
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                peak.append(int(line.split()[1]) / 1024)
