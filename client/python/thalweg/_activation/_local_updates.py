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
from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Steps:
    """How many a module's optimizers have done."""

    done = 1

    def count(self, *_: object) -> None:
        self.done += 1


class _Local(NamedTuple):
    followed: Followed
    steps: _Steps


_local: weakref.WeakKeyDictionary[DistributedDataParallel, _Local] = weakref.WeakKeyDictionary()


def activate() -> None:
    """From now on every optimizer is considered when it has done its first step."""
    _served.note_modules()
    _patches.install("local_updates", GradScaler, "step", _note_scaler)
    _patches.install("local_updates", DistributedDataParallel, "join_hook", _refuse_join)
    _first_steps.before_each(_follow_another)
    _first_steps.after_each(_look)


def optimizer_of(module: DistributedDataParallel) -> Followed | None:
    """Returns the local updates of a module; None: its gradients are averaged."""
    return _local[module].followed if module in _local else None


def _why_not(optimizer: Optimizer, module: DistributedDataParallel | None) -> str:
    """Returns why an optimizer's gradients stay averaged in every step; empty: they do not."""
    if module is None:
        return "its parameters are in no DistributedDataParallel module"
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return "its state is a part of all workers', so that none can step alone"
    if optimizer in _scaled:
        return (
            "a GradScaler steps it, which leaves steps out on one worker alone: make a "
            "thalweg.ps.LocalOptimizer in the script, which counts them"
        )
    return _served.why_not_instead(module) or _served.why_not_all(optimizer, module)


def _follow_another(optimizer: Optimizer) -> None:
    """Lets a module that does local updates go on with an optimizer that its script has made anew;
    fails the job where it cannot, because nobody averages the module's gradients.
    """
    module = _served.module_of(optimizer)
    if module is None or module not in _local:
        return
    followed, steps = _local[module]
    name, former = type(optimizer).__name__, type(followed.inner).__name__
    if why := _why_not(optimizer, module):
        followed.refuse(
            f"{name} cannot go on with the local updates of {former}: {why}: keep that one, and "
            "change its groups, or wrap the module anew"
        )
    followed.follow(optimizer)
    optimizer.register_step_post_hook(steps.count)
    wanted = _first_steps.read(LocalUpdates.from_env)
    _say(
        wanted,
        logging.INFO,
        f"{name} goes on with the local updates of {former}, and with the number of its steps",
    )


def _look(optimizer: Optimizer) -> None:
    wanted = _first_steps.read(LocalUpdates.from_env)
    name, module = type(optimizer).__name__, _served.module_of(optimizer)
    if not wanted.every or (module is not None and module in _local):
        return
    if why := _why_not(optimizer, module):
        averaged = "; torch averages its gradients in every step" if module else ""
        text = f"{name} does no local updates in spite of it: {why}{averaged}"
        _say(wanted, logging.WARNING, text)
        return
    assert module is not None
    _move(optimizer, module, wanted)


def _move(optimizer: Optimizer, module: DistributedDataParallel, wanted: LocalUpdates) -> None:
    from thalweg.ps.takeover import Followed

    group = module.process_group
    _local[module] = _Local(Followed(optimizer, every=wanted.every, process_group=group), _Steps())
    _left_alone.leave(module)
    steps = _local[module].steps
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
        if any(one.followed.inner is optimizer for one in _local.values()):
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
