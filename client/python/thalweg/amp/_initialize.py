"""apex's interface from `initialize` on: `scale_loss`, and the checkpoints of loss scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thalweg._torch._precision import carry
from thalweg.amp import _gradscaler
from thalweg.amp._casts import casting
from thalweg.amp._functions import Casts, NoCasts, activate_casts, deactivate_casts
from thalweg.amp._masters import HALF_TYPES
from thalweg.amp._model import (
    cast_boundary,
    cast_model,
    checkpoint_masters,
    refuse_sharded,
    require_float32,
)
from thalweg.amp._optimizer import MixedOptimizer, mixed_optimizer_of
from thalweg.amp._scaling import BackwardPass, LossScaler
from thalweg.amp._sharing import share_when_distributed
from thalweg.amp._state import Options, choose, state
from thalweg.amp._watching import expect_gradients


def initialize(  # noqa: PLR0917 - apex's order
    models: Any,  # noqa: ANN401
    optimizers: Any = None,  # noqa: ANN401
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    half_dtype: torch.dtype = torch.float16,
) -> Any:  # noqa: ANN401
    """Prepares models and optimizers for mixed precision; docs/amp.md says what each level does.

    Call it once, after they are built and before DistributedDataParallel. Both are changed in place
    and returned. A second call replaces loss scales and casts of functions of the first one, and
    goes on with its masters, at a level that casts the model.

    Args:
        models: a Module or a list of them, with float32 parameters.
        optimizers: None, an Optimizer or a list of them.
        enabled: False: everything is returned as it is, and scale_loss() does nothing.
        opt_level: "O0" to "O3"; the options below, where given, replace what it sets.
        cast_model_type: type for parameters and buffers; False: they stay as they are.
        patch_torch_functions: cast arguments of torch's functions by lists, as O1 does.
        keep_batchnorm_fp32: leave batch normalisation in float32.
        master_weights: optimizers update float32 masters of half-precision parameters.
        loss_scale: "dynamic", or a positive number. With bfloat16, 1.0 unless given.
        cast_model_outputs: type of what models return; float32 if their parameters are cast.
        num_losses: how many loss scales there are, one for each `loss_id` of scale_loss().
        verbosity: 0: log nothing; 1: log what was set up, on rank 0, and each skipped step;
            2: also print each cast of O1, as `Float->Half (conv2d)`.
        min_loss_scale: lower bound of dynamic scales.
        max_loss_scale: upper bound of dynamic scales.
        half_dtype: torch.float16 or torch.bfloat16.

    Returns:
        `models`, or `(models, optimizers)` if there are optimizers, as they were given.

    Raises:
        ValueError: an option is malformed or does not fit the level.
        RuntimeError: a model is wrapped, or in half without masters; a step runs no hooks.
        TypeError: something is neither a Module nor an Optimizer.
    """
    state.verbosity = verbosity
    if not enabled:
        state.options = Options(enabled=False)
        state.loss_scalers = []
        deactivate_casts()
        state.handle = NoCasts()
        return models if optimizers is None else (models, optimizers)
    given: dict[str, object] = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
    }
    options = choose(opt_level, half_dtype, given)
    if num_losses < 1:
        raise ValueError(f"num_losses is {num_losses}, expected at least 1")
    all_models = as_list("models", models, nn.Module)
    all_optimizers = as_list("optimizers", optimizers, Optimizer)
    casts, halves = options.cast_model_type is not None, state.allow_incoming_model_not_fp32
    require_float32(all_models, allow_half=halves, allow_masters=casts)
    prepare(all_models, all_optimizers, options)
    state.options = options
    state.loss_scalers = [
        LossScaler(options.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    if options.patch_torch_functions:
        state.handle = Casts(activate_casts(options.half_dtype, verbose=verbosity > 1))
    else:
        deactivate_casts()
        state.handle = NoCasts()
    state.say(f"mixed precision is set up: {options}", once=True)
    return models if optimizers is None else (models, optimizers)


def prepare(
    models: list[nn.Module], optimizers: list[Optimizer], options: Options, *, native: bool = False
) -> None:
    """Casts the models and puts masters into the optimizers, as the options say.

    `native`: torch's GradScaler scales the losses.
    """
    if options.cast_model_type in HALF_TYPES:
        refuse_sharded(models)
    masters = bool(options.master_weights)
    for optimizer in optimizers:
        earlier = mixed_optimizer_of(optimizer)
        if earlier is not None:
            earlier.retire()
    for model in models:
        if options.cast_model_type is not None:
            cast_model(
                model,
                options.cast_model_type,
                keep_batchnorm_fp32=bool(options.keep_batchnorm_fp32),
                masters=masters,
            )
            outputs = options.cast_model_outputs or torch.float32
            cast_boundary(model, options.cast_model_type, outputs)
        else:
            cast_boundary(model, None, options.cast_model_outputs)
        if masters or options.cast_model_type in HALF_TYPES:
            checkpoint_masters(model)
    scales = native or options.loss_scale != 1.0
    for optimizer in optimizers:
        MixedOptimizer(optimizer, masters=masters, scales=scales, native=native)
    if masters:
        share_when_distributed()
    _gradscaler.install()


def as_list(what: str, value: Any, expected: type) -> list[Any]:  # noqa: ANN401
    """Returns `value`, alone or in a list or tuple, as a list of objects of one class.

    Raises TypeError if there is one of another class.
    """
    items = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for item in items:
        if not isinstance(item, expected):
            raise TypeError(
                f"{what} contains a {type(item).__name__}, expected {expected.__name__} or a list "
                "of them"
            )
    return items


@contextmanager
def scale_loss(  # noqa: PLR0917 - apex's order
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Yields the loss times the current scale, on which backward() is to be called.

    When the context ends, the optimizers' parameters have gradients of the unscaled loss, added to
    those they had. If any is not finite, the scale of this loss is lowered and the next step() of
    these optimizers does nothing. If the body raises, gradients are what they were before; after a
    context with `delay_unscale` they stay multiplied, and keep what a backward has added until it
    failed.

    Args:
        loss: a scalar of any floating point type; the yielded value is float32.
        optimizers: those from initialize() whose parameters the loss has gradients for.
        loss_id: which loss scale to use, below `num_losses` of initialize().
        model: accepted as apex does, and not used.
        delay_unscale: leave gradients as they are, so that they accumulate until a context without
            it. Use it for all but the last backward before step() when gradients accumulate under
            DDP.
        delay_overflow_check: divide, but let only a later context with the same `loss_id` and
            without it act on overflows.

    Raises:
        RuntimeError: initialize() has not been called, or not with one of the optimizers.
        ValueError: there is no such `loss_id`.
    """
    if state.options is None:
        raise RuntimeError(
            "scale_loss() was called before initialize(), expected after it: pass model and "
            "optimizer to thalweg.amp.initialize() first"
        )
    if not state.options.enabled:
        yield loss
        return
    if not 0 <= loss_id < len(state.loss_scalers):
        raise ValueError(
            f"loss_id is {loss_id}, expected one below {len(state.loss_scalers)}: pass num_losses "
            "to initialize()"
        )
    with scaled_backward(
        loss,
        _initialized(optimizers),
        state.loss_scalers[loss_id],
        what=f"gradients of loss {loss_id}",
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    ) as scaled:
        yield scaled


