"""Makes an optimizer's workers a job that exchanges what they change."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thalweg import _C
from thalweg.ps import _joining
from thalweg.ps._bucket import cut, pulled_as, served
from thalweg.ps._exchange import Exchange, Fragment
from thalweg.ps._local_bucket import LocalBucket
from thalweg.ps._plan import Outer, Plan, cut_fragments
from thalweg.ps._rules import KINDS, Group, rule_of
from thalweg.ps._serving import Serving


def ddp_modules(groups: Sequence[Group]) -> weakref.WeakSet[DistributedDataParallel]:
    """Returns the modules of DistributedDataParallel that have one of these parameters."""
    ours = {id(p) for group in groups for p in group["params"]}
    alive = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return weakref.WeakSet(m for m in alive if any(id(p) in ours for p in m.parameters()))


def check_masters(inner: Optimizer) -> None:
    """Raises ValueError where the weights that count are not the optimizer's parameters."""
    types = getattr(inner, "master_types", ())  # of thalweg.compat's
    stash = getattr(inner, "_amp_stash", None)  # of thalweg.amp
    halves = any(p.dtype in types for group in inner.param_groups for p in group["params"])
    if halves or (stash is not None and stash.all_fp32_from_fp16_params):
        raise ValueError(
            "thalweg: the inner optimizer has float32 masters of half-precision parameters, which "
            "exchanges do not reach: train float32 parameters, and compute under autocast or O1"
        )


def begin(
    inner: Optimizer,
    plan: Plan,
    wish: Mapping[str, Any],
    group: dist.ProcessGroup,
    arguments: dict[str, object],
    *,
    pull: str | None,
    bucket_cap_mb: float,
) -> tuple[_C.Session, Exchange]:
    """Joins the job, and gives all workers and the shards rank 0's parameters."""
    parameters = served(inner.param_groups)
    if not parameters:
        raise ValueError("thalweg: no parameter requires a gradient")
    outer = Outer.of(wish, [each.tensor for each in parameters])
    kind, rule = KINDS[outer.kind], rule_of(outer.groups)
    parts = [
        cut(part, int(bucket_cap_mb * (1 << 20)))
        for part in cut_fragments(parameters, plan.fragments)
    ]
    pulls = {each.tensor.dtype: pulled_as(pull, each.tensor.dtype) for each in parameters}
    description = (
        f"{type(inner).__name__}, {plan}, {outer.describe()}, pull {pull}, bucket_cap_mb "
        f"{bucket_cap_mb:g}"
    )
    named = [(each.name, each.tensor) for each in parameters]
    session = _joining.join(group, named, description, arguments, "LocalOptimizer")
    numbers = itertools.count()
    fragments = [
        Fragment(
            [
                LocalBucket(
                    session,
                    next(numbers),
                    [each._replace(group=0) for each in own],
                    kind=kind,
                    rule=rule,
                    commits=False,
                    pull=pulls[own[0].tensor.dtype],
                )
                for own in part
            ]
        )
        for part in parts
    ]
    _joining.broadcast(group, inner.param_groups)
    buckets = [bucket for fragment in fragments for bucket in fragment.buckets]
    is_first = dist.get_rank(group) == 0
    serving = Serving(session, buckets, kind, rule, commits=False, is_first=is_first)
    return session, Exchange(group, serving, fragments, plan, outer)
