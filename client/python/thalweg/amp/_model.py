"""O2 and O3: models in a half type, their inputs and outputs, and their checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thalweg.amp._casts import map_tensors
from thalweg.amp._masters import HALF_TYPES, ensure_master, forget_master, master_of
from thalweg.optim._shards import is_dtensor

_CAST_HOOKS = "_amp_cast_hooks"


def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    keep_batchnorm_fp32: bool,
    masters: bool,
    keep_affine_only: bool = False,
) -> None:
    """Casts floating point parameters, their gradients and buffers to `dtype`, in place.

    Batch normalisation keeps its type on request: its statistics do not survive a half type.
    `keep_affine_only`: only where it has weights. With `masters`, the former values of a parameter
    become its float32 master.
    """
    for module in model.modules():
        keeps = keep_batchnorm_fp32 and isinstance(module, _BatchNorm)
        if keeps and (module.affine or not keep_affine_only):
            continue
        cast_module(module, dtype, masters=masters)


def cast_module(module: nn.Module, dtype: torch.dtype, *, masters: bool = False) -> None:
    """Casts the module's own parameters and buffers as cast_model() does, not its children's."""
    for param in module._parameters.values():
        if param is not None and param.is_floating_point() and param.dtype is not dtype:
            _cast_parameter(param, dtype, masters=masters)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()


def cast_boundary(
    model: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None
) -> None:
    """Casts the floating point tensors that `forward` takes and returns (None: leaves them).

    A second call replaces the casts of the first one. DataParallel's replicas share the hooks.
    """
    for hook in model.__dict__.pop(_CAST_HOOKS, ()):
        hook.remove()
    hooks = []
    if inputs is not None:
        cast = functools.partial(_cast_inputs, inputs)
        hooks.append(model.register_forward_pre_hook(cast, with_kwargs=True))
    if outputs is not None:
        hooks.append(model.register_forward_hook(functools.partial(_cast_outputs, outputs)))
    model.__dict__[_CAST_HOOKS] = hooks


def checkpoint_masters(model: nn.Module) -> None:
    """Makes `state_dict` contain the masters from now on; loading one sets masters and parameters.

    Tensors of `state_dict` alias the masters, as they alias parameters otherwise.
    """
    for module in model.modules():
        if _emit_masters in module._state_dict_hooks.values():
            continue
        module.register_state_dict_post_hook(_emit_masters)
        module.register_load_state_dict_pre_hook(_take_masters)


def require_float32(
    models: list[nn.Module], *, allow_half: bool = False, allow_masters: bool = False
) -> None:
    """Raises RuntimeError if a model has already been distributed, or cast without `allow_half`.

    `allow_masters`: half-precision parameters may be those of an earlier call, with masters.
    """
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise RuntimeError(
                f"initialize() was given a {type(model).__name__}, expected the model inside it: "
                "call initialize() first, then wrap what it returns"
            )
        for name, param in () if allow_half else model.named_parameters():
            if allow_masters and master_of(param) is not None:
                continue
            if param.is_floating_point() and param.dtype in HALF_TYPES:
                raise RuntimeError(
                    f"parameter {name} is {param.dtype}, expected torch.float32: leave .half() "
                    "out, initialize() casts what is to be cast"
                )


def refuse_sharded(models: list[nn.Module]) -> None:
    """Raises RuntimeError if a model has DTensors, as after fully_shard(): it casts by itself."""
    for model in models:
        for name, param in model.named_parameters():
            if is_dtensor(param):
                raise RuntimeError(
                    f"parameter {name} is a DTensor, expected one that is not sharded: give "
                    "fully_shard() a MixedPrecisionPolicy instead (docs/fsdp.md)"
                )


def _cast_parameter(param: nn.Parameter, dtype: torch.dtype, *, masters: bool) -> None:
    master = master_of(param)
    if master is not None:
        master.follow(param)
    weight = param.detach() if master is None else master.weight.detach()
    if param.grad is not None:
        grad = param.grad
        param.grad = None
    else:
        grad = None
    param.data = weight.to(dtype)
    if grad is not None:
        param.grad = grad.to(dtype)
    forget_master(param)
    if masters and dtype in HALF_TYPES:
        ensure_master(param, weight)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
    return _cast_floating(args, dtype), _cast_floating(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype, _: nn.Module, args: Any, result: Any) -> Any:  # noqa: ANN401
    return _cast_floating(result, dtype)


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    return map_tensors(
        value,
        lambda t: t.to(dtype) if t.is_floating_point() else t,
        lambda batch: batch.to(dtype),
    )


def _emit_masters(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Hook of state_dict(): puts masters, or float32 copies, in the place of half tensors."""
    for name, param in module._parameters.items():
        if param is not None and prefix + name in state and param.dtype in HALF_TYPES:
            master = master_of(param)
            if master is None:
                state[prefix + name] = param.detach().float()
            else:
                master.follow(param)
                state[prefix + name] = master.weight.detach()
    for name, buffer in module._buffers.items():
        held = state.get(prefix + name) if buffer is not None else None
        if isinstance(held, Tensor) and held.dtype in HALF_TYPES:
            state[prefix + name] = held.detach().float()


def _take_masters(  # noqa: PLR0917 - torch's hook
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Hook of load_state_dict(): masters take the weights before they are rounded.

    torch rounds the same values into the parameter next, so the two stay equal. It also reports
    tensors that do not fit.
    """
    for name, param in module._parameters.items():
        master = None if param is None else master_of(param)
        loaded = state.get(prefix + name)
        if param is None or master is None or not isinstance(loaded, Tensor):
            continue
        if local_metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                f"{prefix}{name} has a float32 master, which assign=True would lose: load with "
                "assign=False"
            )
        if loaded.shape == param.shape:
            with torch.no_grad():
                master.weight.copy_(loaded)
                param.copy_(master.weight)
            master.mark_equal(param)
