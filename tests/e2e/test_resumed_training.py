"""Checkpoints as trainers write them: what a codec carries goes on, and what does not is said."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Job, environment, servers

HERE = Path(__file__).parent
COST = HERE.parents[1] / "scripts" / "resume_cost.py"
SOON = {"THALWEG_TIMEOUT": "8", "THALWEG_STEP_TIMEOUT": "20"}
LATE = {"THALWEG_TIMEOUT": "8", "THALWEG_STEP_TIMEOUT": "60"}


def run(name, tmp_path, *, nodes=2, env=None, script="resume_jobs.py"):
    """Returns the workers' results, and what they have logged."""
    with servers(nodes=nodes, shards=2) as cluster:
        sockets = [server.address for server in cluster.sidecars]
        job = Job(name, cluster, tmp_path, sidecar_of=sockets, jobs=HERE / script, env=env)
        return job.results(), job.output


def compressed(sent, whole):
    """Returns which steps have sent less than half of what an uncompressed one does."""
    return [step < whole / 2 for step in sent]


def test_ordinary_checkpoint_of_model_and_optimizer_compresses_from_the_next_step(tmp_path):
    results, said = run("ordinary", tmp_path)
    for result in results:
        whole = result["straight"][0]
        assert compressed(result["straight"], whole) == [False] * 4 + [True] * 7
        assert compressed(result["resumed"], whole) == [True] * 3
        assert result["share"] < 0.1  # of the gradients: what nodes hold back is not in it
        assert result["keys"] == ["param_groups", "state", "thalweg"]
    assert said.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1
    assert "begins anew" not in said


def test_run_on_one_node_in_between_loses_no_step_counts_and_factors(tmp_path):
    results, said = run("by_way_of_one_node", tmp_path, script="resume_again_jobs.py")
    for result in results:
        assert compressed(result["resumed"], result["straight"][0]) == [True] * 3
    assert (
        said.count("takes along the step counts and factors of codec powersgd:rank=2,start=4") == 1
    )
    assert said.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1


def test_worker_that_comes_late_to_its_first_step_is_waited_for(tmp_path):
    results, said = run("one_comes_late", tmp_path, env=LATE)
    for result in results:
        assert compressed(result["resumed"], result["straight"][0]) == [True] * 3
    assert "waits for at most 60 s (THALWEG_STEP_TIMEOUT): rank 1 has not come to the first" in said
    assert said.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1
    assert "begins anew" not in said


def test_job_that_ends_before_the_first_step_fails_it_long_before_the_step_timeout(tmp_path):
    # Otherwise the tests' own limit ends this one.
    env = {"THALWEG_TIMEOUT": "8", "THALWEG_STEP_TIMEOUT": "600"}
    [error, gone], _ = run("one_ends_early", tmp_path, env=env, script="resume_again_jobs.py")
    assert gone == "gone"
    assert "RuntimeError: thalweg: " in error
    assert "rank 1 " in error


def test_worker_that_has_no_batch_in_join_resumes_with_the_others(tmp_path):
    results, said = run("one_has_no_batch", tmp_path, env=SOON, script="resume_again_jobs.py")
    assert results[0] == results[1]
    assert results[0]["since"] == 9
    assert said.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1


@pytest.mark.parametrize("name", ["one_is_in_eval_mode", "in_eval_mode"])
def test_module_in_eval_mode_resumes_compressed_with_its_first_averages(name, tmp_path):
    results, said = run(name, tmp_path, env=SOON, script="resume_again_jobs.py")
    for result in results:
        assert max(result["sent"]) < 30e3  # of 244 kB of gradients
        assert result.get("digest") == results[0].get("digest")
    assert said.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1


def test_modules_that_share_an_encoder_each_go_on_from_their_own(tmp_path):
    results, said = run("actor_and_critic", tmp_path, script="resume_again_jobs.py")
    assert results == [{"equal": True}] * 2
    assert said.count("what nodes held back of gradients goes on, from files") == 1
    assert "is not taken along" not in said  # nothing was wrapped anew


