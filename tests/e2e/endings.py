"""Ends trainings when a test has seen enough, and not before: it may be slower than they are."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

# Others learn of the end before they get there: they are hardly ahead of rank 0, or may go back.
_AHEAD = 50


def is_over(step: int, steps: int) -> bool:
    """Returns whether a training is over after so many steps: all of `steps`, or where UNTIL names
    a file, some more than rank 0 had done when there was that file.

    Call it on all workers, before each step; `step` is as many on all at the end, or later where
    they do not wait for each other.
    """
    until = os.environ.get("UNTIL")
    if until is None:
        return step >= steps
    store = dist.distributed_c10d._get_default_store()
    if not store.check(["end"]):
        if dist.get_rank() != 0 or not Path(until).exists():
            return False
        store.set("end", str(step + _AHEAD))
    return step >= int(store.get("end"))
