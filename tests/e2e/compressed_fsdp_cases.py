"""Contains trainings with compressed shards, for jobs of compressed_fsdp_jobs.py."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp1_cases
import fsdp2_cases
import fsdp_models as models
import torch
import torch.distributed as dist
from digests import digest
from jobs import outcome
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from thalweg.fsdp import Compression, compress, state_of

WIDTH = 64  # at which matrices have more than the 1024 elements from which int8 compresses
BRAIN = torch.bfloat16


class Remarks(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("thalweg").addHandler(self)

    def stop(self) -> list[str]:
        logging.getLogger("thalweg").removeHandler(self)
        return self.texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def sharded(width: int = WIDTH, **options: Any) -> nn.Module:
    return fsdp2_cases.shard(fsdp1_cases.Groups.of("thalweg"), width, **options)


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns what forward() computes with, by name."""
    found = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().to(torch.float32, copy=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return found


def resumed() -> dict[str, Any]:
    """Trains six steps; and three, saves, and three more in a fresh model. Twice each.

    Returns digests of this rank's shards, how many bytes it holds back, and what is said where the
    state has nothing of a rank, or another codec.
    """
    digests = []
    for run in range(2):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        state = compress(model, "int8")
        source = models.batches()
        steps(model, optimizer, source, 3)
        folder = Path(os.environ["FOLDER"]) / str(run)
        checkpoint.save(parts(model, optimizer, state), checkpoint_id=folder)
        steps(model, optimizer, source, 3)
        digests.append(digest([models.local(p) for p in model.parameters()]))
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        fresh = compress(model, "int8")
        restore(model, optimizer, fresh, folder)
        source = models.batches()
        for _ in range(3):
            next(source)
        steps(model, optimizer, source, 3)
        digests.append(digest([models.local(p) for p in model.parameters()]))
    remarks = Remarks()
    saved = fresh.state_dict()
    held = [_held(fresh)]
    saved.pop(_own_name(saved))
    fresh.load_state_dict(saved)
    held.append(_held(fresh))
    return {
        "digests": digests,
        "bytes": state.residual_bytes,
        "elements": sum(p.numel() for p in model.parameters() if p.numel() >= 1024),
        "said": remarks.stop(),
        "held": held,
        "error": outcome(lambda: fresh.load_state_dict(saved | {"codec": "bf16"})),
    }


def _held(state: Compression) -> float:
    return sum(float(one.abs().sum()) for one in held_by(state).values())


def held_by(state: Compression) -> dict[str, torch.Tensor]:
    """Returns what this rank holds back, by unit."""
    saved = state.state_dict()
    held: dict[str, torch.Tensor] = saved[_own_name(saved)]
    return held


def _own_name(saved: dict[str, Any]) -> str:
    return next(name for name in saved if name.startswith(f"rank{dist.get_rank()} of "))


def steps(model: nn.Module, optimizer: Any, source: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        models.loss_of(model, next(source)).backward()
        optimizer.step()


def parts(model: nn.Module, optimizer: Any, state: Compression | None) -> dict[str, Any]:
    whole = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return whole if state is None else whole | {"thalweg": state.state_dict()}


def restore(
    model: nn.Module,
    optimizer: Any,
    state: Compression | None,
    folder: Path,
    *,
    partly: bool = False,
) -> None:
    """Restores what was saved of parts(); `partly`: names may be missing there."""
    saved = parts(model, optimizer, state)
    planner = DefaultLoadPlanner(allow_partial_load=partly)
    checkpoint.load(saved, checkpoint_id=folder, planner=planner)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    if state is not None:
        state.load_state_dict(saved["thalweg"])


def resharded() -> dict[str, Any]:
    """Takes three steps and, where 2 workers have saved for 4, or 4 for 2, loads that and takes
    three more; then saves. Returns what is said of the checkpoint, what is held back before and
    after loading and at the end, and a digest of what a rank computes with.
    """
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    state = compress(model, "int8:start=0")
    source = models.batches()
    steps(model, optimizer, source, 3)
    result: dict[str, Any] = {"held": [_held(state)]}
    folder, world = Path(os.environ["FOLDER"]), dist.get_world_size()
    theirs = folder / str(6 - world)
    if theirs.exists():
        remarks = Remarks()
        restore(model, optimizer, state, theirs, partly=True)
        result["said"] = remarks.stop()
        result["held"].append(_held(state))
        steps(model, optimizer, source, 3)
        result["held"].append(_held(state))
    checkpoint.save(parts(model, optimizer, state), checkpoint_id=folder / str(world))
    return result | {"digest": digest(gathered(model))}


def refused() -> dict[str, str]:
    """Returns what is said of what cannot be compressed, and of ranks that disagree."""
    gloo = fsdp2_cases.shard(fsdp1_cases.Groups.of("gloo"))
    first = fsdp1_cases.shard(dist.group.WORLD)
    mine = "bf16" if dist.get_rank() == 0 else "int8"
    return {
        "gloo": outcome(lambda: compress(gloo, "int8")),
        "fsdp1": outcome(lambda: compress(first, "int8")),
        "plain": outcome(lambda: compress(models.build(), "int8")),
        "powersgd": outcome(lambda: compress(sharded(), "powersgd:4")),
        "unequal": outcome(lambda: compress(sharded(), mine)),
    }


def variants() -> dict[str, Any]:
    """Trains with options of fully_shard() and int8; returns, by case, losses without a codec, with
    it and of this rank alone, a digest of what a rank computes with, and what was said.
    """
    half = MixedPrecisionPolicy(param_dtype=BRAIN, reduce_dtype=BRAIN)
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "int8": ("int8", {}),
        "bf16 over bf16": ("bf16", {"mp_policy": half}),
        "int8 over bf16": ("int8", {"mp_policy": half}),
        "gradients over bf16": ("int8", {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BRAIN)}),
        "kept": ("int8", {"reshard_after_forward": False}),
        "uneven": ("int8", {"width": 65}),
    }
    if dist.get_world_size() == 4:
        cases["smaller"] = ("int8", {"reshard_after_forward": 2})
        cases["copies"] = ("int8", {"hybrid": True})
    result = {}
    for name, (codec, options) in cases.items():
        remarks = Remarks()
        losses = []
        for one in ("", codec):
            model = sharded(**options)
            if one:
                compress(model, one)
            losses.append(models.plain_loop(model, lr=0.1, steps=6))
        losses.append(models.plain_loop(models.build(options.get("width", WIDTH)), lr=0.1, steps=6))
        result[name] = {"losses": losses, "digest": digest(gathered(model)), "said": remarks.stop()}
    return result


