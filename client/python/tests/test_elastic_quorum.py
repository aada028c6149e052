"""Tests which nodes may train together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.elastic._membership import Membership
from thalweg.elastic._quorum import Rules, Standing, changes, leader, why_wait

FOR_EVER = 1e9


def rules(nodes: int, min_nodes: int = 1) -> Rules:
    return Rules(nodes, min_nodes, first_seconds=30, late_seconds=20)


def fresh(*nodes: int) -> dict[int, Standing]:
    return {node: Standing(node) for node in nodes}


def healed(*nodes: int, members: tuple[int, ...], generation: int = 1) -> dict[int, Standing]:
    return {node: Standing(node, generation, members) for node in nodes}


def test_first_membership_begins_at_once_when_all_nodes_have_come():
    assert why_wait(fresh(0, 1, 2), fresh(0, 1, 2), 0, rules(3)) == ""


def test_first_membership_waits_for_absent_nodes_only_for_a_while():
    come = fresh(0, 1)
    assert why_wait(come, come, 29, rules(3)) == "node 2 of 3 not there"
    assert why_wait(come, come, 31, rules(3)) == ""


@pytest.mark.parametrize(("nodes", "may"), [((0, 1), True), ((1, 2), False), ((1, 2, 3), True)])
def test_half_of_the_nodes_train_with_the_first_one_only(nodes, may):
    come = fresh(*nodes)
    assert (why_wait(come, come, FOR_EVER, rules(4)) == "") == may
    come = healed(*nodes, members=(0, 1, 2, 3))
    assert (why_wait(come, come, FOR_EVER, rules(4)) == "") == may


def test_nodes_without_a_state_do_not_count_unless_all_nodes_are_there():
    come = fresh(0, 1) | healed(2, members=(0, 1, 2, 3), generation=4)
    expected = "not more than half of nodes 0, 1, 2, 3 are there, which trained together last"
    assert expected in why_wait(come, come, FOR_EVER, rules(4))
    come |= fresh(3)
    assert why_wait(come, come, 0, rules(4)) == ""


def test_all_nodes_of_the_first_membership_are_new():
    assert changes(fresh(0, 2)) == ((), (0, 2))


def test_nodes_are_lost_or_new_by_the_last_membership():
    come = healed(0, 1, members=(0, 1, 2))
    assert changes(come) == ((2,), ())
    assert changes(come | fresh(2, 3)) == ((), (3,))


def test_node_that_has_missed_a_membership_hears_of_what_that_has_changed():
    # The second one, without node 4 and with node 3, has not begun on node 2.
    come = healed(0, 1, 3, members=(0, 1, 2, 3), generation=2)
    come |= healed(2, members=(0, 1, 2, 4), generation=1)
    assert changes(come) == ((4,), (3,))


def test_lost_nodes_are_not_waited_for_and_late_members_for_a_while():
    come, members = healed(0, 1, members=(0, 1, 2)), (0, 1, 2)
    assert why_wait(come, come, 0, rules(3)) == ""
    answering = come | healed(2, members=members)
    assert why_wait(come, answering, 19, rules(3)) == "node 2 still on the way"
    assert why_wait(come, answering, 21, rules(3)) == ""


def test_fewer_nodes_than_asked_for_wait():
    come = healed(0, 1, 2, members=(0, 1, 2, 3))
    assert "at least 4 must be" in why_wait(come, come, FOR_EVER, rules(5, min_nodes=4))
    assert why_wait(come, come, FOR_EVER, rules(5, min_nodes=3)) == ""


def test_membership_is_described_with_what_has_changed_unless_it_is_the_first():
    first = Membership(1, (0, 2), lost=(), come=(0, 2), rank=0, world_size=4)
    assert str(first) == "membership 1: nodes 0, 2, 4 workers"
    second = Membership(2, (0, 3), lost=(1, 2), come=(3,), rank=0, world_size=4)
    assert str(second) == "membership 2: nodes 0, 3, 4 workers, lost: nodes 1, 2, come: node 3"


def test_leader_is_the_lowest_node_of_the_newest_membership():
    standings = fresh(0) | healed(1, members=(1, 2), generation=2)
    standings |= healed(2, 3, members=(2, 3), generation=3)
    assert leader(standings) == 2


EVENTS = st.lists(
    st.tuples(st.sampled_from(["gather", "crash"]), st.sets(st.integers(0, 6))), max_size=30
)


@given(st.integers(1, 7), EVENTS)
def test_two_memberships_never_train_beside_each_other(count, events):
    standings = fresh(*range(count))
    training: set[int] = set()
    for event, found in events:
        nodes = {node for node in found if node < count}
        if not nodes:
            continue
        if event == "crash":
            standings |= fresh(*nodes)
            training = set() if training & nodes else training
            continue
        # Only these hear each other. Who trained with one of them fails.
        come = {node: standings[node] for node in nodes}
        training = set() if training & nodes else training
        if why_wait(come, come, FOR_EVER, rules(count)):
            continue
        assert not training
        training = nodes
        generation = max(one.generation for one in come.values()) + 1
        standings |= healed(*nodes, members=tuple(sorted(nodes)), generation=generation)


@given(st.integers(2, 7), EVENTS)
def test_state_is_lost_only_where_too_many_nodes_have_crashed(count, events):
    """Each gathering goes on from the newest state that any node has, as long as no member of the
    membership that made it has crashed.
    """
    standings = fresh(*range(count))
    newest, crashed = 0, False
    for event, found in events:
        nodes = {node for node in found if node < count}
        if event == "crash":
            crashed |= any(standings[node].generation == newest for node in nodes)
            standings |= fresh(*nodes)
            continue
        come = {node: standings[node] for node in nodes}
        if not nodes or why_wait(come, come, FOR_EVER, rules(count)):
            continue
        generation = max(one.generation for one in come.values())
        assert generation == newest or crashed
        if generation == newest:
            crashed = False
        newest = max(newest, generation + 1)
        standings |= healed(*nodes, members=tuple(sorted(nodes)), generation=generation + 1)
