"""Attaches DistributedDataParallel modules of scripts that do not mention Thalweg.

All workers must come to the same decision. They tell each other over the process group's store:
its collectives may need a device that the script has not chosen, and would hang where a node was
started without the variables. docs/zero_code.md says what wins over what.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from thalweg._config import KNOWN, Activation, ConfigError

# Modules that wait for their first training step.
_enlisted: weakref.WeakKeyDictionary[DistributedDataParallel, Activation] = (
    weakref.WeakKeyDictionary()
)
_built: collections.Counter[str] = collections.Counter()  # modules, by process group


@dataclass(frozen=True)
class Answer:
    """What one worker makes of a module."""

    codec: str = ""  # empty: the environment leaves the module alone
    error: str = ""
    obstacle: str = ""  # why it must be left alone


def activate() -> None:
    """From now on every DistributedDataParallel asks the environment. Call it once.

    A module is enlisted when it is built, which all workers do together, and attached in the first
    training step: until then the script may register a hook of its own.
    """
    build: Callable[..., None] = DistributedDataParallel.__init__
    prepare: Callable[[DistributedDataParallel], None] = DistributedDataParallel._lazy_init

    @functools.wraps(build)
    def build_and_enlist(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if dist.is_initialized():
            store().set(_announcement(dist.get_rank()), "1")
        build(self, *args, **kwargs)
        if dist.get_world_size(self.process_group) > 1:
            _enlist(self)

    # torch calls this at the beginning of forward() as long as _lazy_init_ran is not set.
    @functools.wraps(prepare)
    @_disable_dynamo  # torch.compile(module) would trace what is done here once
    def prepare_and_attach(self: DistributedDataParallel) -> None:
        if self not in _enlisted:
            prepare(self)
        elif self.training and torch.is_grad_enabled():
            prepare(self)
            _attach(self, _enlisted.pop(self))

    DistributedDataParallel.__init__ = build_and_enlist  # type: ignore[method-assign]
    DistributedDataParallel._lazy_init = prepare_and_attach  # type: ignore[method-assign]


def decide(answers: Sequence[Answer]) -> str:
    """Why a module is left alone; empty: it is to be attached. ConfigError on all workers alike."""
    for rank, answer in enumerate(answers):
        if answer.error:
            raise ConfigError(f"thalweg: rank {rank}: {answer.error}")
    for rank, answer in enumerate(answers):
        if answer.codec != answers[0].codec:
            raise ConfigError(
                f"thalweg: the environment asks for codec {answers[0].codec or '(none)'} on rank 0 "
                f"but {answer.codec or '(none)'} on rank {rank}: set the same variables everywhere"
            )
    return next((f"rank {r}: {a.obstacle}" for r, a in enumerate(answers) if a.obstacle), "")


def await_announcements(shared: Store, ranks: Sequence[int], timeout: float) -> None:
    """ConfigError names the ranks whose environment does not activate Thalweg.

    They announce themselves before they build a module, which is collective: nobody who is going to
    should need the timeout.
    """
    keys = {rank: _announcement(rank) for rank in ranks}
    try:
        shared.wait(list(keys.values()), timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [rank for rank, key in keys.items() if not shared.check([key])]
        raise ConfigError(
            f"thalweg: the environment activates it here, but not on rank "
            f"{', '.join(map(str, missing))}: set the same variables everywhere"
        ) from error


def exchange(shared: Store, answer: Answer, *, key: str, rank: int, world: int) -> list[Answer]:
    """What all workers answer, by rank; waits for them as long as the process group does."""
    keys = [f"{key}/{other}" for other in range(world)]
    shared.set(keys[rank], json.dumps(asdict(answer)))
    shared.wait(keys)
    return [Answer(**json.loads(shared.get(key))) for key in keys]


def store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _announcement(rank: int) -> str:
    return f"thalweg/activated/{rank}"


def _enlist(module: DistributedDataParallel) -> None:
    timeout = float(KNOWN["THALWEG_TIMEOUT"])
    try:
        activation = Activation.from_env()
        timeout = activation.timeout
        obstacle = _obstacle(module) if activation.codec else ""
        answer = Answer(codec=activation.codec, obstacle=obstacle)
    except ConfigError as error:
        answer = Answer(error=str(error))
    group = module.process_group
    await_announcements(store(), dist.get_process_group_ranks(group), timeout)
    _built[group.group_name] += 1
    answers = exchange(
        store(),
        answer,
        key=f"thalweg/{group.group_name}/{_built[group.group_name]}",
        rank=dist.get_rank(group),
        world=dist.get_world_size(group),
    )
    obstacle = decide(answers)
    if activation.codec and obstacle:
        text = f"stays with torch's allreduce in spite of {_reasons(activation)}: {obstacle}"
        _say(module, activation, logging.WARNING, text)
    elif activation.codec:
        _enlisted[module] = activation


def _obstacle(module: DistributedDataParallel) -> str:
    """Why this worker cannot take part with the module; empty if it can."""
    try:
        from thalweg import _model, ddp  # noqa: F401 - ddp: the native part must be loadable
    except ImportError as error:
        return f"thalweg is not installed properly: {error}"
    sparse = _model.sparse_module(module)
    if sparse:
        return f"the gradients of {sparse} are sparse, which is not supported"
    return _model.why_not(module)


def _attach(module: DistributedDataParallel, activation: Activation) -> None:
    from thalweg import _model, ddp

    if ddp.state_of(module) is not None:  # the script has called attach()
        return
    hook = _model.hook_of(module)
    if hook:
        text = f"keeps its communication hook {hook}, which wins over {_reasons(activation)}"
    else:
        state = ddp.attach(module)
        text = f"is attached as {state.job} with codec {state.codec}: {_reasons(activation)}"
    _say(module, activation, logging.INFO, text)


def _reasons(activation: Activation) -> str:
    return "; ".join([", ".join(activation.variables), *activation.remarks])


def prepare_logger(level: int) -> logging.Logger:
    """Thalweg's logger, with `level` and a way to standard error unless the script has set them."""
    logger = logging.getLogger("thalweg")
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("thalweg: %(message)s"))
        logger.addHandler(handler)
    return logger


def _say(module: DistributedDataParallel, activation: Activation, level: int, text: str) -> None:
    """On rank 0; visible also if the script has not set up logging."""
    if dist.get_rank(module.process_group) != 0:
        return
    logger = prepare_logger(activation.log_level)
    logger.log(level, "DistributedDataParallel(%s) %s", type(module.module).__name__, text)
