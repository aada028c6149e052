"""Tests who carries a node's sums to whom."""

import pytest

from thalweg._sharded._groups import Plan

WORLDS = [(0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 2, 2), (0, 0, 0, 1), (2, 0, 1, 0, 1, 2)]


@pytest.mark.parametrize("nodes", WORLDS)
def test_each_rank_gets_one_row_of_each_other_node(nodes):
    for rank, node in enumerate(nodes):
        plan = Plan(nodes, rank)
        assert sorted(nodes[one] for one in plan.carriers()) == sorted(set(nodes) - {node})
        for one in plan.carriers():
            assert rank in plan.carried_by(one)


@pytest.mark.parametrize("nodes", WORLDS)
def test_workers_of_a_node_carry_equally_many_rows_but_for_one(nodes):
    for rank in range(len(nodes)):
        plan = Plan(nodes, rank)
        carried = [plan.carried_by(one) for one in plan.node_ranks]
        sizes = [len(one) for one in carried]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == len(nodes) - len(plan.node_ranks)
        rows = plan.rows_by_worker()
        each = len(rows) // len(plan.node_ranks)
        for index, one in enumerate(plan.node_ranks):
            part = rows[index * each : (index + 1) * each]
            assert part[: 1 + len(carried[index])] == [one, *carried[index]]


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((0, 1), "2 nodes x 1 workers"),
        ((3, 3, 1, 1), "2 nodes x 2 workers"),
        ((0, 0, 0, 1), "3 + 1 workers"),
        ((0, 1, 1, 1), "1 + 3 workers"),
        ((2, 0, 2, 0), "workers of nodes 0 1 0 1"),
        ((2, 0, 0, 2), "workers of nodes 0 1 1 0"),
    ],
)
def test_groups_whose_ranks_lie_on_nodes_in_other_ways_have_other_layouts(nodes, text):
    assert Plan(nodes, 0).layout() == text


def test_a_node_alone_carries_nothing():
    plan = Plan((3, 3), 1)
    assert plan.has_one_node
    assert plan.carried_by(1) == plan.carriers() == []
