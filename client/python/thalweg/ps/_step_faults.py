"""What a script may have done wrong with gradients, when it calls step()."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.ps._bucket import Bucket
from thalweg.ps._some import some


def fault_of(buckets: Sequence[Bucket]) -> str:
    """Returns why these gradients cannot be a step's; empty: they can."""
    missing = [name for bucket in buckets for name in bucket.missing()]
    if missing:
        return (
            f"{some(missing)} got no gradient in this step: shards update all parameters that "
            "required one when ServerOptimizer was made (freeze others before)"
        )
    overwritten = [name for bucket in buckets for name in bucket.overwritten()]
    if overwritten:
        return (
            f"{some(overwritten)} got another gradient after it was pushed: is the model in "
            "DistributedDataParallel? ServerOptimizer takes its place"
        )
    return ""
