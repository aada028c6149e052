"""Tests scripts that do not mention Thalweg, and do local updates: THALWEG_PS_MODE=local."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Job, servers

SCRIPT = Path(__file__).parent / "local_script.py"
LOCAL = {"THALWEG_PS_MODE": "local", "THALWEG_PS_EVERY": "4"}


def start(mode: str, tmp_path: Path, cluster, env) -> Job:
    sockets = [cluster.add_sidecar("--shard-listen", "127.0.0.1:0").address for _ in range(2)]
    return Job(mode, cluster, tmp_path, sidecar_of=sockets, env=env, jobs=SCRIPT)


def run(mode: str, tmp_path: Path, env=LOCAL):
    """Returns the workers' results, and rank 0's output."""
    tmp_path.mkdir(exist_ok=True)
    with servers() as cluster:
        job = start(mode, tmp_path, cluster, env)
        return job.results(), job.workers[0].output


def common(results) -> list[int]:
    """Returns the numbers of the steps after which both workers have the same weights."""
    pairs = zip(*(result["digests"] for result in results), strict=True)
    return [number for number, (one, other) in enumerate(pairs, start=1) if one == other]


@pytest.mark.parametrize(
    "mode", ["sgd_compiled", "adagrad", "sgd_accumulate_clip", "sgd_accumulate_byhand"]
)
@pytest.mark.parametrize("codec", ["fp32", "int8:start=0"])
def test_workers_step_alone_and_have_common_weights_after_each_exchange(mode, codec, tmp_path):
    results, output = run(mode, tmp_path, LOCAL | {"THALWEG_CODEC": codec})
    assert common(results) == [1, 4, 8, 12]
    name = "Adagrad" if "adagrad" in mode else "SGD"
    said = f"from the second step on, {name} steps on each worker alone"
    assert output.count(said) == 1
    assert "were not exchanged" not in output
    assert results[0]["lr"] == pytest.approx([0.1 * 0.8**4])


def test_plain_script_averages_in_every_step(tmp_path):
    results, output = run("sgd", tmp_path, {})
    assert common(results) == list(range(1, 13))
    assert "thalweg" not in output


def test_steps_that_were_not_exchanged_in_the_end_are_said_once(tmp_path):
    results, output = run("sgd_rest", tmp_path)
    assert common(results) == [1, 4, 8]
    assert output.count("the last 3 steps were not exchanged") == 1
    assert "let the number of steps, here 11, be a multiple of 4" in output


def test_optimizer_that_is_made_anew_goes_on_with_local_updates(tmp_path):
    results, output = run("sgd_anew", tmp_path)
    assert common(results) == [1, 4, 8, 12]
    assert output.count("SGD goes on with the local updates of SGD") == 1
    assert "in spite of it" not in output


def test_training_that_resumes_with_torchs_checkpoints_does_local_updates(tmp_path):
    results, output = run("sgd_resumed", tmp_path)
    assert common(results) == [1, 4, 8, 12]
    assert output.count("from the second step on, SGD steps on each worker alone") == 1


def test_module_that_is_built_anew_over_the_same_parameters_does_local_updates(tmp_path):
    results, output = run("sgd_phases", tmp_path)
    # Both begin with a step of torch's own.
    assert common(results) == [1, 4, 7, 10]
    assert output.count("from the second step on, SGD steps on each worker alone") == 2
    assert "in spite of it" not in output


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (
            "sgd_anewhalf",
            "it has 2 trainable parameters, and its module 4, of which 2 are the same",
        ),
        ("sgd_anewscaled", "a GradScaler steps it, which leaves steps out on one worker alone"),
    ],
)
def test_another_optimizer_of_the_module_that_does_not_fit_ends_the_job(mode, why, tmp_path):
    with servers() as cluster:
        job = start(mode, tmp_path, cluster, LOCAL)
        for worker in job.wait():
            assert worker.code != 0
            assert f"cannot go on with the local updates of SGD: {why}" in worker.output
            assert "THALWEG_PS_MODE asks for this optimizer" in worker.output


UNFIT = {
    "sgd_part": "it has 2 trainable parameters, and its module 4, of which 2 are the same",
    "sgd_two": "it has 2 trainable parameters, and its module 4, of which 2 are the same",
    "sgd_hook": "the script's communication hook allreduce_hook gets its gradients",
    "sgd_scaler": "a GradScaler steps it, which leaves steps out on one worker alone",
}


@pytest.mark.parametrize("mode", UNFIT)
def test_optimizer_that_does_not_fit_averages_in_every_step_and_why_is_said(mode, tmp_path):
    plain, _ = run(mode, tmp_path / "plain", {})
    results, output = run(mode, tmp_path / "local")
    assert [one["digests"] for one in results] == [one["digests"] for one in plain]
    said = f"does no local updates in spite of it: {UNFIT[mode]}"
    assert output.count(said) == (2 if "two" in mode else 1)


REFUSED = {
    "join": ("sgd_join", LOCAL, ").join() lets workers do different numbers of steps"),
    "no interval": ("sgd", LOCAL | {"THALWEG_PS_EVERY": "often"}, "THALWEG_PS_EVERY is 'often'"),
    "unknown": ("sgd", LOCAL | {"THALWEG_PS_MODE": "stale"}, "THALWEG_PS_MODE is 'stale'"),
    "both": ("sgd", LOCAL | {"THALWEG_PS": "auto"}, "THALWEG_PS=auto lets shards do every step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_an_error_that_names_it(case, tmp_path):
    mode, env, said = REFUSED[case]
    with servers() as cluster:
        job = start(mode, tmp_path, cluster, env)
        for worker in job.wait():
            assert worker.code != 0
            assert said in worker.output
