"""Notices that parameters of a new job belong to an earlier one, whose codec holds gradients back.

A module that is wrapped anew in DistributedDataParallel, as in progressive unfreezing, begins a new
job, which knows nothing of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from thalweg import policy
from thalweg.codecs import Auto, Codec, Lossy, PowerSGD

_SOON = 2  # steps after which int8, onebit and topk begin by default


class Owner(NamedTuple):
    """The latest job that a parameter has had."""

    job: str
    codec: str
    compresses: bool


_owners = WeakIdKeyDictionary()  # by parameter


def own(parameters: Sequence[tuple[str, torch.Tensor]], owner: Owner) -> list[str]:
    """Notes who reduces the parameters from now on. Returns a remark for each earlier job that may
    hold back gradients of theirs.
    """
    names: dict[Owner, list[str]] = {}
    for name, parameter in parameters:
        earlier = _owners.get(parameter)
        if earlier is not None and earlier.compresses and _holds_back(earlier.codec):
            names.setdefault(earlier, []).append(name)
        _owners[parameter] = owner
    return [
        f"{len(of)} of its parameters ({of[0]}{', …' if len(of) > 1 else ''}) are those of job "
        f"{earlier.job}, and what its codec {earlier.codec} holds back of their gradients is not "
        "taken along, because a module that is wrapped anew begins a new job: give the "
        "state_dict() of the earlier job's state to load_state_dict() of this one's"
        for earlier, of in names.items()
    ]


def is_owned(parameter: torch.Tensor) -> bool:
    """Returns whether a job has the parameter, or had it."""
    return parameter in _owners


def counts_steps(codec: str) -> bool:
    """Returns whether a run that begins anew would compress later, or with worse factors."""
    return any(
        isinstance(one, PowerSGD) or (isinstance(one, Lossy) and one.start_iter > _SOON)
        for one in _codecs_of(codec)
    )


def fits_files(codec: str) -> bool:
    """Returns whether nodes leave out of gradients what files can keep."""
    return any(isinstance(one, PowerSGD | Lossy) for one in _codecs_of(codec))


def _holds_back(codec: str) -> bool:
    return any(map(_has_state, _codecs_of(codec)))


def _codecs_of(codec: str) -> list[Codec]:
    parsed = policy.parse(codec)
    return [parsed.default, *(rule.codec for rule in parsed.rules)]


def _has_state(codec: object) -> bool:
    if isinstance(codec, PowerSGD):
        return codec.use_error_feedback or codec.warm_start
    return isinstance(codec, Lossy | Auto)  # without feedback on nodes, shards still keep residuals
