"""Notices that parameters of a new job belong to an earlier one, whose codec holds gradients back.

A module that is wrapped anew in DistributedDataParallel, as in progressive unfreezing, begins a new
job, which knows nothing of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from thalweg import policy
from thalweg.codecs import Auto, Codec, Lossy, PowerSGD

_SOON = 2  # steps after which int8, onebit and topk begin by default


class Owner(NamedTuple):
    """A job that averages a parameter's gradients, or has done so."""

    job: str
    codec: str
    compresses: bool
    goes_on_beside: Callable[[DistributedDataParallel], bool] = lambda _: False


_owners = WeakIdKeyDictionary()  # by parameter: a list of those that share it


def own(
    parameters: Sequence[tuple[str, torch.Tensor]], owner: Owner, module: DistributedDataParallel
) -> list[str]:
    """Notes who averages gradients of the module's parameters from now on. Returns a remark for
    each earlier job in whose place it does, and which may hold back some of theirs.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for name, parameter in parameters:
        owners: list[Owner] = _owners.get(parameter, [])
        others = [earlier for earlier in owners if earlier.goes_on_beside(module)]
        for earlier in owners:
            if earlier not in others and earlier.compresses and _holds_back(earlier.codec):
                names.setdefault((earlier.job, earlier.codec), []).append(name)
        _owners[parameter] = [*others, owner]
    return [
        f"{len(of)} of its parameters ({of[0]}{', …' if len(of) > 1 else ''}) are those of job "
        f"{job}, and what its codec {codec} holds back of their gradients is not "
        "taken along, because a module that is wrapped anew begins a new job: give the "
        "state_dict() of the earlier job's state to load_state_dict() of this one's"
        for (job, codec), of in names.items()
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
