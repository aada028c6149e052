"""What `initialize` has set up, under the names in which scripts written for apex look for it.

apex has a module `_amp_state`, and gives each optimizer an `_amp_stash`. Public scripts read both,
and write some of the attributes.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thalweg import _logging
from thalweg._config import Activation
from thalweg.amp._functions import NoCasts
from thalweg.amp._options import Options
from thalweg.amp._scaling import LossScaler


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
        if once and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return
        _logging.prepare(Activation.from_env().log_level)
        logging.getLogger("thalweg.amp").info("%s", text)


state = State()


class _Mixed(Protocol):
    """What is known about one optimizer, a MixedOptimizer."""

    optimizer: Optimizer

    @property
    def is_pending(self) -> bool: ...

    def params_by_master(self) -> dict[int, Parameter]: ...


class AmpStash:
    """An optimizer's parameters and masters, `optimizer._amp_stash`; a view, computed when read."""

    NAMES: ClassVar = ("_amp_stash", "_lazy_init_maybe_master_weights")  # in the optimizer

    lazy_init_called = True  # masters exist from initialize() on
    already_patched = True

    def __init__(self, mixed: _Mixed) -> None:
        self._mixed = mixed

    def put_into(self, optimizer: Any) -> None:  # noqa: ANN401
        """Gives the optimizer the attributes `NAMES`."""
        optimizer._amp_stash = self
        optimizer._lazy_init_maybe_master_weights = self._have_masters

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
        params = self._mixed.params_by_master()
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
        return self._mixed.is_pending

    def _groups(self, *, masters: bool) -> list[list[Tensor]]:
        params = self._mixed.params_by_master()
        groups: list[dict[str, Any]] = self._mixed.optimizer.param_groups
        return [[p for p in g["params"] if (id(p) in params) is masters] for g in groups]
