"""Checks that workers load what fits together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

# What is compared, in words.
_PARTS = ("steps", "fragments", "exchanges on their way", "unsent changes", "shapes", "moments")


def check_alike(
    group: dist.ProcessGroup, state: Mapping[str, Any], fragments: int, *, has_quorum: bool
) -> None:
    """Raises ValueError on all workers unless each loads such a state of local updates, of so many
    fragments. With a quorum, workers may be in steps of their own.
    """
    shapes = sorted((name, *weights.shape) for name, weights in state["weights"].items())
    saved = len(state["fragments"])
    due = [] if has_quorum else [each["due"] for each in state["fragments"]]
    owing = [] if has_quorum else [each.get("owes", False) for each in state["fragments"]]
    moments = sorted((name, *sorted(values)) for name, values in state["outer"].items())
    steps = 0 if has_quorum else state["steps"]
    mine = (steps, saved, due, owing, shapes, moments)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    if saved != fragments:
        raise ValueError(f"thalweg: the checkpoint has {saved} fragments, expected {fragments}")
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            parts = zip(_PARTS, theirs, found[0], strict=True)
            others = ", ".join(part for part, one, other in parts if one != other)
            raise ValueError(
                f"thalweg: rank {rank} loads a checkpoint of step {theirs[0]}, rank 0 of step "
                f"{found[0][0]}, with other {others}: expected the same step, and the same "
                "exchanges, on all workers"
            )
