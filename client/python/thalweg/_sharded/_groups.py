"""Sums and exchanges rows of values in a group of several nodes, so that each node sends a row for
each rank of other nodes once, whatever the number of its workers.

A row is what one rank shall get of a sum. The workers of a node add up their rows first, through
shared memory. Each of them *carries* the node's sums to some of the ranks of other nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from thalweg import _backend
from thalweg._c10d import _process_group


@dataclass(frozen=True)
class Plan:
    """Who carries what, as one rank of a group sees it; all numbers are ranks in the group."""

    nodes: tuple[int, ...]  # by rank
    rank: int

    @property
    def node_ranks(self) -> list[int]:
        return self._ranks_of(self.nodes[self.rank])

    @property
    def has_one_node(self) -> bool:
        return len(set(self.nodes)) == 1

    def layout(self) -> str:
        """Returns how many workers each node has, as text; or, where ranks of a node do not follow
        each other, the number of each rank's node, from 0 on.
        """
        sizes = [len(list(ranks)) for _, ranks in itertools.groupby(self.nodes)]
        firsts = list(dict.fromkeys(self.nodes))
        if len(sizes) != len(firsts):
            return "workers of nodes " + " ".join(str(firsts.index(node)) for node in self.nodes)
        if len(set(sizes)) > 1:
            return " + ".join(map(str, sizes)) + " workers"
        return f"{len(sizes)} nodes x {sizes[0]} workers"

    def carried_by(self, rank: int) -> list[int]:
        """Returns to whom a rank carries its node's sums, in rising order."""
        ranks = self._ranks_of(self.nodes[rank])
        return self._elsewhere(self.nodes[rank])[ranks.index(rank) :: len(ranks)]

    def carriers(self) -> list[int]:
        """Returns who carries something to this rank, one of each other node, in rising order."""
        return [
            rank
            for rank, node in enumerate(self.nodes)
            if node != self.nodes[self.rank] and self.rank in self.carried_by(rank)
        ]

    def rows_by_worker(self) -> list[int]:
        """Returns which row goes to whom inside the node: for each of its workers as many, its own
        row, those that it carries, and its own again to fill up.
        """
        ranks = self.node_ranks
        most = max(len(self.carried_by(rank)) for rank in ranks)
        rows: list[int] = []
        for rank in ranks:
            carried = self.carried_by(rank)
            rows += [rank, *carried, *[rank] * (most - len(carried))]
        return rows

    def _ranks_of(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.nodes) if other == node]

    def _elsewhere(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.nodes) if other != node]


class ShardGroup:
    """A process group of the back end "thalweg", over which a model is sharded.

    All its ranks make it together. RuntimeError: it is of another back end.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.plan = Plan(nodes_of(group), group.rank())
        self._carried = self.plan.carried_by(self.plan.rank)
        self._carriers = self.plan.carriers()
        self._rows = torch.tensor(self.plan.rows_by_worker(), device="cpu")
        mine = self.plan.node_ranks
        alone = len(mine) == 1 or self.plan.has_one_node
        name = f"{group.group_name} on node {self.plan.nodes[self.plan.rank]}"
        self._node = None if alone else _process_group.make_part(group, mine, name)

    @property
    def carries(self) -> int:
        """For how many ranks of other nodes this rank sends rows."""
        return len(self._carried)

    def __str__(self) -> str:
        return f"{len(self.plan.nodes)} workers on {len(set(self.plan.nodes))} nodes"

    def sum_in_node(self, rows: Tensor) -> Tensor:
        """Returns this rank's row of its node's sums, and those that it carries.

        `rows`: one for each rank of the group. The result is float32 [1 + carries, elements].
        """
        parts = rows.index_select(0, self._rows.to(rows.device)).float()
        if self._node is not None:
            own = parts.new_empty(len(parts) // len(self.plan.node_ranks), parts.shape[1])
            self._node._reduce_scatter_base(own, parts).wait()
            parts = own
        return parts[: 1 + self.carries]

    def exchange(self, payload: Tensor) -> tuple[Work, Tensor]:
        """Returns a collective under way, and what then has come from the carriers of other nodes
        for this rank, one row for each.

        `payload`: uint8 [carries, bytes], for the ranks to whom this rank carries.
        """
        arrived = payload.new_empty(len(self._carriers), payload.shape[1])
        size, ranks = payload.shape[1], range(len(self.plan.nodes))
        work = dist.all_to_all_single(
            arrived.view(-1),
            payload.view(-1),
            [size if rank in self._carriers else 0 for rank in ranks],
            [size if rank in self._carried else 0 for rank in ranks],
            group=self.group,
            async_op=True,
        )
        return work, arrived

    def add_nodes(self, own: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Returns the sum of a row of this node and of those that exchange() has brought, in the
        order of the nodes' numbers.
        """
        nodes = self.plan.nodes
        parts = dict(zip((nodes[rank] for rank in self._carriers), others, strict=True))
        parts[nodes[self.plan.rank]] = own
        first, *rest = (parts[node] for node in sorted(parts))
        total = first.clone()
        for part in rest:
            total += part
        return total


def nodes_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the number of each rank's node. RuntimeError: the group is of another back end."""
    name = dist.get_backend(group)
    if name == _backend.NAME:
        if (world := _process_group.world_of(group)) is not None:
            return tuple(world.job.nodes)
        if (world := _process_group.world_of(dist.group.WORLD)) is not None:
            ranks = dist.get_process_group_ranks(group)
            return tuple(world.job.nodes[rank] for rank in ranks)
    raise RuntimeError(
        f'thalweg: shards are compressed in groups of the back end "{_backend.NAME}" only, and '
        f"this one is of {name!r}"
    )
