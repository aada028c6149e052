"""Moves the optimizers of scripts that do not mention Thalweg to the shards: THALWEG_PS.

The first step is torch's own, on every worker: no part of Thalweg sees an optimizer and its
DistributedDataParallel module earlier that belong together. After it the shards have the weights
and the state that result, the optimizer has become a ServerOptimizer, and the module leaves its
gradients alone.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from thalweg._activation import _first_steps, _left_alone
from thalweg._settings import _logging
from thalweg._settings._checks import PS_KINDS
from thalweg._settings._config import Served
from thalweg._torch import _patches
from thalweg.optim.lamb import FusedLAMB

if TYPE_CHECKING:
    from thalweg.ps import ServerOptimizer

_NAME = "THALWEG_PS"
_KINDS: dict[type[Optimizer], str] = dict(zip((SGD, Adam, AdamW, FusedLAMB), PS_KINDS, strict=True))
# Modules, by the order in which they were built, which is the same on all workers.
_modules: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_joined: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # in a context of join()
_served: weakref.WeakKeyDictionary[DistributedDataParallel, ServerOptimizer] = (
    weakref.WeakKeyDictionary()
)


def activate() -> None:
    """From now on every optimizer is considered when it has done its first step."""
    note_modules()
    _patches.install("served", DistributedDataParallel, "join_hook", _note_join)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        _patches.install("served", owner, "clip_grad_norm_", _clip)
    _first_steps.before_each(_refuse_second)
    _first_steps.after_each(_look)


def note_modules() -> None:
    """From now on module_of() knows modules that are built."""
    _patches.install("served", DistributedDataParallel, "__init__", _build_and_note)


def module_of(optimizer: Optimizer) -> DistributedDataParallel | None:
    """Returns the module whose gradients the optimizer takes; None: no module has its parameters.

    A script may have wrapped the same parameters several times. Of those modules that is the latest
    that has all that the optimizer trains, and has run.
    """
    of_groups = [p for group in optimizer.param_groups for p in group["params"]]
    mine = {id(p) for p in of_groups if p.requires_grad} or {id(p) for p in of_groups}
    best, found = (False, False, -1), None
    for module, number in list(_modules.items()):
        theirs = {id(p) for p in module.parameters()}
        fits = (mine <= theirs, module._lazy_init_ran, number)
        if mine & theirs and fits > best:
            best, found = fits, module
    return found


def optimizer_of(module: DistributedDataParallel) -> ServerOptimizer | None:
    """Returns the module's optimizer if the environment has moved it to the shards."""
    return _served.get(module)


def why_not(optimizer: Optimizer, module: DistributedDataParallel | None, wanted: str) -> str:
    """Returns why an optimizer stays on the workers; empty: it moves to the shards.

    `module` has one of its parameters; None: no module of DistributedDataParallel has. `wanted` is
    the kind of optimizers that move: one of PS_KINDS, or "auto" for all of them.
    """
    kind = _KINDS.get(type(optimizer), "")
    if module is None:
        return "its parameters are in no DistributedDataParallel module"
    if not kind or wanted not in ("auto", kind):
        which = ", ".join(_KINDS.values()) if wanted == "auto" else wanted
        return f"it is a {type(optimizer).__module__}.{type(optimizer).__name__}, and not {which}"
    if module in _served:
        return "another optimizer of its module is on the shards"
    if module in _joined:
        return "join() lets workers do different numbers of steps, and shards need equally many"
    return (
        why_not_instead(module)
        or why_not_all(optimizer, module)
        or _why_no_shards(optimizer, module)
    )


def _why_no_shards(optimizer: Optimizer, module: DistributedDataParallel) -> str:
    """Returns what of it shards do not have; empty: they have all."""
    from thalweg.ps._joining import DTYPES
    from thalweg.ps._rules import rule_of

    try:
        rule_of(optimizer.param_groups)
    except ValueError as error:
        return str(error).removeprefix("thalweg: ")
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    others = [str(p.dtype) for p in trained if p.dtype not in DTYPES]
    if others:
        return f"it has parameters in {others[0]}"
    counts = {int(optimizer.state.get(p, {}).get("step", 0)) for p in trained}
    if len(counts) == 1 or _why_unused(module):  # else each parameter travels by itself
        return ""
    return (
        f"its parameters have seen from {min(counts)} to {max(counts)} steps, and shards count the "
        "steps of parameters that travel together"
    )


def why_not_instead(module: DistributedDataParallel) -> str:
    """Returns why the module must go on averaging gradients; empty: it need not."""
    from thalweg._attach import _model

    hook = _model.hook_of(module)
    return hook and f"the script's communication hook {hook} gets its gradients"


def why_not_all(optimizer: Optimizer, module: DistributedDataParallel) -> str:
    """Returns how their trainable parameters differ; empty: they do not."""
    ours = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    theirs = {id(p) for p in module.parameters() if p.requires_grad}
    if ours == theirs:
        return ""
    return (
        f"it has {len(ours)} trainable parameters, and its module {len(theirs)}, "
        f"of which {len(ours & theirs)} are the same"
    )


