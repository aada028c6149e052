"""Tests what a diary of a disturbed training says, by small diaries whose answers are known."""

import json

import pytest
from diary import Diary, Living


def diary(tmp_path, *nodes):
    """Returns the diary of nodes with these (at, step, generation, workers, digest)."""
    logs = [tmp_path / f"{number}.json" for number in range(len(nodes))]
    keys = ("at", "step", "generation", "workers", "digest")
    for log, entries in zip(logs, nodes, strict=True):
        lines = [json.dumps(dict(zip(keys, entry, strict=True), loss=1.0)) for entry in entries]
        log.write_text("".join(f"{line}\n" for line in lines) + "{ half a li", encoding="utf-8")
    found = Diary(logs)
    found.read()
    return found


def test_step_that_is_done_again_counts_once_and_for_its_last_workers(tmp_path):
    first = [(1.0, 1, 1, 2, "a"), (2.0, 2, 1, 2, "b"), (4.0, 2, 2, 1, "c")]
    found = diary(tmp_path, first, [(1.0, 1, 1, 2, "a"), (2.5, 2, 1, 2, "b")])
    assert found.rate(0.0, 5.0) == pytest.approx((2 + 1) / 5)
    assert found.differing() == []


def test_nodes_with_other_weights_are_named_by_step(tmp_path):
    found = diary(tmp_path, [(1.0, 1, 1, 2, "a")], [(1.0, 1, 1, 2, "b")])
    assert [text.split(":")[0] for text in found.differing()] == ["step 1"]


def test_time_before_a_commit_belongs_to_its_workers(tmp_path):
    found = diary(tmp_path, [(1.0, 1, 1, 2, "a"), (4.0, 2, 2, 1, "b")])
    living = Living(2)
    living.note([True, True], 0.0)
    # 1 s with both of two, then 3 s with one of two.
    assert found.share_of(living, 0.0, 4.0) == pytest.approx((2 + 3) / (2 + 6))
    living.note([True, False], 2.0)
    assert living.share(0.0, 4.0) == pytest.approx((4 + 2) / 8)
    assert found.share_of(living, 0.0, 4.0) == pytest.approx((2 + 3) / (4 + 2))


def test_longest_gap_is_that_of_all_nodes_together(tmp_path):
    found = diary(tmp_path, [(1.0, 1, 1, 2, "a"), (6.0, 3, 2, 2, "b")], [(3.0, 2, 2, 2, "c")])
    assert found.longest_gap({0, 1}, 2.0) == (3.0, 6.0)
    assert found.longest_gap({0}, 2.0) == (5.0, 6.0)
    assert found.longest_gap({0, 1}, 0.0, begun_by=2.0) == (2.0, 3.0)
