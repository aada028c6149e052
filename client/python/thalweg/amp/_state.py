"""What `initialize` was asked for and has set up, under the names that scripts for apex look for.

apex has a module `_amp_state`, with the options of `initialize`, and gives each optimizer an
`_amp_stash`. Public scripts read both, and write some of the attributes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from thalweg._settings import _logging
from thalweg._settings._config import Activation
from thalweg.amp._functions import NoCasts
from thalweg.amp._masters import HALF_TYPES, MasterSet
from thalweg.amp._scaling import LossScaler


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
    if half_dtype not in HALF_TYPES:
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
    half_model = options.cast_model_type in HALF_TYPES
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


class State:
    """The state of this process's mixed precision, `apex.amp._amp_state`.

    Attributes:
        handle: what the latest `init` or `initialize` has switched on; `_deactivate()` puts torch's
            functions back.
        loss_scalers: one for each loss.
        verbosity: 0 to 2, as `initialize` was told.
        allow_incoming_model_not_fp32: may be set; `initialize` then takes models whose parameters
            are in a half type already.
        hard_override: may be set, as in apex, and changes nothing.
    """

    def __init__(self) -> None:
        self.options: Options | None = None  # None: initialize() has not been called
        self.handle: NoCasts = NoCasts()
        self.loss_scalers: list[LossScaler] = []
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False
        self.hard_override = False

    @property
    def opt_properties(self) -> Options:
        """The options; as in apex there is no such attribute before `initialize`."""
        if self.options is None:
            raise AttributeError("initialize() has not been called: there are no opt_properties")
        return self.options

    def say(self, text: str, *, once: bool = False) -> None:
        """Logs one line for the user, unless the verbosity is 0; `once`: on rank 0 only.

        It is visible also if the script has not set up logging.
        """
        if self.verbosity < 1:
            return
        if once and not _logging.is_first():
            return
        _logging.prepare(Activation.from_env().log_level)
        logging.getLogger("thalweg.amp").info("%s", text)


state = State()


class AmpStash:
    """An optimizer's parameters and masters, `optimizer._amp_stash`; a view, computed when read."""

    NAMES: ClassVar = ("_amp_stash", "_lazy_init_maybe_master_weights")  # in the optimizer

    lazy_init_called = True  # masters exist from initialize() on
    already_patched = True

    def __init__(
        self, optimizer: Optimizer, held: MasterSet, is_pending: Callable[[], bool]
    ) -> None:
        """`is_pending` says whether gradients in the model are still multiplied by the scale."""
        self._optimizer = optimizer
        self._held = held
        self._is_pending = is_pending

    def put_into_optimizer(self) -> None:
        """Gives the optimizer the attributes `NAMES`."""
        self._optimizer.__dict__.update(zip(self.NAMES, (self, self._have_masters), strict=True))

    def _have_masters(self) -> None:
        """Is what scripts call before they load masters from a checkpoint, which exist already."""

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The model's half-precision parameters that have masters."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """Their masters, in the same order."""
        return [master for group in self.fp32_from_fp16_groups for master in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters that have no master."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half-precision parameters that have masters, by group."""
        params = self._held.params_by_weight()
        return [[params[id(m)] for m in group] for group in self._groups(masters=True)]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """Their masters, by group."""
        return self._groups(masters=True)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters that have no master, by group."""
        return self._groups(masters=False)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients in the model are still multiplied, after `delay_unscale`."""
        return self._is_pending()

    def _groups(self, *, masters: bool) -> list[list[Tensor]]:
        params = self._held.params_by_weight()
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return [[p for p in g["params"] if (id(p) in params) is masters] for g in groups]