def by_environment(build: Callable[[], nn.Module] = sharded) -> dict[str, Any]:
    """Trains two models with one optimizer each, and the first with another one later; returns, by
    model, whether the environment has compressed it, what it holds back, and a digest of what the
    rank computes with.
    """
    result: dict[str, Any] = {}
    for name in ("first", "second"):
        model = build()
        losses = [one for n in (3, 2) for one in models.plain_loop(model, lr=0.1, steps=n)]
        state = state_of(model)
        result[name] = {
            "losses": losses,
            "codec": "" if state is None else state.codec,
            "copies": [] if state is None else [one.codec for one in state.copies],
            "held": 0.0 if state is None else _held(state),
            "digest": digest(gathered(model)),
        }
    return result


def resumed_by_environment() -> dict[str, Any]:
    """Trains a model and saves it; and goes on with a fresh one. Returns whether the environment
    has compressed that one, and what it holds back.
    """
    folder = Path(os.environ["FOLDER"]) / "plain"
    for is_fresh in (False, True):
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if is_fresh:
            restore(model, optimizer, None, folder)
        steps(model, optimizer, models.batches(), 3)
        if not is_fresh:
            checkpoint.save(parts(model, optimizer, None), checkpoint_id=folder)
    state = state_of(model)
    return {"codec": state and state.codec, "held": 0.0 if state is None else _held(state)}


def left_out() -> list[str]:
    """Trains a model, a layer of which is frozen in the second step; returns what is said."""
    remarks = Remarks()
    model = sharded()
    compress(model, "int8:start=0")
    frozen = model.blocks[0].wide
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    source = models.batches()
    for step in range(3):
        optimizer.zero_grad()
        frozen.requires_grad_(step != 1)
        models.loss_of(model, next(source)).backward()
        optimizer.step()
    return remarks.stop()


def swapped(*, hybrid: bool = False) -> dict[str, Any]:
    """Trains a layer, then freezes it and trains another one of its size; returns whether that
    one's gradient has the bits of one without a codec, and what is said.
    """

    def gradient(codec: str) -> torch.Tensor:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        layers[1].requires_grad_(False)
        mesh = fsdp2_cases.mesh_of(fsdp1_cases.Groups.of("thalweg"), hybrid)
        model = fully_shard(_Beside(*layers), mesh=mesh)
        if codec:
            compress(model, codec)
        source = torch.Generator().manual_seed(dist.get_rank())
        for trained in (0, 0, 1):
            for number, layer in enumerate(layers):
                layer.requires_grad_(number == trained)
            given = torch.randn(2, 8, WIDTH, generator=source)
            (model(given[0]) * given[1]).sum().backward()
        return models.local(layers[1].weight.grad)

    remarks = Remarks()
    same = torch.equal(gradient("int8:start=0"), gradient(""))
    return {"same": same, "said": remarks.stop()}


class _Beside(nn.Sequential):
    """Layers whose gradients do not depend on their weights, which a codec rounds."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(inputs) for layer in self]).sum(0)
