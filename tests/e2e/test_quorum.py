"""Tests workers that exchange by quorum, by the history of what they push and get."""

from __future__ import annotations

from pathlib import Path

import history
import pytest
import recorded
from breaking_proxy import proxy
from harness import Job, Servers, metric, servers
from quorum_jobs import OUTER
from recorded import traced

JOBS = Path(__file__).parent / "quorum_jobs.py"


def start(cluster: Servers, tmp_path: Path, name: str, world: int = 3, **env: str) -> Job:
    return recorded.start(JOBS, cluster, tmp_path, name, world, **env)


def checked(tmp_path: Path, world: int = 3) -> dict[history.Key, list[history.Update]]:
    """Returns the updates by chunk, in which nothing is wrong."""
    problems, updates = history.check_records(
        *(tmp_path / "records", tmp_path / "traces", world, "sgd", OUTER)
    )
    assert not problems, problems[:5]
    assert len(updates) >= 3  # several chunks
    return updates


def pushes_of(updates: list[history.Update], node: int) -> list[int]:
    return [step for update in updates for who, step in update.pushes if who == node]


@pytest.mark.parametrize("late", ["keep", "drop"])
def test_slow_node_holds_up_nobody_and_what_it_gives_counts_later_or_not(late, tmp_path):
    with traced(tmp_path, 2) as cluster:
        results = start(cluster, tmp_path, "slow_one", LAG="5", LATE=late).results()
        counted = sum(
            metric(each, "thalweg_shard_late_total", 'node="2"') for each in cluster.aggregators
        )
    assert len({result["digest"] for result in results}) == 1
    assert [result["exchanges"] for result in results] == [20, 20, 4]
    updates = checked(tmp_path)
    assert counted == 4 * len(updates)
    for each in updates.values():
        # The slow one comes when the others' update is over.
        assert len(each) == 20 + (late == "keep")
        assert pushes_of(each, 0) == pushes_of(each, 1) == list(range(1, 21))
        assert pushes_of(each, 2) == ([1, 2, 3, 4] if late == "keep" else [])


def test_first_update_waits_for_all_where_the_grace_is_measured(tmp_path):
    with traced(tmp_path, 1) as cluster:
        start(cluster, tmp_path, "at_will", GRACE="measured").results()
    for each in checked(tmp_path).values():
        assert len(each[0].pushes) == 3  # nothing is known of anybody before the first update


@pytest.mark.parametrize("quorum", ["1", "2", "3"])
def test_each_push_counts_once_where_workers_exchange_as_they_like(quorum, tmp_path):
    with traced(tmp_path, 2) as cluster:
        results = start(cluster, tmp_path, "at_will", QUORUM=quorum).results()
    assert len({result["digest"] for result in results}) == 1
    for each in checked(tmp_path).values():
        for node in range(3):
            # The last exchanges, of all, have nothing to give.
            assert sorted(pushes_of(each, node)) == list(range(1, 20 + node + 2))


def test_nodes_end_where_windows_hold_less_than_the_model(tmp_path):
    # Seven chunks, of which two may be on their way.
    windows = {"THALWEG_CHUNK_BYTES": "4096", "THALWEG_WINDOW_CHUNKS": "2"}
    with traced(tmp_path, 1) as cluster:
        results = start(cluster, tmp_path, "at_will", EXCHANGES="4", **windows).results()
    assert len({result["digest"] for result in results}) == 1
    assert len(checked(tmp_path)) == 7


def test_history_is_right_where_connections_break(tmp_path):
    with traced(tmp_path, 1) as cluster, proxy(cluster.aggregators[0].address) as between:
        for _ in range(3):
            cluster.add_sidecar(aggregators=between.address)
        over = tmp_path / "over"
        job = start(cluster, tmp_path, "at_will", UNTIL=str(over))
        job.await_rounds(20)
        between.reset_often(job, 12)
        over.touch()
        results = job.results()
    assert len({result["digest"] for result in results}) == 1
    checked(tmp_path)


@pytest.mark.parametrize("name", ["streams", "goes_on", "resumes"])
def test_workers_meet_wherever_they_are(name, tmp_path):
    with servers(shards=2) as cluster:
        results = start(cluster, tmp_path, name).results()
    assert len({result["digest"] for result in results}) == 1
    if name == "resumes":
        assert len({result["due"] for result in results}) > 1
    if name == "goes_on":
        assert results[0]["bias"] > 0.5
        assert all(result["before"] == result["loaded"] for result in results)


def test_others_go_on_without_a_node_that_leaves(tmp_path):
    with traced(tmp_path, 1) as cluster:
        first, second, gone = start(cluster, tmp_path, "leaves").results()
    assert first["digest"] == second["digest"]
    updates = checked(tmp_path)
    for each in updates.values():
        assert pushes_of(each, 2) == list(range(1, 21))
        assert max(pushes_of(each, 0)) >= 40
    assert gone == "left"


def test_others_go_on_without_a_node_that_is_lost(tmp_path):
    with servers(shards=1) as cluster:
        job = start(cluster, tmp_path, "loses_one")
        first, second, lost = job.wait()
    assert lost.code == 3
    assert first.result["digest"] == second.result["digest"]


EXPECTED = [
    "quorum is 0, expected 1 node or more",
    "quorum is 3, but the job has 2 nodes",
    "grace is -1.0 seconds, expected 0 to 86400",
    "late is 'never', expected keep, drop",
    "without one nobody is late",
    "without one nobody is late",
    "quorum does not go with weighted, which needs the sum",
    "nor with fragments, of which nodes could wait for each other's",
    "quorum does not go with codec int8:",
    "quorum does not go with codec sparse:",
    "min_nodes goes with quorum: without one all are needed",
    "min_nodes is 1: no update is made of fewer than a quorum of 2",
    "quorum 1 on rank 0 but quorum 2 on rank 1",
]


def test_what_no_quorum_can_do_is_refused_by_name(tmp_path):
    with servers(shards=1) as cluster:
        for result in start(cluster, tmp_path, "refused", 2).results():
            for error, expected in zip(result, EXPECTED, strict=True):
                assert expected in error
