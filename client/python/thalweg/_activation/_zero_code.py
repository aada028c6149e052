"""Attaches DistributedDataParallel modules of scripts that do not mention Thalweg.

All workers must come to the same decision. They tell each other over the process group's store:
its collectives may need a device that the script has not chosen, and would hang where a node was
started without the variables. docs/zero_code.md says what wins over what.
"""

from __future__ import annotations

import functools
import json
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thalweg._activation import _sharded
from thalweg._attach import _resuming
from thalweg._job import _rendezvous
from thalweg._settings import _logging
from thalweg._settings._config import Activation, ConfigError
from thalweg._settings._variables import KNOWN
from thalweg._torch import _patches

# Modules that wait for their first training step: all workers have agreed to attach them.
_enlisted: weakref.WeakKeyDictionary[DistributedDataParallel, Activation] = (
    weakref.WeakKeyDictionary()
)
# Modules that were copied or loaded. Perhaps not all workers have, so that nobody has asked them
# before the first training step. True: torch takes them for modules that have run before.
_copies: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()
# Hooks that see an enlisted module run backward.
_watches: weakref.WeakKeyDictionary[DistributedDataParallel, RemovableHandle] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Answer:
    """An Answer says whether one worker attaches a module, and how."""

    codec: str = ""  # empty: the environment leaves the module alone
    error: str = ""
    obstacle: str = ""  # why it must be left alone


def activate() -> None:
    """From now on every DistributedDataParallel asks the environment.

    A module is enlisted when it is built, which all workers do together, and attached in the first
    training step: until then the script may register a hook of its own. A module that copy.deepcopy
    or torch.load has made is enlisted in its first training step as well.
    """
    install = functools.partial(_patches.install, "zero_code", DistributedDataParallel)
    install("__init__", _build_and_enlist)
    install("__setstate__", _restore_and_note)
    install("_lazy_init", _prepare_and_attach)
    _resuming.install()
    _sharded.activate()


def _build_and_enlist(
    build: Callable[..., None],
    module: DistributedDataParallel,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> None:
    if dist.is_initialized():
        _announce()
    build(module, *args, **kwargs)
    if dist.get_world_size(module.process_group) > 1:
        _enlist(module)


def _prepare_and_attach(
    prepare: Callable[[DistributedDataParallel], None], module: DistributedDataParallel, /
) -> None:
    """torch calls it at the beginning of forward() as long as _lazy_init_ran is not set."""
    if module not in _enlisted and module not in _copies:
        prepare(module)
    elif torch.is_grad_enabled() and (module.training or module.module.training):
        if _copies.pop(module, False):
            module._lazy_init_ran = True
        else:
            prepare(module)
        if module not in _enlisted:
            _enlist(module)
        if activation := _enlisted.pop(module, None):
            _attach(module, activation)
    elif torch.is_grad_enabled() and module in _enlisted:
        _watch(module, _enlisted[module])


def _restore_and_note(
    restore: Callable[..., None], module: DistributedDataParallel, /, state: dict[str, Any]
) -> None:
    restore(module, state)
    if dist.get_world_size(module.process_group) > 1:
        _announce()
        _copies[module] = module._lazy_init_ran
        module._lazy_init_ran = False


def _watch(module: DistributedDataParallel, activation: Activation) -> None:
    """Warns once when an enlisted module that is not attached yet runs backward."""
    if module in _watches:
        return
    weak = weakref.ref(module)

    def warn(_: object) -> None:
        module = weak()
        if module is None:
            return
        _watches[module].remove()
        if module in _enlisted:
            text = (
                f"runs backward in eval mode, and is not attached in spite of "
                f"{_reasons(activation)}: torch averages its gradients until a forward pass in "
                "training mode. Call its train(), or thalweg.ddp.attach()"
            )
            _say(module, logging.WARNING, text)

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    _watches[module] = register_multi_grad_hook(parameters, warn, mode="any")


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
    should need the timeout. An announcement that an earlier attempt has left in the store hides a
    rank only here: exchange() names it.
    """
    places = _rendezvous.missing(shared, [_announcement(rank) for rank in ranks], timeout)
    if places:
        raise ConfigError(
            f"thalweg: the environment activates it here, but not on rank "
            f"{', '.join(str(ranks[place]) for place in places)}: set the same variables everywhere"
        )


def exchange(
    shared: Store, answer: Answer, *, name: str, rank: int, world: int, timeout: float
) -> list[Answer]:
    """Returns what all workers answer, by rank. Raises TimeoutError, naming those that do not."""
    given = _rendezvous.gather(
        shared,
        name,
        json.dumps(asdict(answer)),
        where="the same DistributedDataParallel module",
        rank=rank,
        world=world,
        timeout=timeout,
    )
    return [Answer(**json.loads(one)) for one in given]


def _announcement(rank: int) -> str:
    return f"thalweg/activated/{rank}"


def _announce() -> None:
    _rendezvous.default_store().set(_announcement(dist.get_rank()), "1")


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
    shared = _rendezvous.default_store()
    await_announcements(shared, dist.get_process_group_ranks(group), timeout)
    answers = exchange(
        shared,
        answer,
        name=f"module/{group.group_name}",
        rank=dist.get_rank(group),
        world=dist.get_world_size(group),
        timeout=timeout,
    )
    obstacle = decide(answers)
    if activation.codec and obstacle:
        text = f"stays with torch's allreduce in spite of {_reasons(activation)}: {obstacle}"
        _say(module, logging.WARNING, text)
    elif activation.codec:
        _enlisted[module] = activation


def _obstacle(module: DistributedDataParallel) -> str:
    """Why this worker cannot take part with the module; empty if it can."""
    try:
        from thalweg import ddp  # noqa: F401 - ddp: the native part must be loadable
        from thalweg._attach import _model
    except ImportError as error:
        return f"thalweg is not installed properly: {error}"
    sparse = _model.sparse_module(module)
    if sparse:
        return f"the gradients of {sparse} are sparse, which is not supported"
    return _model.why_not(module)


def _attach(module: DistributedDataParallel, activation: Activation) -> None:
    from thalweg import ddp
    from thalweg._attach import _model

    if module in _watches:
        _watches.pop(module).remove()
    if ddp.state_of(module) is not None:  # the script has called attach()
        return
    hook = _model.hook_of(module)
    if hook:
        text = f"keeps its communication hook {hook}, which wins over {_reasons(activation)}"
    else:
        state = ddp.attach(module)
        where = f" and {state.shards}" if state.shards else ""
        text = f"is attached as {state.job} with codec {state.codec}{where}: {_reasons(activation)}"
    _say(module, logging.INFO, text)
    if (attached := ddp.state_of(module)) is not None:
        _resuming.settle(module, attached)  # this is the first training step


def _reasons(activation: Activation) -> str:
    return "; ".join([", ".join(activation.variables), *activation.remarks])


def _say(module: DistributedDataParallel, level: int, text: str) -> None:
    name = f"DistributedDataParallel({type(module.module).__name__})"
    _logging.say(level, f"{name} {text}", module.process_group)