@contextmanager
def scaled_backward(
    loss: Tensor,
    optimizers: Sequence[MixedOptimizer],
    scaler: LossScaler,
    *,
    what: str = "gradients",
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the scaled loss; afterwards divides gradients and sees to overflows.

    This is the only place that does so for the scales of this package. `what` names the gradients
    in the message about a skipped step; `scale_loss` explains the delays and what a failure leaves.
    """
    casting.stepping = False  # a step may have ended in an exception
    this, done = BackwardPass(scaler), set[int]()
    for optimizer in optimizers:
        optimizer.begin_backward(scaler, done=done)
    try:
        scaled = loss.float() * scaler.loss_scale()
        with expect_gradients():
            yield scaled if scaler.trivial else carry(scaled, scaler, scaler.loss_scale())
    except BaseException:
        for optimizer in optimizers:
            optimizer.abandon_backward(this)
        raise
    done = set()
    for optimizer in optimizers:
        optimizer.end_backward(this, delay_unscale=delay_unscale, done=done)
    casting.clear_cache()
    if delay_unscale or delay_overflow_check or not scaler.update_scale():
        return
    state.say(
        f"{what} are not finite: the step is skipped, the loss scale is now {scaler.loss_scale()}"
    )
    for optimizer in optimizers:
        optimizer.skip = True


def _initialized(optimizers: Optimizer | Sequence[Optimizer]) -> list[MixedOptimizer]:
    given = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    found = []
    for optimizer in given:
        mixed = mixed_optimizer_of(optimizer)
        if mixed is None or mixed.native:
            raise RuntimeError(
                f"{type(optimizer).__name__} was not given to initialize(), expected one that was: "
                "pass all optimizers to it, and scale its losses with nothing else"
            )
        found.append(mixed)
    return found


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns `{"loss_scaler0": {"loss_scale": …, "unskipped": …}, …}`, for a checkpoint."""
    result = {} if destination is None else destination
    for number, scaler in enumerate(state.loss_scalers):
        result[f"loss_scaler{number}"] = scaler.state_dict()
    return result


def load_state_dict(loaded: dict[str, Any]) -> None:
    """Restores loss scales that `state_dict` returned; call it after initialize().

    Raises RuntimeError if their number is not `num_losses` of initialize().
    """
    expected = [f"loss_scaler{number}" for number in range(len(state.loss_scalers))]
    if sorted(loaded) != sorted(expected):
        raise RuntimeError(
            f"the state has {', '.join(sorted(loaded)) or 'nothing'}, expected "
            f"{', '.join(expected) or 'nothing'}: call initialize() first, with the same num_losses"
        )
    for name, scaler in zip(expected, state.loss_scalers, strict=True):
        scaler.load_state_dict(loaded[name])
