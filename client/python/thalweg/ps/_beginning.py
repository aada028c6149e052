"""Makes an optimizer's workers a job that exchanges what they change."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thalweg import _C, policy
from thalweg.codecs import OfWorkers
from thalweg.ps import _downward, _joining
from thalweg.ps._exchange import Exchange
from thalweg.ps._fragment import Fragment
from thalweg.ps._joining import Joined
from thalweg.ps._kept import KeptWeights
from thalweg.ps._local_bucket import LocalBucket
from thalweg.ps._means import CodecMeans
from thalweg.ps._own_means import Means, OwnMeans
from thalweg.ps._pace import Apart, Pace
from thalweg.ps._parameters import Parameter, cut, served
from thalweg.ps._plan import Outer, cut_fragments
from thalweg.ps._rules import KINDS, Group, rule_of
from thalweg.ps._serving import Serving
from thalweg.ps._upward import are_dense
from thalweg.ps._wishes import LocalWishes

_MANY = 10  # exchanges
_log = logging.getLogger("thalweg")


def ddp_modules(groups: Sequence[Group]) -> weakref.WeakSet[DistributedDataParallel]:
    """Returns the modules of DistributedDataParallel that have one of these parameters."""
    ours = {id(p) for group in groups for p in group["params"]}
    objects = gc.get_objects()
    # There are far fewer types than objects. type() asks no object, as isinstance() does.
    kinds = {kind for kind in {*map(type, objects)} if issubclass(kind, DistributedDataParallel)}
    alive = [each for each in objects if type(each) in kinds] if kinds else []
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


def begin(inner: Optimizer, wishes: LocalWishes) -> tuple[_C.Session, Exchange]:
    """Joins the job, and gives all workers and the shards rank 0's parameters."""
    parameters = served(inner.param_groups)
    if not parameters:
        raise ValueError("thalweg: no parameter requires a gradient")
    group, plan, pace, own = wishes.group, wishes.plan, wishes.pace, wishes.own
    outer = Outer.of(wishes.outer, [each.tensor for each in parameters])
    parts = [cut(part, wishes.bucket_bytes) for part in cut_fragments(parameters, plan.fragments)]
    dtypes = {each.tensor.dtype for each in parameters}
    pulls = {each: _downward.chosen(wishes.pull, each) for each in dtypes}
    joined = _joining.join(
        group,
        [(each.name, each.tensor) for each in parameters],
        wishes.describe(type(inner).__name__, outer),
        wishes.arguments,
        optimizer="LocalOptimizer",
        choose=policy.except_small_tensors,
        for_all_collectives=own is not None,
    )
    session = joined.session
    if fault := _why_not(pace, joined, own) or _why_no_pull(wishes.pull, joined, own):
        session.close()
        raise ValueError(f"thalweg: {fault}")
    means = _means(joined, wishes, [each for part in parts for each in part])
    fragments = _fragments(session, parts, outer, means, pulls, pace=pace)
    _joining.broadcast(group, inner.param_groups)
    buckets = [bucket for fragment in fragments for bucket in fragment.buckets]
    writes = means is not None or dist.get_rank(group) == 0
    kind, rule = KINDS[outer.kind], rule_of(outer.groups)
    apart = Apart.of(pace, joined)
    serving = Serving(session, buckets, kind, rule, commits=False, is_first=writes, apart=apart)
    has_quorum = pace.quorum > 0
    return session, Exchange(
        group, serving, fragments, plan, outer, means=means, has_quorum=has_quorum
    )


def _why_not(pace: Pace, joined: Joined, own: OfWorkers | None) -> str:
    """Returns why the job cannot exchange so, which all workers know alike; empty: it can."""
    place, most = joined.job.place, joined.job.workers[0].min_nodes
    if most and not pace.quorum:
        return (
            f"min_nodes (THALWEG_MIN_NODES) is {most}, but exchanges need all nodes: it goes with "
            "quorum="
        )
    if pace.quorum > place.num_nodes:
        return f"quorum is {pace.quorum}, but the job has {place.num_nodes} nodes"
    if pace.quorum and 0 < most < pace.quorum:
        return f"min_nodes is {most}: no update is made of fewer than a quorum of {pace.quorum}"
    if pace.quorum and (own is not None or not are_dense(joined.codecs)):
        codec = own.spec() if own else joined.codecs.spec()
        return (
            f"quorum does not go with codec {codec}, with which every worker runs the outer "
            "optimizer and needs each mean: expected fp32, fp16 or bf16"
        )
    return ""


def _why_no_pull(pull: str | None, joined: Joined, own: OfWorkers | None) -> str:
    """Returns why no weights come in this format; empty: they do, or nobody has asked for one."""
    if pull is None or (own is None and are_dense(joined.codecs)):
        return ""
    codec = own.spec() if own else joined.codecs.spec()
    return (
        f"pull={pull!r} does not go with codec {codec}, with which no weights come from shards, "
        "because every worker runs the outer optimizer: expected fp32, fp16 or bf16, or no pull"
    )


def _fragments(
    session: _C.Session,
    parts: Sequence[Sequence[Sequence[Parameter]]],
    outer: Outer,
    means: Means | None,
    pulls: Mapping[torch.dtype, str],
    *,
    pace: Pace,
) -> list[Fragment]:
    """Returns the fragments of these parts, which have the parameters of each bucket."""
    of_buckets = iter(means.of_buckets if means else ())
    numbers = itertools.count()

    def bucket(own: Sequence[Parameter]) -> LocalBucket:
        elements = sum(each.tensor.numel() for each in own)
        return LocalBucket(
            session,
            next(numbers),
            [each._replace(group=0, settings=0) for each in own],
            kind=KINDS[outer.kind],
            rule=rule_of(outer.groups),
            commits=False,
            pull=pulls[own[0].tensor.dtype],
            pace=pace,
            kept=KeptWeights(next(of_buckets), outer, elements) if means else None,
        )

    return [Fragment([bucket(own) for own in part]) for part in parts]


def _means(
    joined: Joined, wishes: LocalWishes, buckets: Sequence[Sequence[Parameter]]
) -> Means | None:
    """Returns how means are taken; None: shards take them, and keep the weights."""
    group, codec = wishes.group, wishes.own
    layouts = [
        [(each.name, each.tensor.shape) for each in own if each.tensor.numel()] for own in buckets
    ]
    if codec is not None:
        return OwnMeans(joined.job, group, layouts, codec, weighted=wishes.plan.weighted)
    if are_dense(joined.codecs):
        return None
    first = max(getattr(codec, "start_iter", 0) for codec in joined.codecs.codecs)
    if first > _MANY and dist.get_rank(group) == 0:
        _log.warning(
            "job %s: changes are not compressed in the first %d exchanges, each of many steps: "
            "give the codec a smaller start=",
            joined.job.name,
            first,
        )
    return CodecMeans(joined.job, group, layouts)
