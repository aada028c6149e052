"""Decides about the back end of the default process group: THALWEG_BACKEND=1 makes it ours.

It also notices torchcomms, which takes every process group before any back end hears of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from thalweg import _backend
from thalweg._settings import _logging, _variables
from thalweg._settings._config import Activation, ConfigError
from thalweg._torch import _patches

# What scripts ask for where they want torch's usual back ends; "undefined" is torch's word for no
# answer.
_REPLACED = ("gloo", "nccl", "undefined", "cpu:gloo,cuda:nccl")
_TORCHCOMMS = (
    "torchcomms makes all process groups (TORCH_DISTRIBUTED_USE_TORCHCOMMS), and does not know the "
    f'back end "{_backend.NAME}": unset that variable'
)


class Choice(NamedTuple):
    """What becomes of the back end that a script asks for."""

    backend: str
    remark: str = ""
    level: int = logging.INFO  # of the remark


def activate() -> None:
    """From now on the environment has a say when the default process group is made."""
    _patches.install("default_group", c10d, "_new_process_group_helper", _make)


def choose(
    asked: str, *, wanted: bool, has_options: bool, has_gpus: bool, by_torchcomms: bool
) -> Choice:
    """Returns what takes the place of `asked`; `wanted` says whether the environment wants ours.

    `has_options`: the script gives options of the back end that it asks for.
    """
    if by_torchcomms:
        concerns_us = wanted or _backend.NAME in asked
        return Choice(asked, _TORCHCOMMS if concerns_us else "", logging.WARNING)
    if not wanted or _backend.NAME in asked:
        return Choice(asked)
    name = "no back end" if asked == "undefined" else asked
    if asked not in _REPLACED or has_options:
        why = f"pg_options for {name}" if has_options else name
        text = f"the default process group stays as it is: the script asks for {why}"
        return Choice(asked, f"{text}, in spite of THALWEG_BACKEND=1", logging.WARNING)
    ours = f"cpu:{_backend.NAME},cuda:nccl" if has_gpus else _backend.NAME
    text = f"the default process group is {ours}, where the script asks for {name}"
    return Choice(ours, f"{text}: THALWEG_BACKEND=1")


def _by_environment(asked: str, *, has_options: bool) -> tuple[Choice, int]:
    """Returns what takes the place of `asked`, and the level of the log. Raises ConfigError on all
    workers, also where only rank 0 needs the level: the others would fail because it is missing.
    """
    torchcomms = getattr(c10d, "_use_torchcomms_enabled", bool)
    try:
        choice = choose(
            asked,
            wanted=_variables.backend_is_wanted(),
            has_options=has_options,
            has_gpus=torch.cuda.is_available() and dist.is_nccl_available(),
            by_torchcomms=torchcomms(),
        )
        return choice, Activation.from_env().log_level if choice.remark else logging.NOTSET
    except ConfigError as error:
        raise ConfigError(f"thalweg: {error}") from None


def _make(
    make: Callable[..., Any],
    group_size: int,
    group_rank: int,
    global_ranks: list[int],
    backend: str,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Stands in front of what makes every group; the default one comes without a list of ranks."""
    if not global_ranks:
        has_options = kwargs.get("backend_options") is not None
        choice, log_level = _by_environment(str(backend), has_options=has_options)
        if choice.remark and group_rank == 0:
            _logging.prepare(log_level).log(choice.level, "%s", choice.remark)
        backend = choice.backend
    return make(group_size, group_rank, global_ranks, backend, *args, **kwargs)
