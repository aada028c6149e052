"""Attaches DistributedDataParallel modules of scripts that do not mention Thalweg.

All workers must come to the same decision (_agreement). docs/zero_code.md says what wins over what.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thalweg._activation import _agreement, _sharded
from thalweg._activation._agreement import Answer
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
        _agreement.announce()
    build(module, *args, **kwargs)
    if dist.get_world_size(module.process_group) > 1:
        _enlist(module, together=_synchronises(module, args, kwargs))


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
            _enlist(module, together=False)
        if activation := _enlisted.pop(module, None):
            _attach(module, activation)
    elif torch.is_grad_enabled() and module in _enlisted:
        _watch(module, _enlisted[module])


def _restore_and_note(
    restore: Callable[..., None], module: DistributedDataParallel, /, state: dict[str, Any]
) -> None:
    restore(module, state)
    if dist.get_world_size(module.process_group) > 1:
        _agreement.announce()
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


def _synchronises(module: DistributedDataParallel, args: Any, kwargs: Any) -> bool:  # noqa: ANN401
    """Returns whether building a module with these arguments waits for all workers."""
    given = inspect.signature(DistributedDataParallel.__init__).bind(module, *args, **kwargs)
    return bool(given.arguments.get("init_sync", True))


def _enlist(module: DistributedDataParallel, *, together: bool) -> None:
    """`together`: a collective has just brought the workers here. Otherwise they may be as late as
    to a step.
    """
    timeout, step_timeout = float(KNOWN["THALWEG_TIMEOUT"]), 0.0
    try:
        activation = Activation.from_env()
        timeout, step_timeout = activation.timeout, activation.step_timeout
        obstacle = _obstacle(module, activation.min_nodes) if activation.codec else ""
        answer = Answer(codec=activation.codec, obstacle=obstacle)
    except ConfigError as error:
        answer = Answer(error=str(error))
    group = module.process_group
    shared, rank = _rendezvous.default_store(), dist.get_rank(group)
    longest = timeout if together else max(timeout, step_timeout or _timeout_of(module))
    ranks = dist.get_process_group_ranks(group)
    _agreement.await_announcements(shared, ranks, timeout, longest=longest, rank=rank)
    answers = _agreement.exchange(
        shared,
        answer,
        name=f"module/{group.group_name}",
        rank=rank,
        world=dist.get_world_size(group),
        timeout=longest,
        variable="THALWEG_STEP_TIMEOUT" if longest > timeout else "THALWEG_TIMEOUT",
        quiet=math.inf if together else timeout,
    )
    obstacle = _agreement.decide(answers)
    if activation.codec and obstacle:
        text = f"stays with torch's allreduce in spite of {_reasons(activation)}: {obstacle}"
        _say(module, logging.WARNING, text)
    elif activation.codec:
        _enlisted[module] = activation


def _timeout_of(module: DistributedDataParallel) -> float:
    """Returns how long the module's collectives would wait for a worker, in seconds."""
    try:
        from thalweg._attach import _model
        from thalweg._c10d import _process_group
    except ImportError:  # _obstacle() says so
        return float(dist.default_pg_timeout.total_seconds())
    return _process_group.timeout_of(module.process_group, _model.cuda_device(module))


def _obstacle(module: DistributedDataParallel, min_nodes: int) -> str:
    """Why this worker cannot take part with the module; empty if it can."""
    try:
        from thalweg import ddp  # noqa: F401 - ddp: the native part must be loadable
        from thalweg._attach import _model
    except ImportError as error:
        return f"thalweg is not installed properly: {error}"
    sparse = _model.sparse_module(module)
    if sparse:
        return f"the gradients of {sparse} are sparse, which is not supported"
    return _model.why_not(module, min_nodes)


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
