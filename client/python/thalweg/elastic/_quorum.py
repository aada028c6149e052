"""Decides which nodes train together from now on. Pure: messages and clocks are elsewhere.

A membership has more than half of all nodes, or half of them with node 0. Each of them must take
part to begin it, so two groups never train beside each other: they would share a node.

It goes on from the newest state. So that this is not an old one, more than half of the members of
the last one must be there, or half of them with its lowest, and those that have no state of the job
do not count. Where all nodes are there, nobody else has a newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from thalweg.elastic._membership import name_all


class Standing(NamedTuple):
    """What a node says of itself."""

    node: int
    generation: int = 0  # of the membership whose state it has; 0: none
    members: tuple[int, ...] = ()  # nodes of that membership
    commits: int = 0  # that its state has
    workers: int = 1
    nodes: str = ""  # the list of all nodes that it was given
    question: str = ""  # it waits for a plan and will know it by this word; empty: it trains
    has_finished: bool = False
    ended: int = 0  # trainings, one after the other, that its process has ended


class Rules(NamedTuple):
    """What a job asks of its memberships."""

    nodes: int  # that it may have
    min_nodes: int
    first_seconds: float  # that the first membership waits for nodes that have not come
    late_seconds: float  # that others wait for a member that answers but does not come


def newest(standings: Iterable[Standing]) -> Standing:
    """Returns the one whose membership is the newest; of several the lowest node."""
    return max(standings, key=lambda one: (one.generation, -one.node))


def leader(standings: Mapping[int, Standing]) -> int:
    """Returns the node that decides for those that answer: the lowest of the newest membership."""
    return newest(standings.values()).node


def changes(come: Mapping[int, Standing]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns which nodes these have lost, and which are new among them.

    A node is lost or new if it is so for any that has a state: where a membership has begun on some
    of them only, the others have not heard of its changes yet. All are new in the first one.
    """
    known: list[set[int]] = [set(one.members) for one in come.values() if one.generation > 0]
    known = known or [set()]
    lost = known[0].union(*known) - set(come)
    new = set(come) - known[0].intersection(*known)
    return tuple(sorted(lost)), tuple(sorted(new))


def why_wait(
    come: Mapping[int, Standing],
    answering: Mapping[int, Standing],
    waited: float,
    rules: Rules,
) -> str:
    """Returns why the nodes that have come to the leader do not train yet; empty: they do.

    `answering` are these and others that answer; `waited` are seconds since the leader has come.
    """
    if len(come) == rules.nodes:
        return ""
    last = newest([*come.values(), *answering.values()])
    absent = sorted(set(range(rules.nodes)) - set(come))
    text = f"{name_all(absent)} of {rules.nodes} not there"
    if len(come) < rules.min_nodes:
        return f"{text}: at least {rules.min_nodes} must be"
    if not _has_majority(come, range(rules.nodes)):
        return f"{text}: more than half must be, or half with node 0"
    if last.generation == 0:
        return text if waited < rules.first_seconds else ""
    healed = {node for node, one in come.items() if one.generation > 0}
    if not _has_majority(healed, last.members):
        members = name_all(sorted(last.members))
        return f"{text}: not more than half of {members} are there, which trained together last"
    late = sorted(set(answering) - set(come))
    return f"{name_all(late)} still on the way" if late and waited < rules.late_seconds else ""


def _has_majority(nodes: Collection[int], members: Collection[int]) -> bool:
    """Returns whether `nodes` has more than half of `members`, or half of them with the lowest."""
    present = set(nodes) & set(members)
    return 2 * len(present) + (min(members) in present) > len(members)
