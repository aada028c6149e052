"""Finds which tensors a step updates: once, and again only when something has changed.

Python's part of a step must not grow with each parameter by more than a few object comparisons:
with a thousand small parameters it would take longer than the arithmetic.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import chain
from operator import add, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg.optim._copies import copies_of
from thalweg.optim._overlap import addresses, overlap
from thalweg.optim._shards import StandIns, has_flat_shards, is_dtensor, local_state, total_squares
from thalweg.optim._state import complete_state, has_state, hide_steps

_Group = dict[str, Any]

_OLDEST_GPU = (8, 0)  # the oldest compute capability in cmake/Cuda.cmake

# What a group's parameters keep, by their names in torch's state, without "step".
Keys = Callable[[_Group], tuple[str, ...]]


def on_device(optimizer: Optimizer) -> bool:
    """Returns whether the parameters are on a GPU, where steps read their inputs when they run."""
    first: Tensor | None = next(_params(optimizer), None)
    return first is not None and first.is_cuda


def tensors_type(optimizer: Optimizer) -> Any:  # noqa: ANN401 - a build may lack the second class
    """The class that updates them: FusedTensors or FusedDeviceTensors. Raises NotFusable."""
    from thalweg import _C

    if not on_device(optimizer):
        return _C.FusedTensors
    if not hasattr(_C, "FusedDeviceTensors"):
        raise _C.NotFusable("thalweg: parameters are on a GPU, and this build has no CUDA kernels")
    if (found := torch.cuda.get_device_capability(next(_params(optimizer)).device)) < _OLDEST_GPU:
        raise _C.NotFusable(
            f"thalweg: parameters are on a GPU of compute capability {found[0]}.{found[1]}, and "
            f"there are kernels for {_OLDEST_GPU[0]}.{_OLDEST_GPU[1]} or newer"
        )
    return _C.FusedDeviceTensors


class GroupPlan:
    """The tensors of one group: those that have had a gradient, with their state."""

    def __init__(self, optimizer: Optimizer, group: _Group, keys: Keys, *, steps: bool) -> None:
        """Makes the state that is missing, for `adopt` to put into the optimizer.

        Raises NotFusable.
        """
        from thalweg._C import NotFusable, check_fusable

        self.keys = keys(group)
        self.params = list(group["params"])
        state = optimizer.state
        used = [p for p in self.params if p.grad is not None or has_state(state.get(p), self.keys)]
        self._used = used
        self.stand_ins = StandIns(used)
        check_fusable(self.stand_ins.tensors)
        members = set(map(id, used))
        if len(members) != len(used):
            raise NotFusable(
                "thalweg: a group has a parameter twice, expected each once: they would be updated "
                "at the same time"
            )
        self._addresses = addresses(self.stand_ins.tensors)
        if overlap(self.stand_ins.tensors):
            raise NotFusable(
                "thalweg: two parameters of a group lie in the same memory, expected each in its "
                "own: they would be updated at the same time"
            )
        completed = [complete_state(state.get(p, {}), p, self.keys, counted=steps) for p in used]
        self._dicts: list[dict[str, Any]] = []
        names = (*self.keys, "step") if self.keys else ()
        self._kept = {name: [d[name] for d in completed] for name in names}
        self._idle = [p for p in self.params if id(p) not in members]
        copies = copies_of(optimizer)
        self.tensors = tensors_type(optimizer)(
            self.stand_ins.tensors,
            [list(map(local_state, used, self._kept[key])) for key in self.keys],
            self._kept.get("step", []),
            [copies.of.get(id(p)) for p in used] if copies else [],
        )

    def adopt(self, optimizer: Optimizer) -> None:
        """Puts the state into the optimizer: of all groups, once none has been refused."""
        if not self.keys:
            return
        self._dicts = [optimizer.state[p] for p in self._used]
        for name, values in self._kept.items():
            for state, value in zip(self._dicts, values, strict=True):
                state[name] = value

    def holds(self, group: _Group, keys: Keys) -> bool:
        """Returns whether the group still has these parameters, with this state."""
        return (
            self.keys == keys(group)
            and _same(group["params"], self.params)
            and self.stand_ins.hold()
            and self._lies_apart()
            and not any(p.grad is not None for p in self._idle)
            and all(_same(map(itemgetter(k), self._dicts), v) for k, v in self._kept.items())
        )

    def _lies_apart(self) -> bool:
        """Returns whether parameters still have memory of their own: `.data` may have moved."""
        now = addresses(self.stand_ins.tensors)
        if now != self._addresses:
            if overlap(self.stand_ins.tensors):
                return False
            self._addresses = now
        return True

    def with_grads(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Gradients, of DTensors what this process holds, each with its parameter."""
        for param, tensor in zip(self._used, self.stand_ins.tensors, strict=True):
            if tensor.grad is not None:
                yield tensor.grad, param