def _build_and_note(
    build: Callable[..., None],
    module: DistributedDataParallel,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> None:
    build(module, *args, **kwargs)
    _modules[module] = next(_numbers)


def _refuse_second(optimizer: Optimizer) -> None:
    """Fails the job where a module's gradients go to the shards, and another optimizer than the one
    that is there wants them.
    """
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module, ours in _served.items():
        if any(id(p) in mine for p in module.parameters()):
            ours._serving.fail(
                f"{_name(optimizer)} steps parameters of DistributedDataParallel("
                f"{type(module.module).__name__}), whose gradients go to the shards, for another "
                "optimizer: keep that one, and change its groups"
            )


def _look(optimizer: Optimizer) -> None:
    wanted = _first_steps.read(Served.from_env)
    if not wanted.kind:
        return
    module = module_of(optimizer)
    if why := why_not(optimizer, module, wanted.kind):
        without = ", ".join(wanted.averaging)
        without = without and f"; torch averages the gradients, and {without} has no effect"
        text = f"{_name(optimizer)} stays on the workers in spite of it: {why}{without}"
        _say(wanted, logging.WARNING, text)
        return
    assert module is not None
    _move(optimizer, module, wanted)


def _move(optimizer: Optimizer, module: DistributedDataParallel, wanted: Served) -> None:
    from thalweg.ps import takeover

    name, group = _name(optimizer), module.process_group
    unused = _why_unused(module)
    ours = takeover.take_over(
        optimizer,
        _KINDS[type(optimizer)],
        group,
        pull=wanted.pull,
        overlap=wanted.overlap,
        find_unused_parameters=bool(unused),
        asked_by=_NAME,
    )
    _served[module] = ours
    _left_alone.leave(module, functools.partial(_accumulate, weakref.ref(ours)))
    module.register_forward_hook(_keep_buffers)
    cost = f"; with {unused} each parameter travels by itself, which is slower" if unused else ""
    _say(wanted, logging.INFO, f"{name} is on the shards from the second step on{cost}")


def _why_unused(module: DistributedDataParallel) -> str:
    """Returns why a parameter may lack a gradient in a step; empty: none does."""
    if module.find_unused_parameters:
        return "find_unused_parameters"
    # In a static graph all steps leave out what the first one has.
    lack = module.static_graph and any(
        p.requires_grad and p.grad is None for p in module.parameters()
    )
    return "static_graph and unused parameters" if lack else ""


def _keep_buffers(module: DistributedDataParallel, *_: object) -> None:
    """Lets the next forward pass synchronise buffers, as torch does where gradients are. Modules
    are stored with their hooks, and this one.
    """
    ours = _served.get(module)
    if ours is not None and torch.is_grad_enabled():
        module.require_forward_param_sync = not ours.accumulates


def _note_join(
    join_hook: Callable[..., Any],
    module: DistributedDataParallel,
    /,
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    if module in _served:
        raise RuntimeError(
            f"thalweg: DistributedDataParallel({type(module.module).__name__}) in join(), which "
            f"lets workers do different numbers of steps: its optimizer is on the shards ({_NAME}) "
            "and needs equally many; use join() from the first step on, and it stays on the workers"
        )
    _joined.add(module)
    return join_hook(module, **kwargs)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _say(wanted: Served, level: int, text: str) -> None:
    _logging.say(level, f"{', '.join(wanted.variables)}: {text}")


def _accumulate(weak: weakref.ref[ServerOptimizer], is_last: bool) -> None:
    """Hears whether the script wants the next gradients averaged, by no_sync() or by hand."""
    if (ours := weak()) is not None:
        ours.accumulates = not is_last


def _clip(
    clip: Callable[..., Tensor],
    parameters: Any,  # noqa: ANN401 - torch's own
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Tensor:
    """Is clip_grad_norm_: gradients that are on shards are clipped there, in the step."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for ours in _served.values():
        # Gradients that some workers lack may be clipped on all.
        finds_unused = ours._wishes.finds_unused
        given = {
            id(one)
            for one in tensors
            if one.grad is not None or (finds_unused and one.requires_grad)
        }
        served = {id(p) for group in ours.param_groups for p in group["params"] if p.requires_grad}
        if not given & served or ours.accumulates:
            continue
        if given != served or float(norm_type) != 2:
            raise RuntimeError(
                f"thalweg: clip_grad_norm_ of {len(given & served)} of the {len(served)} "
                f"parameters whose gradients are on shards, and {len(given - served)} others, with "
                f"norm_type {norm_type}: shards clip all together, by the norm of type 2 ({_NAME})"
            )
        norm = ours.clip_grad_norm_(max_norm)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"thalweg: the norm of the gradients is {float(norm)}")
        return norm
    return clip(tensors, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
