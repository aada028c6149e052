"""Lets optimizers of scripts that do not mention Thalweg do local updates: THALWEG_PS_MODE=local.

The first step is torch's own, as DistributedDataParallel has averaged it. After it the module
leaves its gradients alone, every worker steps by itself, and what workers have changed is exchanged
after each THALWEG_PS_EVERY-th step.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thalweg._activation import _first_steps, _left_alone, _served
from thalweg._settings import _logging
from thalweg._settings._config import LocalUpdates
from thalweg._torch import _patches

if TYPE_CHECKING:
    from thalweg.ps.takeover import Followed

_MODE = "THALWEG_PS_MODE"
_scaled: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # by a GradScaler
_local: weakref.WeakKeyDictionary[DistributedDataParallel, Followed] = weakref.WeakKeyDictionary()


class _Steps:
    """How many the optimizer has done."""

    done = 1

    def count(self, *_: object) -> None:
        self.done += 1


def activate() -> None:
    """From now on every optimizer is considered when it has done its first step."""
    _served.note_modules()
    _patches.install("local_updates", GradScaler, "step", _note_scaler)
    _patches.install("local_updates", DistributedDataParallel, "join_hook", _refuse_join)
    _first_steps.after_each(_look)


def optimizer_of(module: DistributedDataParallel) -> Followed | None:
    """Returns the local updates of a module; None: its gradients are averaged."""
    return _local.get(module)


def _why_not(optimizer: Optimizer, module: DistributedDataParallel | None) -> str:
    """Returns why an optimizer's gradients stay averaged in every step; empty: they do not."""
    if module is None:
        return "its parameters are in no DistributedDataParallel module"
    if module in _local:
        return "another optimizer of its module does local updates"
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return "its state is a part of all workers', so that none can step alone"
    if optimizer in _scaled:
        return (
            "a GradScaler steps it, which leaves steps out on one worker alone: make a "
            "thalweg.ps.LocalOptimizer in the script, which counts them"
        )
    return _served.why_not_instead(module) or _served.why_not_all(optimizer, module)


def _look(optimizer: Optimizer) -> None:
    wanted = _first_steps.read(LocalUpdates.from_env)
    if not wanted.every:
        return
    name, module = type(optimizer).__name__, _served.module_of(optimizer)
    if why := _why_not(optimizer, module):
        averaged = "; torch averages its gradients in every step" if module else ""
        text = f"{name} does no local updates in spite of it: {why}{averaged}"
        _say(wanted, logging.WARNING, text)
        return
    assert module is not None
    _move(optimizer, module, wanted)


def _move(optimizer: Optimizer, module: DistributedDataParallel, wanted: LocalUpdates) -> None:
    from thalweg.ps.takeover import Followed

    _local[module] = Followed(optimizer, every=wanted.every, process_group=module.process_group)
    _left_alone.leave(module)
    steps = _Steps()
    optimizer.register_step_post_hook(steps.count)
    weakref.finalize(module, _say_rest, steps, wanted, os.getpid())
    name = type(optimizer).__name__
    _say(
        wanted,
        logging.INFO,
        f"from the second step on, {name} steps on each worker alone; what they have changed is "
        f"exchanged after each step whose number is a multiple of {wanted.every}: save then",
    )


def _say_rest(steps: _Steps, wanted: LocalUpdates, pid: int) -> None:
    rest = steps.done % wanted.every
    if rest and os.getpid() == pid:
        _say(
            wanted,
            logging.WARNING,
            f"the last {rest} steps were not exchanged, and the weights of workers differ by what "
            f"each has changed in them: let the number of steps, here {steps.done}, be a multiple "
            f"of {wanted.every}",
        )


def _say(wanted: LocalUpdates, level: int, text: str) -> None:
    _logging.say(level, f"{', '.join(wanted.variables)}: {text}")


def _note_scaler(
    step: Callable[..., Any],
    scaler: GradScaler,
    /,
    optimizer: Optimizer,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    if scaler.is_enabled():
        _scaled.add(optimizer)
        if any(one.inner is optimizer for one in _local.values()):
            raise RuntimeError(
                f"thalweg: a GradScaler steps {type(optimizer).__name__}, which does local updates "
                f"({_MODE}): it must do so from the first step on"
            )
    return step(scaler, optimizer, *args, **kwargs)


def _refuse_join(
    _: Callable[..., Any],
    module: DistributedDataParallel,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    raise RuntimeError(
        f"thalweg: DistributedDataParallel({type(module.module).__name__}).join() lets workers do "
        f"different numbers of steps, and {_MODE}=local needs equally many"
    )
