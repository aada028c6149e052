"""How far LAMB lets each parameter go: in proportion to its norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thalweg.ps._bucket import Bucket
from thalweg.ps._rules import Group


def trust_ratios(
    buckets: Sequence[Bucket], groups: Sequence[Group], settings: int
) -> dict[int, float]:
    """Lets the shards measure, with these settings, and waits for it. Returns by number of each
    parameter's settings what its rate is multiplied by, as FusedLAMB does.
    """
    for bucket in buckets:
        bucket.measure(settings)
    ratios = {}
    for bucket in buckets:
        for each, (weights, update) in zip(bucket.parameters, bucket.norms(), strict=True):
            group = groups[each.group]
            trusted = group["use_nvlamb"] or group["weight_decay"] != 0
            usable = trusted and weights != 0 and update != 0
            ratios[each.settings] = math.sqrt(weights / update) if usable else 1.0
    return ratios