def test_checkpoint_of_another_codec_has_nothing_of_the_earlier_one_and_misses_nothing(tmp_path):
    results, said = run("another_codec", tmp_path, script="resume_again_jobs.py")
    assert results == [{key: ["param_groups", "state"] for key in ("before", "after")}] * 2
    assert "the job of its parameters has ended" not in said


def test_script_that_does_not_mention_thalweg_resumes_compressed(tmp_path):
    variables = {
        "THALWEG_POWERSGD_COMPRESSION": "1",
        "THALWEG_MATRIX_APPROXIMATION_RANK": "2",
        "THALWEG_START_COMPRESS_ITER": "4",
    }
    results, said = run("by_the_environment", tmp_path, env=variables)
    for result in results:
        whole = result["straight"][0]
        assert compressed(result["straight"], whole) == [False] * 4 + [True] * 7
        assert compressed(result["resumed"], whole) == [True] * 3
        assert compressed(result["loaded"], whole) == [True] * 3
    assert said.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1


@pytest.mark.parametrize("codec", ["int8", "onebit", "auto:rank=2,start=3"])
def test_state_that_is_asked_for_after_it_was_loaded_is_the_same_and_changes_nothing(
    codec, tmp_path
):
    asked = {"env": {"CODEC": codec}, "script": "resume_again_jobs.py"}
    for result in run("asked_after_loading", tmp_path, **asked)[0]:
        assert len(set(result["digests"])) == 1
        assert result["equal"]


def test_state_that_rank_0_alone_has_saved_is_loaded_by_all_and_what_is_lost_is_said(tmp_path):
    results, said = run("saved_by_rank_0", tmp_path)
    for result in results:
        assert len(result["resumed"]) == 3
        assert max(result["resumed"]) < 30e3  # of 244 kB of gradients
    assert said.count("is that of node0 alone, and this is node1") == 1
    assert "what is held back of gradients begins at zero" in said


def test_optimizer_that_rank_0_alone_has_loaded_begins_anew_everywhere(tmp_path):
    results, said = run("loaded_on_rank_0_alone", tmp_path)
    for result in results:
        whole = result["resumed"][0]
        assert compressed(result["resumed"], whole) == [False] * 4 + [True] * 2
    assert said.count("the codec begins anew, with step 1") == 1
    assert "not all workers have loaded it" in said


def test_state_that_rank_0_alone_has_loaded_is_an_error_on_all_at_once(tmp_path):
    results, _ = run("state_loaded_on_rank_0_alone", tmp_path)
    for result in results:
        assert "of 2 workers, rank 1 did not call the State's" in result["second"]


def test_state_of_three_nodes_goes_on_in_two_and_what_is_lost_is_said_once(tmp_path):
    results, said = run("fewer_nodes", tmp_path, nodes=3)
    assert results[0]["keys"] == ["codec", "node0", "node1", "node2", "saved_by"]
    for result in results[:2]:
        assert max(result["resumed"]) < 30e3
    assert said.count("was saved by 3 workers on 3 nodes, this job has 2 workers on 2 nodes") == 1


def test_ordinary_checkpoint_and_files_of_residuals_go_on_bit_for_bit(tmp_path):
    for name in ("with_files", "with_files_of_int8"):
        results, said = run(name, tmp_path)
        for result in results:
            assert result["resumed"] == result["straight"]
            assert result["keys"] == ["param_groups", "state", "thalweg"]
            # Node 1 writes one when it leaves, too. No file is unfinished.
            assert result["files"] == [
                "11-node1.residuals",
                "11-node1.residuals",
                "8-node0.residuals",
                "8-node1.residuals",
            ]
        assert said.count("what nodes held back of gradients goes on, from files") == 1


