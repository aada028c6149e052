"""Trains with the optimizer on the shards, on the workers, and half with each, in several ways."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

from digests import digest
from server_optimizer_trainers import Trainer, on_servers, on_workers

from thalweg.ps import ServerOptimizer

# By name, what the environment says of clipping and of a GradScaler.
WAYS: dict[str, dict[str, str]] = {
    "plain": {},
    "clipped": {"CLIP": "0.2"},
    "scaled": {"SCALING": "unscaled"},
    "scaled and clipped": {"SCALING": "scaled", "CLIP": "0.2"},
}


def trained_every_way() -> dict[str, dict[str, Any]]:
    """Trains OPTIMIZER for STEPS steps in each of WAYS."""
    return {name: _train(**way) for name, way in WAYS.items()}


def _train(**way: str) -> dict[str, Any]:
    case, steps = os.environ["OPTIMIZER"], int(os.environ["STEPS"])
    with _environment(way):
        theirs, before = _whole(on_workers, case, steps)
        ours, _ = _whole(on_servers, case, steps)
        return {
            "before": before,
            "workers": theirs,
            "servers": ours,
            "servers then workers": _halves(on_servers, on_workers, case, steps),
            "workers then servers": _halves(on_workers, on_servers, case, steps),
        }


def _whole(
    make: Callable[[str], Trainer], case: str, steps: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a trainer has at the end, and what it had at the beginning."""
    trainer = make(case)
    before = _outcome(trainer)
    trainer.train(steps)
    return _outcome(trainer), before


def _halves(
    first: Callable[[str], Trainer], second: Callable[[str], Trainer], case: str, steps: int
) -> dict[str, Any]:
    """Returns what the second has that goes on from a checkpoint of the first."""
    half = steps // 2
    before = first(case)
    before.train(half)
    after = second(case)
    go_on(before, after)
    after.train(steps - half)
    return _outcome(after)


def go_on(before: Trainer, after: Trainer) -> None:
    """Loads a checkpoint of `before` in `after`."""
    plain = getattr(before.model, "module", before.model)
    # Either order must do: the optimizer's state first on one side, the model's on the other.
    if isinstance(after.optimizer, ServerOptimizer):
        after.optimizer.load_state_dict(before.optimizer.state_dict())
    getattr(after.model, "module", after.model).load_state_dict(plain.state_dict())
    if not isinstance(after.optimizer, ServerOptimizer):
        after.optimizer.load_state_dict(before.optimizer.state_dict())
    after.scheduler.load_state_dict(before.scheduler.state_dict())
    after.scaler.load_state_dict(before.scaler.state_dict())
    after.step, after.skipped = before.step, before.skipped


def _outcome(trainer: Trainer) -> dict[str, Any]:
    return {
        "weights": digest(getattr(trainer.model, "module", trainer.model)),
        "scale": trainer.scaler.get_scale(),
        "skipped": trainer.skipped,
        "norm": float(getattr(trainer.optimizer, "grad_norm", 0) or 0),
    }


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        gc.collect()  # optimizers that nobody needs leave their jobs
