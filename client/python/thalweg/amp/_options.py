"""Optimization levels: the options that O0 to O3 set, and how options of the caller change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Options:
    """The options of `initialize`; the names are apex's."""

    enabled: bool = True
    opt_level: str = "O1"
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0
    cast_model_outputs: torch.dtype | None = None
    half_dtype: torch.dtype = torch.float16

    @property
    def options(self) -> dict[str, Any]:
        """The same as a dictionary, as scripts for apex read them."""
        return asdict(self)


# cast_model_type of O2 and O3 is the half type. For bfloat16, "dynamic" stands for 1.0.
_LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"cast_model_type": torch.float32, "master_weights": False, "loss_scale": 1.0},
    "O1": {"patch_torch_functions": True, "loss_scale": "dynamic"},
    "O2": {"keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"},
    "O3": {"keep_batchnorm_fp32": False, "master_weights": False, "loss_scale": 1.0},
}
_TEXT = {"True": True, "False": False}


def choose(opt_level: str, half_dtype: torch.dtype, given: Mapping[str, object]) -> Options:
    """Returns the options of a level, replaced by those of the caller that are not None.

    Raises ValueError naming the option that is malformed or does not fit the level.
    """
    if opt_level not in _LEVELS:
        raise ValueError(
            f"opt_level is {opt_level!r}, expected one of {', '.join(map(repr, _LEVELS))}: the "
            "letter O and a digit"
        )
    if half_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"half_dtype is {half_dtype}, expected torch.float16 or torch.bfloat16")
    options = Options(opt_level=opt_level, half_dtype=half_dtype)
    if opt_level in ("O2", "O3"):
        options = replace(options, cast_model_type=half_dtype)
    options = replace(options, **_LEVELS[opt_level])
    wanted: dict[str, Any] = {n: _read(n, v) for n, v in given.items() if v is not None}
    as_it_is = wanted.get("cast_model_type") is False
    options = replace(options, **wanted)
    if as_it_is:
        options = replace(options, cast_model_type=None)
    if options.cast_model_type is torch.bfloat16 or (
        options.patch_torch_functions and half_dtype is torch.bfloat16
    ):
        # bfloat16 has float32's range: nothing underflows that a scale could save.
        options = replace(options, loss_scale=wanted.get("loss_scale", 1.0))
    _check(options, as_it_is=as_it_is)
    return options


def _read(name: str, value: object) -> object:
    """Returns one option of the caller; command lines give flags and numbers as text."""
    if name in ("keep_batchnorm_fp32", "master_weights", "patch_torch_functions"):
        flag = _TEXT.get(value, value) if isinstance(value, str) else value
        if not isinstance(flag, bool):
            raise ValueError(f"{name} is {value!r}, expected True or False")
        return flag
    if name == "loss_scale":
        return read_loss_scale(value)
    if name == "cast_model_type" and value is False:
        return value
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ValueError(f"{name} is {value!r}, expected a floating point type such as torch.half")
    return value


def read_loss_scale(value: object) -> float | str:
    """Returns a positive number, or "dynamic"; numbers may be text. Raises ValueError."""
    if value == "dynamic":
        return "dynamic"
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < float("inf"):
        raise ValueError(f"loss_scale is {value!r}, expected 'dynamic' or a positive number")
    return number


def _check(options: Options, *, as_it_is: bool) -> None:
    half_model = options.cast_model_type in (torch.float16, torch.bfloat16)
    if options.patch_torch_functions:
        if options.cast_model_type not in (None, torch.float32):
            raise ValueError(
                f"cast_model_type is {options.cast_model_type} with O1, which casts functions and "
                "leaves parameters in float32: leave it out, or take O2 or O3"
            )
        for name in ("keep_batchnorm_fp32", "master_weights"):
            if getattr(options, name):
                raise ValueError(
                    f"{name} is given with O1, whose parameters are float32 anyway: leave it out"
                )
    if options.master_weights and not half_model and not as_it_is:
        raise ValueError(
            f"master_weights is True but the model is cast to {options.cast_model_type}, expected "
            "a half type: masters are only for half-precision parameters"
        )
