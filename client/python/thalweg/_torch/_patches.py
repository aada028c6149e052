"""Replaces methods and functions of torch, and puts them back. No other module assigns to them.

`DECLARED` lists all that is replaced, by whom and for what. Where two parts of Thalweg
replace the same method, it says which one calls the other: the order of installation does not
matter. The casts of `thalweg.amp`'s level O1 are not among them: they replace functions by long
lists, and only while a script asks for it (amp/_functions.py).
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

# Takes the method that it stands in front of, then the method's own arguments. The first two must
# be positional only: callers may name an argument of the method as they are named here.
Around = Callable[..., Any]


class Layer(NamedTuple):
    """A part of Thalweg that replaces a method."""

    user: str
    why: str


class Method(NamedTuple):
    """A method of torch, or a function of a module, that is replaced."""

    owner: type | types.ModuleType
    name: str
    layers: tuple[Layer, ...]  # innermost first: each one calls the one before it
    compiled: bool  # False: torch.compile must not trace what is done in it, only call it


DECLARED = (
    Method(
        DistributedDataParallel,
        "__init__",
        (
            Layer("amp", "workers get rank 0's masters, as torch gives them its parameters"),
            Layer("zero_code", "a module that is built is considered for attaching"),
            Layer("served", "modules are known whose optimizer may use the parameter server"),
        ),
        compiled=False,
    ),
    Method(
        DistributedDataParallel,
        "__setstate__",
        (Layer("zero_code", "a module that is copied or loaded is considered, too"),),
        compiled=False,
    ),
    Method(
        DistributedDataParallel,
        "_lazy_init",
        (Layer("zero_code", "a module is attached in its first training step"),),
        compiled=False,
    ),
    Method(
        DistributedDataParallel,
        "join_hook",  # of join(), and of torch's Join
        (
            Layer("served", "modules are known whose workers do different numbers of steps"),
            Layer("local_updates", "workers that exchange do equally many steps"),
        ),
        compiled=False,
    ),
    Method(
        GradScaler,
        "step",
        (Layer("local_updates", "steps that one worker alone leaves out are not counted"),),
        compiled=False,
    ),
    *(
        Method(
            owner,
            "clip_grad_norm_",
            (Layer("served", "gradients that are on shards are clipped there"),),
            compiled=False,
        )
        for owner in (nn.utils, nn.utils.clip_grad)
    ),
    Method(
        GradScaler,
        "_unscale_grads_",
        (
            Layer("finite", "gradients are read, not rewritten, to see whether they are finite"),
            Layer("amp", "masters get their gradients before anybody looks at them"),
            Layer("ps", "the shards say whether gradients are finite that are there"),
        ),
        compiled=True,
    ),
    Method(
        GradScaler,
        "_check_inf_per_device",
        (Layer("finite", "all ranks of a ShardedGradScaler hear of an infinity on one"),),
        compiled=False,
    ),
    Method(
        GradScaler,
        "update",
        (
            Layer("amp", "the scale keeps to a decoration's settings"),
            Layer("precision", "sidecars are told the scale that results, and of skipped steps"),
        ),
        compiled=True,
    ),
    Method(
        GradScaler,
        "scale",
        (
            Layer("amp", "a scaler follows the latest decoration from its first loss"),
            Layer("precision", "sidecars know the scale before gradients carry it"),
        ),
        compiled=True,
    ),
    Method(
        GradScaler,
        "load_state_dict",
        (
            Layer("amp", "a scale that was loaded is not replaced by a decoration's"),
            Layer("precision", "sidecars know the scale before gradients carry it"),
        ),
        compiled=True,
    ),
    Method(
        torch.autograd,
        "backward",
        (Layer("precision", "sidecars know the scale of a pass before its gradients come"),),
        compiled=False,
    ),
    Method(
        SGD, "step", (Layer("fused_optimizers", "the step is one pass where it can be"),), False
    ),
    Method(
        SGD,
        "__setstate__",
        (Layer("fused_optimizers", "copies hide the steps that fused ones count"),),
        compiled=False,
    ),
    Method(
        Adam, "step", (Layer("fused_optimizers", "the step is one pass where it can be"),), False
    ),
    Method(
        Optimizer,
        "state_dict",
        (Layer("resuming", "what a codec carries on all nodes alike is saved with it"),),
        compiled=False,
    ),
    Method(
        Optimizer,
        "load_state_dict",
        (Layer("resuming", "a codec goes on from what was saved with the optimizer"),),
        compiled=False,
    ),
    Method(
        nn.Module,
        "state_dict",
        (Layer("ps", "weights that are on their way from shards are part of it"),),
        compiled=False,
    ),
    Method(
        nn.Module,
        "load_state_dict",
        (Layer("ps", "weights that are on their way from shards do not replace what is loaded"),),
        compiled=False,
    ),
    Method(
        distributed_c10d,
        "_new_process_group_helper",
        (Layer("default_group", "the environment has a say in the default group's back end"),),
        compiled=False,
    ),
    *(
        Method(
            torch._C.Future,
            name,
            (Layer("process_group", "collectives of callbacks are told from a thread's others"),),
            compiled=False,
        )
        for name in ("then", "add_done_callback")
    ),
)


class _Replacement:
    """One method's layers. The function in torch's class stays the same while they change."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._arounds: dict[str, Around] = {}
        self._before = vars(method.owner)[method.name]  # a staticmethod is not its function
        self._function: Callable[..., Any] = getattr(method.owner, method.name)
        self._chain = self._function

        @functools.wraps(self._function)
        def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return self._chain(*args, **kwargs)

        ours = replaced if method.compiled else _disable_dynamo(replaced)
        self._ours = staticmethod(ours) if isinstance(self._before, staticmethod) else ours

    def has(self, user: str, around: Around) -> bool:
        return self._arounds.get(user) is around

    def set(self, user: str, around: Around | None) -> None:
        """Adds or exchanges a layer; None removes it."""
        if around is None:
            self._arounds.pop(user, None)
        else:
            self._arounds[user] = around
        chain = self._function
        for layer in self._method.layers:
            if layer.user in self._arounds:
                chain = functools.partial(self._arounds[layer.user], chain)
        self._chain = chain

    def put_in_place(self) -> None:
        setattr(self._method.owner, self._method.name, self._ours)

    def remove_if_unused(self) -> bool:
        """Returns whether torch's own method is back.

        It is not where others have replaced the method since. They keep calling ours, which then
        does nothing but call torch's.
        """
        owner, name = self._method.owner, self._method.name
        if self._arounds or vars(owner)[name] is not self._ours:
            return False
        setattr(owner, name, self._before)
        return True


