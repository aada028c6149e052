"""Tests what a training with its optimizer on the shards does when something goes wrong."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import on_nodes
import pytest
from breaking_proxy import proxy
from harness import Job, servers
from ports import free_port

JOBS = Path(__file__).parent / "server_optimizer_jobs.py"
run = functools.partial(on_nodes.run, JOBS)

BROKEN = {
    "backward_after_zero_grad": "1.2 got another gradient before step()",
    "clip": "the gradient of 0.0 has been pushed to the shards",
    "backward_twice": "has been pushed to the shards",
    "change_settings": "settings have changed between backward() and step()",
    "change_weights": "0.1 has been changed since the last step",
    "leave_one_out": "1.2, 0.2, 0.0 got no gradient in this step",
    "scale": "gradients carry a loss scale of 4",
    "share_memory": "the gradient of 0.0 has been pushed to the shards",
    "other_settings": "a learning rate or the like changes",
}

MISUSED = {
    "unfreeze": "0.0, 0.1 requires a gradient, but did not when ServerOptimizer was made",
    "share_parameters": "0.3 belongs to another ServerOptimizer, which was made later",
    "go_back_to_the_former": "no error",
    "sparse": "0.0 got a sparse gradient, which shards do not take",
    "load_head_alone": "0.2 has seen 1 steps, 0.0 has seen 0 steps",
    "in_ddp": "ServerOptimizer takes the place of DistributedDataParallel",
}


@pytest.mark.parametrize("clip", [{}, {"CLIP": "0.1"}])
def test_node_that_leaves_after_the_last_step_has_done_its_part_in_the_weights(clip, tmp_path):
    [result, _] = run("left_early", tmp_path, (1, 1), 0, OVERLAP="1", **clip)
    assert result["servers"] == result["workers"]


@pytest.mark.parametrize("how", MISUSED)
def test_what_would_train_something_else_is_refused_and_ends_the_job(how, tmp_path):
    results = run("misused", tmp_path, (1, 1), 1, MISUSE=how)
    # A worker may hear first that the other one, which was told, has left.
    of_the_other = [re.search(" has left the job| is gone: ", result) for result in results]
    assert not all(of_the_other)
    for result, other in zip(results, of_the_other, strict=True):
        assert other or MISUSED[how] in result


def test_each_of_two_optimizers_has_the_scale_of_its_own_scaler(tmp_path):
    # Weights below 1 are rounded to 2**-24 in each of three steps, by either side, and gradients
    # that follow from them, to some 2**-22, count a tenth: 3 * (2 * 2**-24 + 2**-22 / 10) < 5e-7.
    for result in run("two_scalers", tmp_path, (1, 1), 1):
        assert max(result) < 1e-6


def test_weights_used_before_they_were_here_fail_the_step(tmp_path):
    env = {"BREAK": "use_weights_directly", "OVERLAP": "1"}
    first, second = run("broken", tmp_path, (1, 1), 0, **env)
    assert "was used before its new weights were here" in first
    assert "Error: " in second


@pytest.mark.parametrize(
    ("how", "env"),
    [
        ("change_weights", {"OVERLAP": "1"}),
        ("replace_weights", {"OVERLAP": "1"}),
        ("change_weights_late", {}),
    ],
)
def test_change_that_weights_on_their_way_would_overwrite_ends_the_job(how, env, tmp_path):
    first, second = run("broken", tmp_path, (1, 1), 0, BREAK=how, **env)
    assert "0.1 has been changed while its new weights were on their way" in first
    assert "Error: " in second


@pytest.mark.parametrize("how", BROKEN)
def test_script_at_fault_is_told_why_and_nobody_waits_for_it(how, tmp_path):
    first, second = run("broken", tmp_path, (1, 1), 0, BREAK=how)
    assert "RuntimeError: " in first
    assert BROKEN[how] in first
    assert "Error: " in second


@pytest.mark.parametrize("clip", [{}, {"CLIP": "0.5"}], ids=["whole", "clipped"])
def test_restarted_shard_has_lost_its_weights_and_says_so_to_all(clip, tmp_path):
    with servers(shards=1) as cluster:
        cluster.add_aggregator(listen=f"127.0.0.1:{free_port()}")
        sidecars = [cluster.add_sidecar().address for _ in range(2)]
        job = Job("trained_on_and_on", cluster, tmp_path, sidecar_of=sidecars, env=clip, jobs=JOBS)
        job.await_rounds(50)
        cluster.add_aggregator(listen=cluster.kill_aggregator(1))
        for result in job.results():
            assert "RuntimeError: thalweg: " in result
            assert "was restarted and has lost the weights that it kept; to go back to" in result


def test_only_worker_of_a_node_that_is_killed_is_named_to_the_others(tmp_path):
    with servers(shards=1) as cluster:
        sidecars = [cluster.add_sidecar().address for _ in range(2)]
        job = Job("trained_on_and_on", cluster, tmp_path, sidecar_of=sidecars, jobs=JOBS)
        job.await_rounds(50)
        job.workers[1].process.kill()
        first, _ = job.wait()
        assert "RuntimeError: thalweg: " in first.result
        assert re.search(r"rank 1 on \S+ is gone: ", first.result)


def test_worker_that_pushes_nothing_is_named_within_the_process_groups_timeout(tmp_path):
    first, second = run("absent", tmp_path, (1, 1), 0, THALWEG_STEP_TIMEOUT="auto")
    waited = re.search(r"waited ([\d.]+) s for node 1 ", first)
    assert waited, first
    assert float(waited[1]) <= 20
    assert second == "absent"


def test_weights_that_do_not_fit_a_shards_memory_are_refused_with_the_number(tmp_path):
    with servers() as cluster:
        cluster.add_aggregator("--memory-limit", "64M")
        sidecars = [cluster.add_sidecar().address for _ in range(2)]
        job = Job("too_large", cluster, tmp_path, sidecar_of=sidecars, jobs=JOBS)
        results = job.results()
    # A worker may hear first that the other one, which has heard it, has ended.
    assert all(re.search("RuntimeError: ", result) for result in results), results
    needs = [re.search(r"the job needs (\d+) bytes of memory, but 67108864", r) for r in results]
    assert any(needs), results
    assert all(int(one[1]) > 3 * 4 * 8_000_000 for one in needs if one)


@pytest.mark.parametrize("clip", [{}, {"CLIP": "0.5"}], ids=["whole", "clipped"])
def test_connections_that_break_are_pauses_and_change_no_bit(clip, tmp_path):
    over = tmp_path / "over"
    env = {"OPTIMIZER": "adamw", "UNTIL": str(over)} | clip
    with servers(shards=1) as cluster, proxy(cluster.aggregators[0].address) as between:
        sidecars = [cluster.add_sidecar(aggregators=between.address).address for _ in range(2)]
        job = Job("trained", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=JOBS)
        job.await_rounds(50)
        between.reset_often(job, 20)
        over.touch()
        results = job.results()
    assert len({result["servers"] for result in results}) == 1
    for result in results:
        assert result["servers"] == result["workers"] != result["before"]
