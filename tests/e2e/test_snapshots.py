"""Tests that a training goes on from a snapshot when aggregators lose what they keep."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
import snapshot_jobs
from harness import Job, metric, servers
from ports import free_port

JOBS = Path(snapshot_jobs.__file__)
EVERY = 5
PATIENCE = 300.0


class Cluster:
    """Aggregators with folders for snapshots, two nodes, and a job that trains on them."""

    def __init__(
        self,
        running,
        tmp_path: Path,
        name="trained_through_losses",
        shards=2,
        *,
        afresh=False,
        **env,
    ):
        """Without STEPS the training goes on until results()."""
        self.running = running
        self.over = tmp_path / "over"
        self.folders = [tmp_path / f"state{number}" for number in range(shards)]
        for folder in self.folders:
            place = f"127.0.0.1:{free_port()}"  # where another one may take its place
            running.add_aggregator("--state-dir", str(folder), listen=place)
        sidecars = [running.add_sidecar(env={"THALWEG_RECONNECT": "2"}).address for _ in range(2)]
        self.progress = tmp_path / "progress"
        variables = {"EVERY": str(EVERY), "PROGRESS": str(self.progress)} | env
        if "STEPS" not in env:
            variables["UNTIL"] = str(self.over)
        how = {"env": variables, "jobs": JOBS, "afresh": afresh}
        self.job = Job(name, running, tmp_path, sidecar_of=sidecars, **how)

    def told(self) -> tuple[int, int]:
        """The steps that the first worker has tried, and how often it has gone back."""
        if not self.progress.exists():
            return 0, 0
        tried, rolled_back = map(int, self.progress.read_text(encoding="ascii").split())
        return tried, rolled_back

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        self.job.until(what, holds, every=0.001)

    def results(self):
        self.over.touch()
        return self.job.results(PATIENCE)  # the workers compute what weights they expect

    def await_steps(self, more: int) -> None:
        last = self.told()[0] + more
        self.until(f"{more} more steps", lambda: self.told()[0] >= last)

    def is_writing(self, number: int) -> bool:
        return any(self.folders[number].glob("*/*.unfinished"))

    def kill(self, *numbers: int) -> None:
        """Kills these aggregators at once."""
        self.killed = {number: self.running.aggregators[number] for number in numbers}
        for aggregator in self.killed.values():
            aggregator.process.kill()
        for aggregator in self.killed.values():
            aggregator.process.wait()

    def restart(self) -> None:
        """Starts those that were killed again, at the same addresses."""
        for number, before in self.killed.items():
            flags = ("--state-dir", str(self.folders[number]))
            self.running.add_aggregator(*flags, listen=before.address)
            self.running.aggregators[number] = self.running.aggregators.pop()

    def files(self, number: int) -> list[Path]:
        return sorted(self.folders[number].glob("*/*.snapshot"), key=_order)


def _order(path: Path) -> tuple[int, int]:
    branch, step = map(int, path.stem.split("-"))
    return branch, step


def assert_exact(results, losses: int) -> None:
    """The workers went back together, to weights of a training without losses, and ended so."""
    first, *others = results
    assert all(other["rolled back"] == first["rolled back"] for other in others)
    assert len(first["rolled back"]) == losses
    for result in results:
        assert result["wrong"] == []
        assert result["weights"] == result["expected"]


def lose_at_random(tmp_path: Path, kills: int, **env: str) -> None:
    """Kills one or all aggregators `kills` times, at random or while they write a snapshot."""
    seed = int(os.environ.get("SEED") or secrets.randbits(32))
    print(f"SEED={seed}")
    chance = random.Random(seed)
    with servers() as running:
        cluster = Cluster(running, tmp_path, **env)
        cluster.until("snapshots", lambda: all(cluster.files(number) for number in (0, 1)))
        for kill in range(1, kills + 1):
            cluster.await_steps(chance.randrange(3 * EVERY))
            victims = chance.choice([(0,), (1,), (0, 1)])
            if chance.random() < 0.5:
                cluster.until("another snapshot", lambda: cluster.is_writing(victims[0]))  # noqa: B023
            cluster.kill(*victims)
            cluster.restart()
            cluster.until("the way back", lambda: cluster.told()[1] == kill)  # noqa: B023
        assert_exact(cluster.results(), kills)


@pytest.mark.parametrize("overlap", [{}, {"OVERLAP": "1"}], ids=["waiting", "overlapping"])
def test_killed_aggregators_cost_no_more_than_the_steps_since_their_snapshot(overlap, tmp_path):
    lose_at_random(tmp_path, 3, **overlap)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_fifty_random_kills_never_leave_a_torn_state(tmp_path):
    lose_at_random(tmp_path, 50)


def test_damaged_snapshot_is_named_and_the_one_before_it_is_used(tmp_path, capfd):
    with servers() as running:
        cluster = Cluster(running, tmp_path)

        def common() -> list[str]:
            names = [{path.name for path in cluster.files(number)} for number in (0, 1)]
            return sorted(names[0] & names[1], key=lambda name: _order(Path(name)))

        cluster.until("two snapshots", lambda: len(common()) >= 2)
        cluster.kill(0, 1)
        before, damaged = common()[-2:]
        path = next(cluster.folders[1].glob(f"*/{damaged}"))
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        cluster.restart()
        results = cluster.results()
    assert_exact(results, 1)
    assert results[0]["rolled back"] == [_order(Path(before))[1]]
    assert f"{path} is cut off" in capfd.readouterr().err


def test_full_disk_fails_the_snapshot_and_not_the_job(tmp_path):
    with servers() as running:
        cluster = Cluster(running, tmp_path)
        cluster.until("a snapshot", lambda: bool(cluster.files(1)))
        first = cluster.files(1)[0]

        def fails() -> bool:
            now = cluster.told()[0] // EVERY * EVERY
            for step in range(now + EVERY, now + 10 * EVERY, EVERY):
                with contextlib.suppress(FileExistsError):
                    path = first.with_name(f"{_order(first)[0]}-{step}.snapshot.unfinished")
                    path.symlink_to("/dev/full")
            return failed() > 0

        def failed() -> float:
            label = 'outcome="resource_exhausted"'
            return metric(running.aggregators[1], "thalweg_shard_snapshots_total", label)

        cluster.until("a snapshot that fails", fails)
        assert_exact(cluster.results(), 0)


def test_shard_without_a_folder_is_named_when_the_optimizer_is_made(tmp_path):
    with servers(shards=1) as running:
        running.add_aggregator("--state-dir", str(tmp_path / "state"))
        sidecars = [running.add_sidecar().address for _ in range(2)]
        job = Job("trained_on_and_on", running, tmp_path, sidecar_of=sidecars, jobs=JOBS)
        for result in job.results():
            assert "RuntimeError: thalweg: " in result
            assert "aggregator shard 0 keeps no snapshots: start it with --state-dir" in result


def test_shard_that_does_not_come_back_ends_the_job_with_its_name(tmp_path):
    env = {"THALWEG_TIMEOUT": "10", "THALWEG_RECONNECT": "2"}
    with servers() as running:
        cluster = Cluster(running, tmp_path, "trained_on_and_on", **env)
        cluster.await_steps(2 * EVERY)
        cluster.kill(1)
        results = cluster.job.results()
    for result in results:
        assert re.search("RuntimeError: .*could not go back to a snapshot: ", result), result


def test_script_without_a_handler_is_told_that_it_went_back(tmp_path):
    with servers() as running:
        cluster = Cluster(running, tmp_path, "trained_on_and_on")
        cluster.await_steps(2 * EVERY)
        cluster.kill(0)
        cluster.restart()
        for result in cluster.job.results():
            assert result.startswith("RolledBack: thalweg: shards had lost their weights: ")


@pytest.mark.parametrize("end", ["well", "raised", "interrupted", "closed by its fault"])
def test_snapshots_stay_where_all_workers_fail_and_go_where_they_end_well(end, tmp_path):
    with servers() as running:
        env = {"STEPS": str(4 * EVERY), "END": end}
        cluster = Cluster(running, tmp_path, "trained_to_an_end", afresh=True, **env)
        codes = [worker.code for worker in cluster.job.wait()]
    left = [path for path in tmp_path.glob("state*/*/*.snapshot") if ".over-" not in str(path)]
    if end == "well":
        assert (codes, left) == ([0, 0], [])
    else:
        assert 0 not in codes
        assert {path.parent.parent for path in left} == set(cluster.folders)


def lost_training(tmp_path: Path, shards: int, **env: str) -> Cluster:
    """Trains on so many shards until all workers are killed; returns what is left."""
    tmp_path.mkdir()
    with servers() as running:
        cluster = Cluster(running, tmp_path, "trained_on_and_on", shards, **env)
        cluster.until(
            "two snapshots", lambda: all(len(cluster.files(n)) >= 2 for n in range(shards))
        )
        for worker in cluster.job.workers:
            worker.process.kill()
        cluster.job.wait()
    return cluster


def test_training_goes_on_from_snapshots_with_other_numbers_of_shards(tmp_path):
    two = lost_training(tmp_path / "two", 2)
    before = {"FOLDERS": ":".join(map(str, two.folders))}
    three = lost_training(tmp_path / "three", 3, **before)
    steps = _order(three.files(0)[-1])[1] + 50
    after = {"FOLDERS": ":".join(map(str, three.folders)), "STEPS": str(steps)}
    (tmp_path / "one").mkdir()
    with servers() as running:
        results = Cluster(running, tmp_path / "one", shards=1, **after).job.results()
    assert_exact(results, 0)
    for result in results:
        assert result["updates"] == steps
        assert result["loaded"] % EVERY == 0
        assert steps > result["loaded"] >= EVERY


def test_snapshot_that_cannot_be_loaded_is_refused_on_all_workers_with_the_reason(tmp_path):
    left = lost_training(tmp_path / "left", 2)
    part = {"FOLDERS": str(left.folders[1])}
    (tmp_path / "part").mkdir()
    with servers() as running:
        cluster = Cluster(running, tmp_path / "part", "trained_on_and_on", **part)
        for result in cluster.job.results():
            assert "no snapshot that all shards of a job have written" in result