_lock = threading.Lock()
_replaced: dict[tuple[type | types.ModuleType, str], _Replacement] = {}


def install(user: str, owner: type | types.ModuleType, name: str, around: Around) -> None:
    """From now on `owner.name` is `around`, which gets what it replaces as its first argument.

    `DECLARED` must list it (LookupError). Installing again exchanges the user's earlier function;
    if it is the same, this takes no time. Thread-safe.
    """
    replacement = _replaced.get((owner, name))
    if replacement is not None and replacement.has(user, around):
        return
    method = _declared(user, owner, name)
    with _lock:
        replacement = _replaced.get((owner, name))
        if replacement is None:
            replacement = _replaced[owner, name] = _Replacement(method)
            replacement.put_in_place()
        replacement.set(user, around)


def uninstall(user: str) -> None:
    """Takes back all that `user` has installed; a method without layers is torch's own object."""
    with _lock:
        for key, replacement in list(_replaced.items()):
            replacement.set(user, None)
            if replacement.remove_if_unused():
                del _replaced[key]


def _declared(user: str, owner: type | types.ModuleType, name: str) -> Method:
    for method in DECLARED:
        if (method.owner, method.name) == (owner, name):
            if any(layer.user == user for layer in method.layers):
                return method
            break
    raise LookupError(f"{owner.__name__}.{name} is not declared as replaced by {user!r}")
