"""Tests when snapshots are taken, and which one a job goes back to."""

from __future__ import annotations

from typing import Any

import pytest

from thalweg.ps._snapshots import Snapshots, restore, why_no_way_back


class Shards:
    """A session whose shards answer as they are told."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []

    def take_snapshot(self, branch: int, step: int) -> bool:
        self.calls.append((branch, step))
        return bool(self.answers.pop(0)) if self.answers else True

    def snapshots(self) -> tuple[bool, list[tuple[int, int]]]:
        return self.answers.pop(0)  # type: ignore[no-any-return]

    def restore_snapshot(self, branch: int, step: int) -> None:
        self.calls.append((branch, step))


def taken(snapshots: Snapshots, shards: Any, updates: range) -> list[int]:
    """Returns after how many updates one is taken."""
    before = len(shards.calls)
    for count in updates:
        if snapshots.is_due(count):
            snapshots.take(shards, count)
    return [step for _, step in shards.calls[before:]]


def test_first_weights_and_those_after_every_so_many_updates_are_taken():
    snapshots = Snapshots(3, is_first=True)
    snapshots.note_new_state(0)
    assert taken(snapshots, Shards(), range(10)) == [0, 3, 6, 9]


def test_only_the_first_worker_asks_for_them():
    snapshots = Snapshots(3, is_first=False)
    snapshots.note_new_state(0)
    assert taken(snapshots, Shards(), range(10)) == []


def test_snapshot_is_put_off_while_shards_write_and_the_next_one_is_not():
    snapshots = Snapshots(3, is_first=True)
    snapshots.note_new_state(0)
    shards = Shards(True, False, False, True)
    assert taken(snapshots, shards, range(8)) == [0, 3, 4, 5, 6]


def test_state_that_a_worker_gives_has_a_snapshot_of_its_own():
    snapshots, shards = Snapshots(3, is_first=True), Shards()
    snapshots.note_new_state(0)
    taken(snapshots, shards, range(4))
    snapshots.note_new_state(3)
    taken(snapshots, shards, range(3, 7))
    assert shards.calls == [(1, 0), (1, 3), (2, 3), (2, 6)]


def test_after_going_back_the_next_snapshot_is_that_of_a_later_step():
    snapshots = Snapshots(3, is_first=True)
    snapshots.go_on_from(6)
    assert taken(snapshots, Shards(), range(6, 13)) == [9, 12]


def test_latest_snapshot_of_a_step_that_all_have_seen_is_restored():
    shards: Any = Shards((False, [(1, 10), (1, 20), (1, 30)]))
    assert restore(shards, 29, 1.0) == 20
    assert shards.calls == [(1, 20)]


def test_later_branch_wins_over_a_later_step():
    shards: Any = Shards((False, [(1, 10), (1, 20), (2, 15)]))
    assert restore(shards, 25, 1.0) == 15
    assert shards.calls == [(2, 15)]


def test_shards_that_still_write_are_waited_for():
    shards: Any = Shards((True, [(1, 10)]), (True, [(1, 10)]), (False, [(1, 10), (1, 20)]))
    assert restore(shards, 20, 60.0) == 20


def test_shards_that_write_for_too_long_are_an_error():
    shards: Any = Shards((True, []), (True, []))
    with pytest.raises(RuntimeError, match="still wrote a snapshot after 0 s"):
        restore(shards, 20, 0.0)


def test_without_a_snapshot_that_all_have_nothing_is_restored():
    shards: Any = Shards((False, [(1, 30)]))
    assert restore(shards, 29, 1.0) is None
    assert shards.calls == []


def test_timeouts_that_end_a_job_before_it_can_go_back_are_named():
    assert why_no_way_back(timeout=30, step_timeout=1800, reconnect=10) == ""
    for timeout, step_timeout in ((10, 1800), (30, 11)):
        why = why_no_way_back(timeout, step_timeout, reconnect=10)
        assert "let THALWEG_RECONNECT, 10 s, be less than nine tenths of THALWEG_TIMEOUT" in why
        assert f"{timeout} s, and THALWEG_STEP_TIMEOUT, {step_timeout} s" in why
