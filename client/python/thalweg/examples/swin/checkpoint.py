"""Saves trainings, and resumes them with the bits of one that never stopped.

A checkpoint is a folder with one name on all hosts, which need not share it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from thalweg.examples.swin import SwinError
from thalweg.examples.swin.config import Config
from thalweg.examples.swin.loop import Run
from thalweg.examples.swin.sharding import load_state, state_of
from thalweg.fsdp import write

_SHARED = "training.pth"  # what all workers have in common


def save(run: Run, folder: Path, epochs: int) -> None:
    """Writes what all have in common, on each node, and what each worker has of its own. All
    workers call it together. What was sharded is written by rank 0 alone.
    """
    mixing: Any = np.random.get_state()
    _, words, *rest = mixing
    own = {
        "torch": torch.get_rng_state(),
        "numpy": (torch.from_numpy(words.astype(np.int64)), *rest),
        "thalweg": None if run.state is None else run.state.state_dict(),
    }
    write(folder / _own(), own)
    state = state_of(run.model, run.optimizer)
    if state and int(dist.get_node_local_rank()) == 0:
        progress = {"epochs": epochs, "updates": run.updates, "precision": run.level.state_dict()}
        write(folder / _SHARED, {"settings": _settings(run.config), **progress, **state})
    dist.barrier()


def resume(run: Run, path: str) -> int:
    """Restores what save() has written to the folder; returns how many epochs that had."""
    folder = Path(path)
    shared, own = _read_shared(run, folder), _read(folder / _own(), run.device)
    _check_settings(run, folder, shared.get("settings") or {})
    try:
        load_state(run.model, run.optimizer, shared)
    except RuntimeError as error:
        raise SwinError(f"{folder} was saved from another model: {error}") from None
    run.level.load_state_dict(shared["precision"])
    run.updates = shared["updates"]
    torch.set_rng_state(own["torch"].cpu())
    words, *rest = own["numpy"]
    np.random.set_state(("MT19937", words.cpu().numpy().astype(np.uint32), *rest))
    if run.state is not None:
        if own["thalweg"] is None:
            raise SwinError(f"{folder} was saved by a training without Thalweg: use its back end")
        run.state.load_state_dict(own["thalweg"])
    return int(shared["epochs"])


def _settings(config: Config) -> dict[str, Any]:
    """Returns the settings without which a checkpoint's parts do not fit."""
    kept: dict[str, Any] = {"AMP_ENABLE": config.AMP_ENABLE}
    if config.AMP_ENABLE:
        kept["AMP_OPT_LEVEL"] = config.AMP_OPT_LEVEL
    # Both keep DistributedDataParallel's whole model; who has none of Thalweg's state hears of it.
    return kept | {"BACKEND": "ddp" if config.BACKEND == "thalweg" else config.BACKEND}


def _check_settings(run: Run, folder: Path, saved: dict[str, Any]) -> None:
    """Raises SwinError if the checkpoint was saved with another back end or precision. Older ones
    do not say with which.
    """
    for key, now in _settings(run.config).items():
        if saved.get(key, now) != now:
            raise SwinError(
                f"{folder} was saved with {key} {saved[key]}, and this training has {now}: go on "
                "with what it was saved with"
            )


def _read_shared(run: Run, folder: Path) -> dict[str, Any]:
    """Returns what all have in common; the others hear it from rank 0 where the model is sharded,
    whose states reach them later.
    """
    if run.config.BACKEND != "fsdp":
        return _read(folder / _SHARED, run.device)
    shared = _read(folder / _SHARED, run.device) if dist.get_rank() == 0 else {}
    names = ("settings", "epochs", "updates", "precision")
    said = [{name: shared.get(name) for name in names}]
    dist.broadcast_object_list(said)
    return {**said[0], **shared}


def _own() -> str:
    return f"rank{dist.get_rank()}.pth"


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    if not path.exists():
        raise SwinError(
            f"there is no {path}: MODEL.RESUME is the folder of a checkpoint, which has one such "
            "file for each worker"
        )
    loaded: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return loaded
