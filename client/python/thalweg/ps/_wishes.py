"""What a script wants of an optimizer whose work shards do, apart from its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from thalweg._settings._arguments import JobArguments
from thalweg.codecs import OfWorkers
from thalweg.ps._downward import DIFFERENCES
from thalweg.ps._pace import Pace
from thalweg.ps._plan import Outer, Plan
from thalweg.ps._rules import KINDS, Rule

_NAMES = {"ahead": "staleness", "alone": 'mode="async"', "drops_late": 'late="drop"'}


class Wishes(NamedTuple):
    """The arguments of ServerOptimizer, which says what they mean."""

    kind: str  # a key of KINDS
    group: dist.ProcessGroup
    arguments: JobArguments
    pull: str | None = None
    max_grad_norm: float | None = None
    loss_scaling: bool = False
    overlap: bool = False
    finds_unused: bool = False  # parameters, in each step
    bucket_cap_mb: float | None = None
    pace: Pace = Pace()

    def check(self) -> None:
        """Raises ValueError where nodes may be apart, and something else asks them to wait."""
        if self.pace.is_together:
            return
        waits = {
            "max_grad_norm": self.max_grad_norm is not None,
            "loss_scaling": self.loss_scaling,
            "overlap": self.overlap,
            "find_unused_parameters": self.finds_unused,
            f"pull={self.pull!r}": self.pull in DIFFERENCES,
            self.kind: KINDS[self.kind].measures,
        }
        for name, is_wanted in waits.items():
            if is_wanted:
                raise ValueError(
                    f'thalweg: {name} needs all nodes in the same step: it goes with mode="sync"'
                )

    @property
    def commits(self) -> bool:
        """Whether gradients are looked at as a whole before any weight changes."""
        looks = self.loss_scaling or self.overlap or self.finds_unused
        return looks or self.max_grad_norm is not None or KINDS[self.kind].measures

    @property
    def why_dense(self) -> str:
        """Which wish needs gradients that go up in floats; empty: none does. With a codec that
        holds something back, what has been sent for a parameter that stays must be held back again.
        """
        if not self.pace.is_together:
            return 'mode="async"' if self.pace.alone else 'mode="stale"'
        return "find_unused_parameters" if self.finds_unused else ""

    @property
    def why_no_snapshots(self) -> str:
        """What snapshots do that these wishes cannot have; empty: they can."""
        if not self.pace.is_together:
            return 'need all nodes in the same step: they go with mode="sync"'
        if self.finds_unused:
            # Some workers may have asked the others what they use when the job goes back, and
            # others not; then answers would be of another step.
            return "do not go with find_unused_parameters"
        if self.pull in DIFFERENCES:
            # Weights come whole once when the job has gone back, and no step would be the same.
            return f"do not go with pull={self.pull!r}: expected fp32, bf16 or fp16"
        return ""

    @property
    def bucket_bytes(self) -> int:
        """How many bytes of parameters travel together, if there are several; 0: each travels by
        itself.
        """
        if self.finds_unused:
            return 0  # the shards count steps by bucket, and one that is not pulled stays
        # As DistributedDataParallel's. What overlaps needs smaller ones: a forward pass begins when
        # its first bucket has gone up after the backward pass, and its weights have come.
        cap = (4.0 if self.overlap else 25.0) if self.bucket_cap_mb is None else self.bucket_cap_mb
        return int(cap * (1 << 20))

    def describe(self, rule: Rule) -> str:
        """Returns what all workers must wish for alike, between semicolons."""
        return (
            f"{self.kind}; {_parts(rule)}; pull {self.pull}; max_grad_norm {self.max_grad_norm}; "
            f"loss_scaling {self.loss_scaling}; overlap {self.overlap}; find_unused_parameters "
            f"{self.finds_unused}; buckets of {self.bucket_bytes} bytes; {_parts(self.pace)}"
        )


class LocalWishes(NamedTuple):
    """The arguments of LocalOptimizer, which says what they mean."""

    group: dist.ProcessGroup
    arguments: JobArguments
    plan: Plan
    outer: Mapping[str, Any]  # what Outer.of() takes
    pull: str | None
    bucket_cap_mb: float
    own: OfWorkers | None  # the codec, if it is none of the session's
    pace: Pace

    def check(self) -> None:
        """Raises ValueError, naming what does not fit."""
        self.plan.check()
        if self.arguments.min_nodes and not self.pace.quorum:
            raise ValueError("thalweg: min_nodes goes with quorum: without one all are needed")
        if self.pace.quorum and (self.plan.weighted or self.plan.fragments > 1):
            raise ValueError(
                "thalweg: quorum does not go with weighted, which needs the sum of what all "
                "workers have counted, nor with fragments, of which nodes could wait for each "
                "other's"
            )

    @property
    def bucket_bytes(self) -> int:
        """How many bytes of parameters travel together, if there are several."""
        return int(self.bucket_cap_mb * (1 << 20))

    def describe(self, inner: str, outer: Outer) -> str:
        """Returns what all workers must wish for alike, between semicolons. `inner` is the class of
        their own optimizer.
        """
        return (
            f"{inner}; {_parts(self.plan)}; {outer.describe()}; pull {self.pull}; bucket_cap_mb "
            f"{self.bucket_cap_mb:g}{f'; codec {self.own.spec()}' if self.own else ''}"
            f"{f'; {_parts(self.pace)}' if self.pace.quorum else ''}"
        )


def _parts(of: Plan | Rule | Pace) -> str:
    return "; ".join(f"{_NAMES.get(key, key)} {value}" for key, value in of._asdict().items())


def check_bound(max_grad_norm: float | None) -> float | None:
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"thalweg: max_grad_norm is {max_grad_norm}, expected more than 0, or None"
        )
    return max_grad_norm