def test_module_that_keeps_files_is_saved_whole_without_thalweg(tmp_path):
    results, _ = run("saved_whole", tmp_path, script="resume_again_jobs.py")
    assert [result["needs"] for result in results] == [[False, False]] * 2


def test_residuals_begin_at_zero_everywhere_where_one_node_has_no_file(tmp_path):
    results, said = run("with_a_file_lost", tmp_path)
    for result in results:
        assert result["resumed"] != result["straight"]
        assert max(result["sent"]) < 30e3  # compressed, of 244 kB of gradients
    assert results[0]["resumed"] == results[1]["resumed"]
    assert said.count("what nodes held back of gradients begins at zero: node 1: no file") == 1


def test_folder_that_cannot_be_written_is_said_once_by_each_node_and_training_goes_on(tmp_path):
    results, said = run("with_a_folder_that_is_none", tmp_path)
    for result in results:
        assert max(result["sent"]) < 30e3
    # Node 1 leaves two jobs; a checkpoint is written in one of them.
    for node, times in ((0, 1), (1, 2)):
        warning = f"node {node} does not keep what it holds back of gradients in"
        assert said.count(warning) == times
    assert said.count("what nodes held back of gradients begins at zero: node 0: no file") == 1


def test_folder_into_which_nothing_is_written_is_said_once(tmp_path):
    _, said = run("with_nothing_to_keep", tmp_path)
    assert said.count("THALWEG_RESIDUALS (residuals=) has no effect: with codec fp16 nothing") == 1
    assert said.count("THALWEG_RESIDUALS has no effect with ServerOptimizer") == 1


def test_folder_that_one_node_has_alone_is_refused_by_name(tmp_path):
    results, _ = run("with_a_folder_on_one_node", tmp_path)
    for result in results:
        assert "residuals is True on rank 0 but False on rank 1" in result["error"]


def test_resume_costs_the_loss_nothing_with_the_state_of_all_workers(tmp_path):
    with servers() as nothing:
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "thalweg", "run", "--nodes", "2", str(COST)]
        command += ["--seeds", "2", "--saved", "24", "--checks", "32"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    more = dict(re.findall(r"step 32, (.*?): .* more than without a break: (\S+),", done.stdout))
    assert float(more.pop("without a break")) == 0
    assert float(more.pop("and the state of all workers")) == 0
    late = "and residuals one step late"
    others = [late, f"{late}, but for rank 0", "and the state of rank 0", "ordinary checkpoint"]
    assert sorted(more) == others
    assert all(float(one) != 0 for one in more.values())  # they differ, so the zeros mean something


LIGHTNING = """
import sys
import pytorch_lightning as lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))

    def training_step(self, batch, index):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = torch.utils.data.TensorDataset(torch.ones(96, 64))
save = lightning.callbacks.ModelCheckpoint(".", "saved", every_n_train_steps=8)
trainer = lightning.Trainer(
    max_steps=int(sys.argv[1]), num_nodes=2, devices=1, accelerator="cpu", strategy="ddp",
    callbacks=[save], logger=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(
    Model(),
    torch.utils.data.DataLoader(data, batch_size=4),
    ckpt_path="saved.ckpt" if sys.argv[1] == "10" else None,
)
"""


def test_lightnings_trainer_resumes_compressed_from_its_own_checkpoint(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    variables = {"THALWEG_POWERSGD_COMPRESSION": "1", "THALWEG_START_COMPRESS_ITER": "4"}
    with servers() as nothing:
        env = environment(nothing.folder) | variables
        env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
        for steps in ("8", "10"):
            command = [sys.executable, "-m", "thalweg", "run", "--nodes", "2", str(script), steps]
            done = subprocess.run(
                command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=140
            )
            assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert said.count("the codec goes on after step 8, from the optimizer's checkpoint") == 1
    assert said.count("compression has begun after 8 iterations") == 2  # on either node


@pytest.fixture(autouse=True)
def logged(monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
