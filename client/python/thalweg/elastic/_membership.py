"""The nodes that train together, as a training script sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Membership(NamedTuple):
    """The nodes that train together; their numbers are places in THALWEG_ELASTIC."""

    generation: int  # counted from 1
    nodes: tuple[int, ...]
    lost: tuple[int, ...]  # since the last membership that all of those that stay have trained in
    come: tuple[int, ...]
    rank: int  # of this worker
    world_size: int

    def __str__(self) -> str:
        changes = [f", {word}: {name_all(found)}" for word, found in self._changes()]
        nodes = f"{name_all(self.nodes)}, {self.world_size} workers"
        return f"membership {self.generation}: {nodes}{''.join(changes)}"

    def _changes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns what has changed, but for the first membership."""
        found = [("lost", self.lost), ("come", self.come)]
        return [(word, nodes) for word, nodes in found if nodes and nodes != self.nodes]


def name_all(nodes: Sequence[int]) -> str:
    """Names nodes for people."""
    text = ", ".join(map(str, nodes))
    return f"node {text}" if len(nodes) == 1 else f"nodes {text}"
