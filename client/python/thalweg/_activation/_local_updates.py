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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from thalweg._activation import _served
from thalweg._settings import _logging
from thalweg._settings._config import log_level
from thalweg._settings._variables import ConfigError, assignments, check_choice
from thalweg._torch import _patches

if TYPE_CHECKING:
    from thalweg.ps.takeover import Followed

MODE, EVERY = "THALWEG_PS_MODE", "THALWEG_PS_EVERY"
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
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
    _patches.install("local_updates", DistributedDataParallel, "join", _refuse_join)
    register_optimizer_step_post_hook(_disable_dynamo(_look))


def optimizer_of(module: DistributedDataParallel) -> Followed | None:
    """Returns the local updates of a module; None: its gradients are averaged."""
    return _local.get(module)


def interval(env: Mapping[str, str]) -> int:
    """Returns the steps from one exchange to the next. Raises ConfigError."""
    check_choice(MODE, env[MODE], ("0", "local"))
    if asking := assignments(env, ["THALWEG_PS"]):
        raise ConfigError(
            f"{MODE}=local lets workers step alone, and {asking[0]} lets shards do every step: "
            "unset one of them"
        )
    text = env.get(EVERY, "")
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{EVERY} is {text!r}, expected a number of steps, such as 50")
    return int(text)


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
    return _served.why_not_all(optimizer, module)


def _look(optimizer: Optimizer, *_: object) -> None:
    if getattr(optimizer, "is_internal", False):
        return
    if optimizer in _seen or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _seen.add(optimizer)
    try:
        every = interval(os.environ)
    except ConfigError as error:
        raise ConfigError(f"thalweg: {error}") from None
    name, module = type(optimizer).__name__, _served.module_of(optimizer)
    if why := _why_not(optimizer, module):
        averaged = "; torch averages its gradients in every step" if module else ""
        _say(logging.WARNING, f"{name} does no local updates in spite of it: {why}{averaged}")
        return
    assert module is not None
    _move(optimizer, module, every)


def _move(optimizer: Optimizer, module: DistributedDataParallel, every: int) -> None:
    from thalweg.ps.takeover import Followed

    _local[module] = Followed(optimizer, every=every, process_group=module.process_group)
    module.require_backward_grad_sync = False
    steps = _Steps()
    optimizer.register_step_post_hook(steps.count)
    weakref.finalize(module, _say_rest, steps, every, os.getpid())
    name = type(optimizer).__name__
    _say(
        logging.INFO,
        f"from the second step on, {name} steps on each worker alone; what they have changed is "
        f"exchanged after each step whose number is a multiple of {every}: save then",
    )


def _say_rest(steps: _Steps, every: int, pid: int) -> None:
    rest = steps.done % every
    if rest and os.getpid() == pid:
        _say(
            logging.WARNING,
            f"the last {rest} steps were not exchanged, and the weights of workers differ by what "
            f"each has changed in them: let the number of steps, here {steps.done}, be a multiple "
            f"of {every}",
        )


def _say(level: int, text: str) -> None:
    """On rank 0; visible also if the script has not set up logging."""
    if int(os.environ.get("RANK", "0")) == 0:
        asking = ", ".join(assignments(os.environ, [MODE, EVERY]))
        _logging.prepare(log_level()).log(level, "%s: %s", asking, text)


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
                f"({MODE}): it must do so from the first step on"
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
        f"different numbers of steps, and {MODE}=local needs equally many"
    )
