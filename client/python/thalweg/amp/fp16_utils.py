"""Half-precision networks by hand, as apex offers them in `apex.fp16_utils`.

`FP16_Optimizer` is all of it in one object; the functions are its parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from thalweg.amp._casts import map_tensors
from thalweg.amp._model import cast_model, cast_module
from thalweg.amp.first_generation._fp16_optimizer import FP16_Optimizer
from thalweg.amp.first_generation._fp16_scalers import DynamicLossScaler
from thalweg.amp.first_generation._fp16_scalers import StaticLossScaler as LossScaler

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


class tofp16(nn.Module):
    """Casts a float tensor of any shape to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the input in float16."""
        return input.half()


class FP16Model(nn.Module):
    """A network in float16 that casts its inputs; batch normalisation with weights is float32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:  # noqa: ANN401
        """Returns the network's output, in the type that it has."""
        cast = map_tensors(inputs, lambda t: t.half() if t.is_floating_point() else t)
        return self.network(*cast)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts parameters and buffers in place, but not of batch normalisation that has weights."""
    cast_model(network, dtype, keep_batchnorm_fp32=True, keep_affine_only=True, masters=False)
    return network


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the module's own parameters and buffers, not those of its children."""
    cast_module(module, dtype)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Casts batch normalisation that has weights back to float32, in place."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.affine:
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Returns the network in float16 behind a cast of its input.

    Batch normalisation is in float32.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Parameter], list[Parameter]]:
    """Returns the parameters that require gradients, and float32 masters of them.

    With `flat_master` there is one master, of shape (sum of numels,). Parameters must then be of
    one type: TypeError otherwise.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return params, [Parameter(param.detach().clone().float()) for param in params]
    types = {param.dtype for param in params}
    if len(types) > 1:
        raise TypeError(
            f"parameters are of {', '.join(sorted(map(str, types)))}, expected one type: leave "
            "flat_master out, or cast the whole model"
        )
    return params, [Parameter(torch.cat([p.detach().float().view(-1) for p in params]))]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: list[Parameter], master_params: list[Parameter], flat_master: bool = False
) -> None:
    """Gives masters the gradients in float32; the lists come from `prep_param_lists`."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = torch.cat([grad.float().reshape(-1) for grad in grads])
        return
    for param, master in zip(model_params, master_params, strict=True):
        master.grad = None if param.grad is None else param.grad.to(torch.float32, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: list[Parameter], master_params: list[Parameter], flat_master: bool = False
) -> None:
    """Rounds masters into the parameters; the lists come from `prep_param_lists`."""
    masters: Iterable[Tensor] = master_params
    if flat_master:
        masters = master_params[0].split([param.numel() for param in model_params])
    for param, master in zip(model_params, masters, strict=True):
        param.copy_(master.view_as(param))


def to_python_float(value: Tensor | list[float]) -> float:
    """Returns the number in a tensor or list of one element."""
    return float(value.item() if isinstance(value, Tensor) else value[0])
