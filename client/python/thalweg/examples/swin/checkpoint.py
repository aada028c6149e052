"""Saves trainings, and resumes them with the bits of one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from thalweg.examples.swin import SwinError
from thalweg.examples.swin.loop import Run

_SHARED = "training.pth"  # what all workers have in common


def save(run: Run, folder: Path, epochs: int) -> None:
    """Writes what all have in common, on each node, and what each worker has of its own. All
    workers call it together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mixing: dict[str, Any] = np.random.get_state(legacy=False)["state"]
    own = {
        "torch": torch.get_rng_state(),
        "numpy": (torch.from_numpy(mixing["key"].astype(np.int64)), mixing["pos"]),
        "thalweg": None if run.state is None else run.state.state_dict(),
    }
    torch.save(own, folder / _own())
    if int(dist.get_node_local_rank()) == 0:
        shared = {
            "epochs": epochs,
            "updates": run.updates,
            "model": run.model.module.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "precision": run.level.state_dict(),
        }
        torch.save(shared, folder / _SHARED)
    dist.barrier()


def resume(run: Run, path: str) -> int:
    """Restores what save() has written to the folder; returns how many epochs that had."""
    folder = Path(path)
    shared, own = (_read(folder / name, run.device) for name in (_SHARED, _own()))
    try:
        run.model.module.load_state_dict(shared["model"])
    except RuntimeError as error:
        raise SwinError(f"{folder} was saved from another model: {error}") from None
    run.optimizer.load_state_dict(shared["optimizer"])
    run.level.load_state_dict(shared["precision"])
    run.updates = shared["updates"]
    torch.set_rng_state(own["torch"].cpu())
    words, position = own["numpy"]
    np.random.set_state(("MT19937", words.cpu().numpy().astype(np.uint32), position, 0, 0.0))
    if run.state is not None:
        if own["thalweg"] is None:
            raise SwinError(f"{folder} was saved by a training without Thalweg: use its back end")
        run.state.load_state_dict(own["thalweg"])
    return int(shared["epochs"])


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
