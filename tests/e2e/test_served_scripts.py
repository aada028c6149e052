"""Tests scripts that do not mention Thalweg, and whose optimizer THALWEG_PS moves to the shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import Job, metric, servers

SCRIPT = Path(__file__).parent / "served_script.py"

pytestmark = pytest.mark.timeout(300)  # most tests train twice


def run(mode: str, tmp_path: Path, *, nodes: int = 2, **env: str):
    """Returns the workers' results, rank 0's output, and the rounds of the first sidecar."""
    with servers() as cluster:
        for _ in range(nodes):
            cluster.add_sidecar("--shard-listen", "127.0.0.1:0")
        sockets = [server.address for server in cluster.sidecars] * (2 // nodes)
        folder = tmp_path / ("served" if "THALWEG_PS" in env else "plain")
        folder.mkdir()
        job = Job(mode, cluster, folder, sidecar_of=sockets, env=env, jobs=SCRIPT)
        results = job.results()
        rounds = metric(cluster.sidecars[0], "thalweg_sidecar_steps_total")
        return results, job.workers[0].output, rounds


@pytest.mark.parametrize(
    "mode",
    [
        "sgd_accumulate",
        "sgd_accumulate_byhand_clip_evaluate",
        "adamw_clip",
        "adamw_scaler_clip",
        "lamb_clip",
        "sgd_unused_clip",
        "adamw_unused_clip",
        "sgd_evaluate",
        "sgd_handzero",
        "sgd_unused_keepzero",
        "adamw_unused_keepzero_clip",
        "lamb_unused_handzero",
        "adamw_static_clip",
        "adamw_unequal_unused",
    ],
)
def test_script_trains_as_with_torch_alone_while_its_optimizer_is_on_the_shards(mode, tmp_path):
    name = {"sgd": "SGD", "adamw": "AdamW", "lamb": "FusedLAMB"}[mode.split("_")[0]]
    names = {"THALWEG_COMPAT": "1"} if "lamb" in mode else {}  # torch.optim.LAMB
    plain, _, _ = run(mode, tmp_path, **names)
    served, output, rounds = run(mode, tmp_path, THALWEG_PS="auto", **names)
    assert f"{name} is on the shards from the second step on" in output
    assert rounds >= 10
    assert served[0]["digest"] == served[1]["digest"]
    for ours, theirs in zip(served, plain, strict=True):
        assert ours["kind"] == f"{theirs['kind']}OnShards"
        for same in ("is", "state", "lr", "scale"):
            assert ours[same] == theirs[same], same
        np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-5)
        # Means are rounded in another order. Where a gradient is small, AdamW's step of at most
        # 0.02 makes that larger: by up to 2**-24 of the largest gradient, over its own.
        distance = 1e-6 if "sgd" in mode else 1e-4
        np.testing.assert_allclose(ours["weights"], theirs["weights"], rtol=0, atol=distance)


@pytest.mark.parametrize(
    ("wishes", "codec"),
    [("auto:pull=bf16", "bf16"), ("adamw:overlap=1", "bf16"), ("auto:pull=int8", "int8")],
)
def test_pull_and_overlap_may_be_wished_for(wishes, codec, tmp_path):
    plain, _, _ = run("adamw", tmp_path)
    env = {"THALWEG_CODEC": codec, "THALWEG_NODE_REDUCE": "workers"}
    served, output, _ = run("adamw", tmp_path, THALWEG_PS=wishes, **env)
    assert served[0]["digest"] == served[1]["digest"] != plain[0]["digest"]
    assert output.count("THALWEG_NODE_REDUCE=workers has no effect with ServerOptimizer: each") == 1


def test_zeros_move_weights_of_unused_layers_that_no_forward_pass_has_waited_for(tmp_path):
    mode = "sgd_unused_keepzero"
    plain, _, _ = run(mode, tmp_path)
    served, _, _ = run(mode, tmp_path, THALWEG_PS="auto:overlap=1")
    np.testing.assert_allclose(served[0]["weights"], plain[0]["weights"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "value", "why"),
    [
        ("adamw", "sgd", "it is a torch.optim.adamw.AdamW, and not sgd"),
        ("amsgrad", "auto", "group 0 has amsgrad, which shards do not have"),
        ("part", "auto", "it has 4 trainable parameters, and its module 6, of which 4 are the"),
        ("sgd_hook", "auto", "the script's communication hook"),
        ("adamw_unequal", "auto", "its parameters have seen from 2 to 7 steps, and shards count"),
        ("sgd_join", "auto", "join() lets workers do different numbers of steps, and shards need"),
    ],
)
def test_optimizer_that_does_not_fit_stays_and_why_is_said_once(mode, value, why, tmp_path):
    plain, _, _ = run(mode, tmp_path)
    served, output, rounds = run(mode, tmp_path, THALWEG_PS=value, THALWEG_CODEC="fp16")
    assert "torch averages the gradients, and THALWEG_CODEC=fp16 has no effect" in output
    assert [one["digest"] for one in served] == [one["digest"] for one in plain]
    assert output.count(f"stays on the workers in spite of it: {why}") == 1
    assert rounds == 0


def test_clipping_a_part_of_the_gradients_is_refused_with_the_numbers(tmp_path):
    with servers() as nothing:
        env = {"THALWEG_PS": "auto"}
        alone = ["", ""]
        job = Job("adamw_cliponly", nothing, tmp_path, sidecar_of=alone, env=env, jobs=SCRIPT)
        for worker in job.wait():
            assert worker.process.returncode != 0
            assert "clip_grad_norm_ of 2 of the 6 parameters whose gradients" in worker.output


def test_script_that_clears_the_state_is_told_how_shards_forget_it_and_that_does(tmp_path):
    plain, _, _ = run("adamw_reset", tmp_path)
    served, output, _ = run("adamw_reset", tmp_path, THALWEG_PS="auto")
    assert output.count("state.clear() has no effect on an optimizer whose state is on") == 1
    np.testing.assert_allclose(served[0]["weights"], plain[0]["weights"], rtol=0, atol=1e-4)


def test_second_optimizer_of_a_module_is_refused_with_what_to_do(tmp_path):
    with servers() as nothing:
        env = {"THALWEG_PS": "auto"}
        job = Job("adamw_second", nothing, tmp_path, sidecar_of=["", ""], env=env, jobs=SCRIPT)
        for worker in job.wait():
            assert worker.process.returncode != 0
            assert (
                "AdamW steps parameters of DistributedDataParallel(Model), whose" in worker.output
            )
            assert "keep that one, and change its groups. THALWEG_PS asks" in worker.output


def test_error_of_an_unchanged_script_ends_with_what_it_can_do(tmp_path):
    with servers() as nothing:
        env = {"THALWEG_PS": "auto"}
        job = Job("adamw_average", nothing, tmp_path, sidecar_of=["", ""], env=env, jobs=SCRIPT)
        for worker in job.wait():
            assert worker.process.returncode != 0
            assert "has been changed since the last step, and the shards" in worker.output
            assert "THALWEG_PS asks for this optimizer: without it, the script" in worker.output


def test_value_that_means_nothing_is_refused(tmp_path):
    with servers() as nothing:
        env = {"THALWEG_PS": "adagrad"}
        job = Job("adamw", nothing, tmp_path, sidecar_of=["", ""], env=env, jobs=SCRIPT)
        for worker in job.wait():
            assert worker.process.returncode != 0
            assert (
                "THALWEG_PS is 'adagrad', expected auto, sgd, adam, adamw or lamb" in worker.output
            )
