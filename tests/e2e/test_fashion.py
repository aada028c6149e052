"""Tests the examples of optimizers on shards, on images of Fashion-MNIST."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from harness import DEADLINE, Job, environment, fork, servers
from ports import free_port

JOBS = Path(__file__).parent / "fashion_jobs.py"


def train(tmp_path: Path, example: str, args: str) -> dict:
    """Returns what the example writes, with one worker on each of two nodes."""
    tmp_path.mkdir(exist_ok=True)
    with servers() as cluster:
        sidecars = [cluster.add_sidecar("--shard-listen", "127.0.0.1:0").address for _ in range(2)]
        job = Job(example, cluster, tmp_path, sidecar_of=sidecars, env={"ARGS": args}, jobs=JOBS)
        assert all(worker.code == 0 for worker in job.wait(600)), job.output
        return json.loads(job.workers[0].out.read_text())


def test_example_learns_and_leaves_the_same_weights_on_all_workers(tmp_path):
    args = "--images 4000 --epochs 1 --batch 32 --every 10 --fragments 2 --delay 2"
    result = train(tmp_path, "fashion_local", args)
    assert result["replicas_identical"]
    assert result["accuracy"] > 0.5  # ten classes


def test_example_learns_by_an_optimizer_on_the_shards_in_few_bytes(tmp_path):
    args = "--images 4000 --epochs 1 --batch 32 --ps --codec int8 --pull int8"
    result = train(tmp_path, "fashion_mnist", args)
    assert result["replicas_identical"]
    assert result["accuracy"] > 0.5  # ten classes
    assert result["stats"]["wire_bytes_sent"] < 0.3 * result["stats"]["raw_bytes"]


def test_elastic_example_learns(tmp_path):
    log = tmp_path / "log.json"
    with servers() as cluster:
        env = environment(cluster.folder) | {
            "THALWEG_ELASTIC": f"127.0.0.1:{free_port()}",
            "ARGS": "--images 4000 --epochs 1 --batch 32",
        }
        output = tmp_path / "output.txt"
        worker = fork([str(JOBS), "fashion_elastic", str(log)], env, output)
        assert worker.wait(DEADLINE) == 0, output.read_text()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["step"] for entry in entries if "step" in entry] == list(range(1, 126))
    assert entries[-2]["accuracy"] > 0.5  # ten classes
    assert entries[-1] == {"replicas_identical": True}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_exchange_every_50_steps_costs_less_than_half_a_point_of_accuracy(tmp_path):
    ours, theirs = [], []
    for seed in (1, 2, 3):
        args = f"--seed {seed}"
        ours.append(train(tmp_path, "fashion_local", f"{args} --every 50")["accuracy"])
        theirs.append(train(tmp_path, "fashion_mnist", args)["accuracy"])
    print(f"accuracy {ours} with local updates, {theirs} with DistributedDataParallel")
    assert mean(ours) > mean(theirs) - 0.005
