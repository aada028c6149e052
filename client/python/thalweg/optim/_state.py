"""Makes the state of parameters as the kernels take it, and as torch's optimizers do.

Kernels have to know the first step of a momentum, which torch's SGD does not count: to torch a
momentum exists from its first step on. The number of steps lies beside the momentum as `step`, and
is in no `state_dict`. On a GPU it stays 0 in a step that GradScaler has skipped, and nobody has
read it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg.optim._shards import is_dtensor

_State = dict[str, Any]
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master_param")


def has_state(state: _State | None, keys: tuple[str, ...]) -> bool:
    """Returns whether all of `keys` are there."""
    return state is not None and all(state.get(key) is not None for key in keys)


def complete_state(
    state: _State, param: Tensor, keys: tuple[str, ...], *, counted: bool
) -> dict[str, Tensor]:
    """Returns the `keys` of a parameter, and `step`, as kernels take them; `state` is unchanged.

    What is missing begins with zeros. `counted`: torch has `step` as well; otherwise a state that
    has none has done steps.
    """
    if not keys:
        return {}
    default, known = (0.0, True) if counted else (1.0, has_state(state, keys))
    step = state.get("step", default) if known else 0.0
    # On a GPU kernels count steps. torch takes them there as well.
    if not isinstance(step, Tensor) or step.device != param.device:
        step = torch.tensor(float(step), dtype=torch.float32, device=param.device)
    return {**{key: _moment(state.get(key), param) for key in keys}, "step": step}


def load_unrounded(
    optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
) -> None:
    """Calls `load`, which is torch's load_state_dict(), and keeps moments in float32 whatever the
    parameters are.
    """
    load_and_restore(optimizer, load, state_dict, _restore_precision)


def load_and_restore(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    restore: Callable[[Optimizer, dict[str, Any]], None],
) -> None:
    """Calls `load`, which is torch's load_state_dict(), and `restore` with what it has loaded,
    before hooks of others look at the result.
    """
    seen: list[dict[str, Any]] = []

    def remember(_: Optimizer, changed: dict[str, Any]) -> None:
        seen[:] = [changed]

    def take_again(_: Optimizer) -> None:
        restore(optimizer, seen[0])

    # The first comes after all hooks of others, which may replace the dictionary, the second before
    # all, which may write into the state.
    hooks = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(take_again, prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()


def _restore_precision(optimizer: Optimizer, source: dict[str, Any]) -> None:
    """Takes moments from `source` again: torch has rounded them to the parameters' type."""
    saved = chain.from_iterable(group["params"] for group in source["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, param in zip(saved, params, strict=True):
        # The values are copied: torch shares what needs no cast, and two optimizers must not share.
        for key in _MOMENTS:
            value = source["state"].get(index, {}).get(key)
            if isinstance(value, Tensor):
                optimizer.state[param][key] = value.to(param.device, torch.float32, copy=True)
        if isinstance(step := optimizer.state.get(param, {}).get("step"), Tensor):
            optimizer.state[param]["step"] = step.clone()


def hide_steps(optimizer: Optimizer) -> None:
    """Makes the optimizer's `state_dict` have what torch's has: no steps, no unused momentum."""
    if _hide not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(_hide)


def forget_steps(optimizer: Optimizer) -> None:
    """Makes the state what torch's step expects to find in the place of the kernels."""
    if _hide in optimizer._optimizer_state_dict_post_hooks.values():
        for param, state in list(optimizer.state.items()):
            optimizer.state[param] = _as_torchs(state)


def _hide(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {index: _as_torchs(state) for index, state in state_dict["state"].items()}
    return {**state_dict, "state": {index: state for index, state in states.items() if state}}


def _as_torchs(state: _State) -> _State:
    if "step" not in state:
        return state
    unused = ("step", "momentum_buffer") if float(state["step"]) == 0 else ("step",)
    return {key: value for key, value in state.items() if key not in unused}


def _moment(value: Tensor | None, param: Tensor) -> Tensor:
    """Returns a moment in float32, in the parameter's order in memory, where kernels take it."""
    if value is None:
        return torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
    if value.dtype is not torch.float32:
        value = value.float()
    alike = value.shape == param.shape and value.device == param.device
    if not alike or is_dtensor(param) or value.is_sparse or value.stride() == param.stride():
        return value
    laid = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
    return value if laid.stride() == value.stride() else laid.copy_(value)
