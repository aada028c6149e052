"""Puts the names of AIAK-Training into torch. It is cheap, because `import torch` itself may run
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.cuda.amp
import torch.optim
from torch import Tensor, nn
from torch.optim import Optimizer

from thalweg.optim.lamb import LAMB


def install() -> None:
    """Adds the names that torch lacks; may be called again."""
    for module, name, value in (
        (torch.cuda.amp, "aiak_amp_decorate", aiak_amp_decorate),
        (torch.cuda.amp, "aiak_amp_parameters", aiak_amp_parameters),
        (torch.optim, "LAMB", LAMB),
    ):
        if not hasattr(module, name):
            setattr(module, name, value)


def aiak_amp_decorate(  # noqa: PLR0917 - AIAK's order
    model: Any,  # noqa: ANN401
    optimizer: Any,  # noqa: ANN401
    keep_batchnorm_fp32: bool = True,
    loss_scale: float | str | None = None,
    num_losses: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    half_dtype: torch.dtype = torch.float16,
) -> tuple[Any, Any]:
    """O2 for scripts that use torch's own autocast and GradScaler, which then work unchanged.

    Call it before DistributedDataParallel. Both arguments are changed in place: parameters become
    half precision, the optimizer updates float32 masters of them.

    Args:
        model: a Module or a list of them, with float32 parameters.
        optimizer: an Optimizer or a list of them.
        keep_batchnorm_fp32: leave batch normalisation in float32.
        loss_scale: a constant, or None: dynamic. Either one, with the bounds, takes the place of
            the settings of every GradScaler that first scales a loss from now on.
        num_losses: accepted as AIAK does, at least 1; each GradScaler has a scale of its own.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.
        half_dtype: torch.float16 or torch.bfloat16.

    Returns:
        `(model, optimizer)`, as they were given.

    Raises:
        ValueError, RuntimeError, TypeError: as `thalweg.amp.initialize`.
    """
    from thalweg.amp._gradscaler import decorate
    from thalweg.amp._initialize import as_list, prepare
    from thalweg.amp._model import require_float32
    from thalweg.amp._scaling import ScaleRule
    from thalweg.amp._state import choose

    options = choose(
        "O2", half_dtype, {"keep_batchnorm_fp32": keep_batchnorm_fp32, "loss_scale": loss_scale}
    )
    if num_losses < 1:
        raise ValueError(f"num_losses is {num_losses}, expected at least 1")
    models = as_list("model", model, nn.Module)
    optimizers = as_list("optimizer", optimizer, Optimizer)
    require_float32(models)
    prepare(models, optimizers, options, native=True)
    rule = ScaleRule(
        options.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
    )
    for item in optimizers:
        decorate(item, rule)
    return model, optimizer


def aiak_amp_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Returns the parameters that the optimizer updates, float32 masters included: the ones to
    clip.

    Call it after `scaler.unscale_(optimizer)`. For an optimizer that was not decorated these are
    its own parameters.
    """
    from thalweg.amp import master_params

    return master_params(optimizer)
