"""Implements `apex.normalization`: layer and RMS normalisation, by torch's functions.

The statistics are computed in float32 whatever the types are. Under torch's autocast, arguments are
cast to its type, as in apex. `memory_efficient` is accepted and changes nothing: what is saved for
the backward pass is torch's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = int | Sequence[int]


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns F.layer_norm without weights, in the input's type."""
    return _normalize(input, None, None, normalized_shape, eps, rms=False)


def fused_layer_norm_affine(  # noqa: PLR0917 - apex's order
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns F.layer_norm in the input's type."""
    return _normalize(input, weight, bias, normalized_shape, eps, rms=False)


def mixed_dtype_fused_layer_norm_affine(  # noqa: PLR0917 - apex's order
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns F.layer_norm in the type of `weight`."""
    return _normalize(input, weight, bias, normalized_shape, eps, rms=False, mixed=True)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns x / √(mean(x²) + eps) over the last dimensions, in the input's type."""
    return _normalize(input, None, None, normalized_shape, eps, rms=True)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns fused_rms_norm times `weight`, in the input's type."""
    return _normalize(input, weight, None, normalized_shape, eps, rms=True)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns fused_rms_norm times `weight`, in the type of `weight`."""
    return _normalize(input, weight, None, normalized_shape, eps, rms=True, mixed=True)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """Returns mixed_dtype_fused_rms_norm_affine, or without `weight` fused_rms_norm."""
    return _normalize(input, weight, None, normalized_shape, eps, rms=True, mixed=True)


class _Norm(nn.Module):
    """Holds the parameters: `weight`, and `bias` where the class has one."""

    _rms: ClassVar[bool]
    _mixed: ClassVar[bool] = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = torch.Size(_dims(normalized_shape))
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name, is_there in (("weight", True), ("bias", not self._rms)):
            affine = elementwise_affine and is_there
            param = nn.Parameter(torch.empty(*self.normalized_shape)) if affine else None
            if is_there:
                self.register_parameter(name, param)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes `weight` 1 and `bias` 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if not self._rms and self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the input normalised over its last dimensions."""
        bias = None if self._rms else self.bias
        return _normalize(
            input,
            self.weight,
            bias,
            self.normalized_shape,
            self.eps,
            rms=self._rms,
            mixed=self._mixed,
        )

    def extra_repr(self) -> str:
        """Returns the arguments."""
        return (
            f"{tuple(self.normalized_shape)}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}"
        )


class FusedLayerNorm(_Norm):
    """torch.nn.LayerNorm; the result has the input's type."""

    _rms = False


class FusedRMSNorm(_Norm):
    """torch.nn.RMSNorm with eps 1e-5; the result has the input's type."""

    _rms = True


class _MixedInit(_Norm):
    _mixed = True

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        if not elementwise_affine:
            raise RuntimeError(
                f"{type(self).__name__} was given elementwise_affine=False, expected True: its "
                "result has the type of its weights"
            )
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedLayerNorm(_MixedInit):
    """torch.nn.LayerNorm; the result has the type of the weights."""

    _rms = False


class MixedFusedRMSNorm(_MixedInit):
    """torch.nn.RMSNorm with eps 1e-5; the result has the type of the weights."""

    _rms = True


def _dims(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def _normalize(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Shape,
    eps: float,
    *,
    rms: bool,
    mixed: bool = False,
) -> Tensor:
    device = input.device.type
    result = weight.dtype if mixed and weight is not None else input.dtype
    if torch.is_autocast_enabled(device):
        result = torch.get_autocast_dtype(device)
        input = input.to(result)
        weight = None if weight is None else weight.to(result)
        bias = None if bias is None else bias.to(result)
    with torch.autocast(device, enabled=False):
        wide = torch.promote_types(input.dtype, torch.float32)
        values = input.to(wide)
        scale = None if weight is None else weight.to(wide)
        if rms:
            return F.rms_norm(values, _dims(shape), scale, eps).to(result)
        offset = None if bias is None else bias.to(wide)
        return F.layer_norm(values, _dims(shape), scale, offset, eps).to(result)
