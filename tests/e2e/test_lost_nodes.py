"""Tests that training goes on with the nodes that are left when one is lost."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import lost_node_jobs
import pytest
import torch
from harness import Job, metric, servers

JOBS = Path(lost_node_jobs.__file__)
NODES, LOST = 3, 1
STEPS_BEFORE = 40


def begin(cluster, tmp_path, nodes_left, env=None):
    """Starts a job of as many workers as nodes, and waits until it has done some steps."""
    sidecars = [cluster.add_sidecar().address for _ in range(NODES)]
    variables = {"NODES_LEFT": str(nodes_left), "THALWEG_LOSS_GRACE": "4", **(env or {})}
    variables["SHARDS"] = ",".join(shard.http for shard in cluster.aggregators)
    job = Job("train", cluster, tmp_path, sidecar_of=sidecars, env=variables, jobs=JOBS)
    name = "thalweg_sidecar_buckets_total"
    job.until("some steps", lambda: metric(cluster.sidecars[0], name) >= STEPS_BEFORE)
    return job


def lose(cluster, job, what, node=LOST):
    """Kills a node's worker, and with it its sidecar if it is the whole node."""
    if what == "node":
        cluster.sidecars[node].process.kill()
    job.workers[node].process.kill()
    if what == "node":
        cluster.sidecars[node].process.wait()
        for file in cluster.folder.glob(f"s{node}.sock*"):
            file.unlink()


def repeat(workers):
    """The weights after a training in one process whose steps have means over so many workers."""
    model = lost_node_jobs.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lost_node_jobs.RATE)
    batches = [lost_node_jobs.batches(rank) for rank in range(NODES)]
    for count in workers:
        drawn = [lost_node_jobs.draw(random) for random in batches]
        present = [x for rank, x in enumerate(drawn) if count == NODES or rank != LOST]
        optimizer.zero_grad()
        for x in present:
            (model(x).square().mean() / len(present)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("what", ["worker", "node"])
def test_gradients_are_the_mean_over_the_nodes_that_are_left(what, tmp_path):
    with servers(shards=2) as cluster:
        job = begin(cluster, tmp_path, NODES - 1)
        lose(cluster, job, what)
        left = [worker for worker in job.wait() if worker.rank != LOST]
        for worker in left:
            assert worker.code == 0, job.output
        lost = [metric(shard, "thalweg_shard_lost_nodes_total") for shard in cluster.aggregators]
    results = [worker.result for worker in left]
    print(f"{what} lost: longest step {max(result['longest'] for result in results):.2f} s")
    assert lost == [1, 1]
    assert results[0]["weights"] == results[1]["weights"]
    workers = results[0]["workers"]
    assert workers == sorted(workers, reverse=True)
    assert (workers[0], workers[-1]) == (NODES, NODES - 1)
    for result in results:
        assert result["told"] == [[NODES - 1, workers.index(NODES - 1)]]
        [lost_node] = result["lost"]
        assert lost_node.startswith(f"node {LOST} ("), lost_node
        assert f"goes on without {lost_node}" in job.output
    assert f"means over {NODES - 1} of {NODES} workers from now on" in job.output
    # Each step rounds each weight a few times, of at most 1.
    tolerance = len(workers) * 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        torch.tensor(results[0]["weights"]), repeat(workers), rtol=0, atol=tolerance
    )


def test_nodes_that_keep_residuals_in_files_go_on_when_the_machine_of_rank_0_falls_silent(tmp_path):
    env = {"CODEC": "int8", "THALWEG_RESIDUALS": str(tmp_path / "residuals")}
    with servers(shards=1) as cluster:
        job = begin(cluster, tmp_path, NODES - 1, env)
        for process in (cluster.sidecars[0].process, job.workers[0].process):
            os.kill(process.pid, signal.SIGSTOP)
        left = job.workers[1:]
        try:
            job.until("the others end", lambda: all(w.process.poll() is not None for w in left))
        finally:
            lose(cluster, job, "node", 0)
        job.wait()
    for worker in left:
        assert worker.code == 0, job.output
        [said] = [line for line in worker.output.splitlines() if "does not keep what it" in line]
        assert "the job goes on without node 0 (" in said
    assert left[0].result["weights"] == left[1].result["weights"]


def test_job_that_has_too_few_nodes_left_fails_with_the_reason(tmp_path):
    with servers(shards=1) as cluster:
        job = begin(cluster, tmp_path, NODES)
        lose(cluster, job, "worker")
        for worker in job.wait():
            assert worker.code != 0
        assert re.search(rf"rank {LOST} .*is gone", job.output), job.output


def test_nodes_that_are_to_host_shards_cannot_be_lost(tmp_path):
    with servers(shards=1) as cluster:
        sidecars = [cluster.add_sidecar().address for _ in range(NODES)]
        env = {"NODES_LEFT": "2", "THALWEG_LOCAL_SHARDS": "1"}
        job = Job("train", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=JOBS)
        for worker in job.wait():
            assert worker.code != 0
        assert "(THALWEG_MIN_NODES): leave one of them out" in job.output


def test_modules_that_use_the_process_group_in_each_step_are_refused_or_warned_about(tmp_path):
    env = {"THALWEG_CODEC": "fp32", "THALWEG_MIN_NODES": "1"}
    with servers(nodes=2, shards=1) as cluster:
        sidecars = [sidecar.address for sidecar in cluster.sidecars]
        job = Job("modules", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=JOBS)
        results = job.results()
    for result in results:
        assert not result["taken"]
        assert "(THALWEG_MIN_NODES), but with find_unused_parameters=True" in result["problem"]
    norm = results[0]["jobs"][1]
    said = [worker.output.splitlines() for worker in job.workers]
    stays = [[line for line in lines if "stays with torch's allreduce" in line] for lines in said]
    assert [len(lines) for lines in stays] == [1, 0]
    assert "find_unused_parameters=True" in stays[0][0]
    warned = [[line for line in lines if "broadcast_buffers=False" in line] for lines in said]
    assert [len(lines) for lines in warned] == [1, 0]
    assert f"job {norm}: " in warned[0][0]