class Plan:
    """The groups of one optimizer."""

    def __init__(
        self, optimizer: Optimizer, keys: Keys, *, steps: bool, own: bool, shards: bool
    ) -> None:
        """Raises NotFusable."""
        if not own:
            _refuse_narrow(optimizer)
        _refuse_several_devices(optimizer)
        if not shards:
            _refuse_dtensors(optimizer)
        self._keys = keys
        self.groups = [
            GroupPlan(optimizer, group, keys, steps=steps) for group in optimizer.param_groups
        ]
        for members in self.groups:
            members.adopt(optimizer)
        if not steps and any(members.keys for members in self.groups):
            hide_steps(optimizer)
        self.has_dtensors = any(map(is_dtensor, _params(optimizer)))
        self.has_flat_shards = has_flat_shards(_params(optimizer))
        self._on_device = on_device(optimizer)
        self._states = list(optimizer.state.values())
        self._copies = copies_of(optimizer)

    def grad_squares(self) -> Any:  # noqa: ANN401
        """The sum of the squares of all gradients: a float, of a GPU a tensor of one float64.

        Finite exactly if all gradients are: squares of float32 do not overflow in float64. With
        DTensors a collective of all processes, which get the same bits. Raises NotFusable.
        """
        if not self.has_dtensors:
            return reduce(add, (members.tensors.grad_squares() for members in self.groups))
        for members in self.groups:
            members.tensors.check_grads()
        total = total_squares(pair for members in self.groups for pair in members.with_grads())
        return total if self._on_device else total.item()

    def grads(self) -> list[Tensor | None]:
        """Returns the gradients that a step would read now, in a fixed order; not for DTensors."""
        return [p.grad for members in self.groups for p in members.stand_ins.tensors]

    def holds(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        try:
            return (
                len(groups) == len(self.groups)
                and copies_of(optimizer) is self._copies
                and _same(optimizer.state.values(), self._states)
                and all(p.holds(g, self._keys) for p, g in zip(self.groups, groups, strict=True))
            )
        except KeyError:  # part of a state has been deleted
            return False

    def show_grads(self) -> None:
        """Takes the gradients of now. Raises NotFusable."""
        for members in self.groups:
            members.stand_ins.show_grads()
        if len(self.groups) > 1:  # a step of one checks them itself before it changes anything
            for members in self.groups:
                members.tensors.check_grads()

    def hide_grads(self) -> None:
        """The step is over."""
        for members in self.groups:
            members.stand_ins.hide_grads()


_plans: weakref.WeakKeyDictionary[Optimizer, Plan] = weakref.WeakKeyDictionary()


def known_plan(optimizer: Optimizer) -> Plan | None:
    """Returns the plan of the last step if the next one will use it."""
    plan = _plans.get(optimizer)
    return plan if plan is not None and plan.holds(optimizer) else None


@contextmanager
def plan_of(
    optimizer: Optimizer, keys: Keys, *, steps: bool, own: bool, shards: bool = True
) -> Iterator[Plan]:
    """The plan of a step, for as long as the step runs.

    `steps`: torch's state has their number. `own`: the optimizer is Thalweg's, whose state is
    float32 whatever its parameters are; torch's keep it in the parameters' type, and are refused
    unless that is float32. `shards`: parameters may be DTensors. Raises NotFusable before the state
    is changed.
    """
    plan = known_plan(optimizer)
    if plan is None:
        plan = _plans[optimizer] = Plan(optimizer, keys, steps=steps, own=own, shards=shards)
    else:
        plan.show_grads()
    try:
        yield plan
    finally:
        plan.hide_grads()


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _refuse_narrow(optimizer: Optimizer) -> None:
    from thalweg._C import NotFusable

    for param in _params(optimizer):
        if param.dtype is not torch.float32:
            raise NotFusable(
                f"thalweg: a parameter is {param.dtype}, expected torch.float32: "
                f"{type(optimizer).__name__} keeps its state in that type, thalweg.optim would not"
            )


def _refuse_several_devices(optimizer: Optimizer) -> None:
    from thalweg._C import NotFusable

    devices = sorted({str(param.device) for param in _params(optimizer)})
    if len(devices) > 1:
        raise NotFusable(
            f"thalweg: parameters are on {', '.join(devices)}, expected all of an optimizer on one "
            "device: use one for each"
        )


def _refuse_dtensors(optimizer: Optimizer) -> None:
    from thalweg._C import NotFusable

    if any(map(is_dtensor, _params(optimizer))):
        raise NotFusable(
            f"thalweg: a parameter is a DTensor, expected a plain tensor: in the middle of a step "
            f"{type(optimizer).__name__} needs norms that go over processes"
        )


def _same(a: Iterable[object], b: list[Any]) -> bool:
    """Returns whether both hold the same objects in the same order."""
    items = list(a)
    return len(items) == len(b) and all(map(is_, items, b))
