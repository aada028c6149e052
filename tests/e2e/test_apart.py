"""Tests nodes that do not wait for each other, by the history of what they push and get."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import history
import numpy as np
import pytest
import recorded
from apart_jobs import OPTIONS
from breaking_proxy import proxy
from harness import Job, Servers, metric, servers
from history import Update, Worker
from recorded import traced

JOBS = Path(__file__).parent / "apart_jobs.py"


def start(cluster: Servers, tmp_path: Path, name: str, world: int = 2, **env: str) -> Job:
    return recorded.start(JOBS, cluster, tmp_path, name, world, **env)


def checked(tmp_path: Path, world: int, optimizer: str = "sgd", **how: int) -> Any:
    """Returns the updates by chunk, in which nothing is wrong."""
    problems, updates = history.check_records(
        *(tmp_path / "records", tmp_path / "traces", world, optimizer, OPTIONS[optimizer]), **how
    )
    assert not problems, problems[:5]
    assert len(updates) >= 3  # several chunks
    return updates


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("shards", [1, 2])
def test_slow_node_holds_up_nobody_and_weights_are_the_fold_of_all_pushes(
    optimizer, shards, tmp_path
):
    with traced(tmp_path, shards) as cluster:
        env = {"MODE": "async", "LAG": "10", "STEPS": "40", "OPTIMIZER": optimizer}
        results = start(cluster, tmp_path, "slow_one", **env).results()
        stale = [
            metric(s, "thalweg_shard_stale_updates_total", 'node="1"') for s in cluster.aggregators
        ]
    assert len({result["digest"] for result in results}) == 1
    updates = checked(tmp_path, 2, optimizer)
    for each in updates.values():
        assert len(each) == 40 + 4
    # The slow one's last gradient comes after 30 steps of the fast one, each of which one of its
    # gradients lacks; metrics say whose they are.
    assert sum(stale) >= 30 * len(updates)


def test_stale_push_counts_less_where_rates_are_delay_aware(tmp_path):
    with traced(tmp_path, 1) as cluster:
        env = {"MODE": "async", "LAG": "10", "STEPS": "40", "DELAY_AWARE": "1"}
        start(cluster, tmp_path, "slow_one", **env).results()
    updates = checked(tmp_path, 2, delay_aware=True)
    # Its four gradients lack some thirty steps between them: one of them lacks eight.
    assert max(history.staleness(next(iter(updates.values())))) >= 8
    problems, _ = history.check_records(
        *(tmp_path / "records", tmp_path / "traces", 2, "sgd", OPTIONS["sgd"])
    )
    assert problems  # it is not what the same rate for all gives


@pytest.mark.parametrize("staleness", [1, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_gradient_lacks_more_steps_than_it_may(optimizer, staleness, tmp_path):
    with traced(tmp_path, 2) as cluster:
        env = {"MODE": "stale", "STALENESS": str(staleness), "LAG": str(staleness)}
        results = start(cluster, tmp_path, "slow_one", OPTIMIZER=optimizer, **env).results()
    assert len({result["digest"] for result in results}) == 1
    updates = checked(tmp_path, 2, optimizer, ahead=staleness)
    for each in updates.values():
        assert [(update.version, update.round) for update in each] == [
            (step, step) for step in range(1, 31)
        ]
    # The fast one has been as far ahead as it may: it would find less staleness too much.
    problems, _ = history.check_records(
        *(tmp_path / "records", tmp_path / "traces", 2, optimizer, OPTIONS[optimizer]),
        ahead=staleness - 1,
    )
    assert any(f"was {staleness} steps ahead" in each for each in problems)


@pytest.mark.parametrize("mode", ["async", "stale"])
def test_shards_that_nodes_host_have_each_push_as_it_was_made(mode, tmp_path):
    with traced(tmp_path, 0, hosts=2) as cluster:
        env = {"MODE": mode, "LAG": "4"} | ({"STALENESS": "4"} if mode == "stale" else {})
        start(cluster, tmp_path, "slow_one", **env).results()
    checked(tmp_path, 2, **({"ahead": 4} if mode == "stale" else {}))


def test_staleness_of_none_has_the_bits_of_synchronous_steps(tmp_path):
    digests = set()
    for mode in ({"MODE": "sync"}, {"MODE": "stale", "STALENESS": "0"}):
        folder = tmp_path / mode["MODE"]
        folder.mkdir()
        with servers(shards=2) as cluster:
            results = start(cluster, folder, "in_step", OPTIMIZER="adamw", **mode).results()
        digests |= {result["digest"] for result in results}
    assert len(digests) == 1


@pytest.mark.parametrize("mode", [{"MODE": "async"}, {"MODE": "stale", "STALENESS": "3"}])
def test_history_is_right_where_connections_break(mode, tmp_path):
    how = {"ahead": 3} if "STALENESS" in mode else {}
    with traced(tmp_path, 1) as cluster, proxy(cluster.aggregators[0].address) as between:
        for _ in range(2):
            cluster.add_sidecar(aggregators=between.address)
        over = tmp_path / "over"
        job = start(cluster, tmp_path, "in_step", UNTIL=str(over), **mode)
        job.await_rounds(50)
        between.reset_often(job, 10)
        over.touch()
        results = job.results()
    assert len({result["digest"] for result in results}) == 1
    checked(tmp_path, 2, **how)


@pytest.mark.parametrize("mode", [{"MODE": "async"}, {"MODE": "stale", "STALENESS": "3"}])
def test_killed_worker_is_named_and_what_it_has_pushed_counts_once(mode, tmp_path):
    how = {"ahead": 3} if "STALENESS" in mode else {}
    with traced(tmp_path, 1) as cluster:
        job = start(cluster, tmp_path, "on_and_on", **mode)
        job.await_rounds(100)
        job.workers[1].process.kill()
        first, _ = job.wait()
        assert "rank 1 on " in first.result
    checked(tmp_path, 2, **how)


def test_three_nodes_push_as_fast_as_they_can_and_each_push_counts_once(tmp_path):
    with traced(tmp_path, 2) as cluster:
        results = start(cluster, tmp_path, "in_step", 3, MODE="async", STEPS="60").results()
    assert len({result["digest"] for result in results}) == 1
    for each in checked(tmp_path, 3).values():
        assert len(each) == 180


@pytest.mark.parametrize("mode", [{"MODE": "async"}, {"MODE": "stale", "STALENESS": "2"}])
def test_weights_changed_by_hand_and_checkpoints_reach_all_nodes(mode, tmp_path):
    with servers(shards=2) as cluster:
        results = start(cluster, tmp_path, "goes_on", STEPS="5", **mode).results()
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["bias"] > 0.5


EXPECTED = [
    "mode is 'bulk', expected sync, stale, async",
    "mode is 'stale' and staleness None",
    "mode is 'async' and staleness 3",
    "staleness is 65, expected 0 to 64",
    'delay_aware goes with mode="async"',
    'max_grad_norm needs all nodes in the same step: it goes with mode="sync"',
    'loss_scaling needs all nodes in the same step: it goes with mode="sync"',
    'overlap needs all nodes in the same step: it goes with mode="sync"',
    'lamb needs all nodes in the same step: it goes with mode="sync"',
    "snapshots (snapshot_every=, THALWEG_SNAPSHOT_EVERY) need all nodes in the same step",
    "optimizers' arguments differ: staleness 1 on rank 0 but",
]


def test_what_needs_all_nodes_in_one_step_is_refused_by_name(tmp_path):
    with servers(shards=1) as cluster:
        for result in start(cluster, tmp_path, "refused").results():
            for error, expected in zip(result, EXPECTED, strict=True):
                assert expected in error


def _made(ahead: int | None) -> tuple[np.ndarray, list[Worker], list[Update]]:
    """Returns a right history of two nodes with three steps each."""
    begin = np.arange(4, dtype=np.float32)
    workers = [
        Worker({s: np.full(4, node + s, np.float32) for s in (1, 2, 3)}, {}) for node in range(2)
    ]
    order = [(0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3)]
    if ahead is not None:
        order = [(-1, step) for step in (1, 2, 3)]
    updates = [Update(number, step, node, 4) for number, (node, step) in enumerate(order, start=1)]
    fold = history.Sgd(begin, 0.1, 0.9)
    for update in updates:
        nodes = range(2) if update.node < 0 else [update.node]
        gradients = [workers[node].pushed[update.round] for node in nodes]
        fold.add(sum(gradients) * np.float32(1 / len(gradients)))
        for node in nodes:
            workers[node].got[update.round] = fold.weights
    return begin, workers, updates


def _problems(begin: np.ndarray, workers: Any, updates: Any, ahead: int | None) -> list[str]:
    return history.check(begin, workers, updates, history.Sgd(begin, 0.1, 0.9), ahead=ahead)


def test_checker_finds_what_is_wrong_with_histories():
    for ahead in (None, 1):
        assert not _problems(*_made(ahead), ahead)

    begin, workers, updates = _made(None)
    twice = [*updates, dataclasses.replace(updates[3], version=7)]
    assert "step 3 of node 0 is applied twice" in _problems(begin, workers, twice, None)
    assert "step 3 of node 1 is not applied" in _problems(begin, workers, updates[:-1], None)
    exchanged = [
        dataclasses.replace(u, version={2: 3, 3: 2}.get(u.version, u.version)) for u in updates
    ]
    assert any("that no fold" in each for each in _problems(begin, workers, exchanged, None))
    assert "update 2 makes version 3" in _problems(begin, workers, [updates[0], *updates[2:]], None)

    begin, workers, updates = _made(1)
    workers[0].got[3] = workers[0].got[1]
    assert "node 0 got weights in step 3 that no fold of pushes has" in _problems(
        begin, workers, updates, 1
    )
    workers[0].got[2] = workers[0].got[1]
    assert "node 0 was 2 steps ahead in step 3" in _problems(begin, workers, updates, 1)
