"""Tests scripts that do not build and step their modules in the usual way: docs/zero_code.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import DEADLINE, Job, environment, servers
from waiting import until

JOBS = Path(__file__).parent / "unusual_jobs.py"
FP32 = {"THALWEG_CODEC": "fp32"}  # alone it activates


def run(name, tmp_path, env, world=2):
    with servers() as nothing:
        job = Job(name, nothing, tmp_path, sidecar_of=[""] * world, env=env, jobs=JOBS)
        return job.results(), [w.output.splitlines() for w in job.workers]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The results with and without Thalweg."""
    return [run("copies", tmp_path_factory.mktemp("copies"), env)[0] for env in ({}, FP32)]


@pytest.mark.parametrize("name", ["copied", "loaded", "copied when trained"])
def test_module_that_was_not_built_by_its_class_is_attached(copies, name):
    plain, attached = copies
    for without, result in zip(plain, attached, strict=True):
        assert without[name]["codec"] is None
        assert result[name]["codec"] == "fp32"
        assert result[name]["rounds"] >= 12
        # Two workers: (a + b) / 2 is rounded once by either side.
        assert result[name]["digest"] == without[name]["digest"]


def test_backward_in_eval_mode_is_warned_about_once(tmp_path):
    results, output = run("in_eval_mode", tmp_path, FP32)
    for result in results:
        assert result["eval"]["codec"] is None
        assert result["train"]["codec"] == "fp32"
    said = [[line for line in lines if "runs backward in eval mode" in line] for lines in output]
    assert [len(lines) for lines in said] == [1, 0]
    assert "DistributedDataParallel(Sequential)" in said[0][0]
    assert "THALWEG_CODEC=fp32" in said[0][0]


def test_rank_without_a_batch_is_named_within_the_timeout(tmp_path):
    env = FP32 | {"THALWEG_STEP_TIMEOUT": "2"}
    with servers() as nothing:
        job = Job("no_batch", nothing, tmp_path, sidecar_of=["", ""], env=env, jobs=JOBS)
        first = job.wait()[0]
    error = first.result["error"]
    assert error.startswith("TimeoutError: thalweg: rank 1 has not come to attach() within 2 s")
    assert "if it has no batch, or" in error


def test_forward_pass_in_training_mode_on_one_rank_before_a_barrier_names_the_cause(tmp_path):
    env = FP32 | {"THALWEG_STEP_TIMEOUT": "2"}
    with servers() as nothing:
        job = Job("looks_at_shapes", nothing, tmp_path, sidecar_of=["", ""], env=env, jobs=JOBS)
        error = job.wait()[0].result["error"]
    assert error.startswith("TimeoutError: thalweg: rank 1 has not come to attach() within 2 s")
    assert (
        "waits in vain for the others, in a barrier perhaps, if they have run the module" in error
    )
    assert error.endswith("run that under torch.no_grad()")


# The group's half an hour is for a process that is alive; one that shows no sign of life for 8 s is
# named. A busy machine may take longer for the rest of it.
PATIENT = FP32 | {"THALWEG_TIMEOUT": "8", "THALWEG_STEP_TIMEOUT": "auto"}
PROMPT = 40.0


@pytest.mark.parametrize("node_reduce", ["sidecar", "workers"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rank_that_pauses_for_longer_than_the_timeout_is_waited_for(tmp_path, rank, node_reduce):
    env = PATIENT | {"LATE": str(rank), "THALWEG_NODE_REDUCE": node_reduce}
    with servers(nodes=2, shards=1) as cluster:
        first, second = [sidecar.address for sidecar in cluster.sidecars]
        job = Job("late", cluster, tmp_path, sidecar_of=[first, first, second], env=env, jobs=JOBS)
        results = job.results()
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["codec"] == "fp32"


@pytest.mark.parametrize("rank", [0, 1])
def test_module_that_synchronises_nothing_when_built_may_be_built_late(tmp_path, rank):
    env = PATIENT | {"LATE": str(rank), "THALWEG_TIMEOUT": "4"}
    results, output = run("late_to_build", tmp_path, env)
    assert [result["codec"] for result in results] == ["fp32", "fp32"]
    assert any("waiting for rank 1 to come to the same" in line for line in output[0]) == (
        rank == 1
    )


@pytest.mark.parametrize("place", ["same node", "other node"])
def test_worker_that_is_stopped_is_named_within_the_timeout_and_not_the_steps(tmp_path, place):
    env = PATIENT | {"STOPPED": "1"}
    with servers(nodes=2, shards=1) as cluster:
        first, second = [sidecar.address for sidecar in cluster.sidecars]
        sidecars = [first, first if place == "same node" else second]
        job = Job("stopped", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=JOBS)
        job.workers[0].process.wait(DEADLINE)
        job.workers[1].process.kill()
        told = job.wait()[0].result
        await_files(cluster.folder / "going0", cluster.folder / "going1")
    assert "rank 1 showed no sign of life within 7.2 s" in told["error"]
    assert "(THALWEG_TIMEOUT)" in told["error"]
    assert told["seconds"] < PROMPT


@pytest.mark.parametrize("kind", ["sidecar", "aggregator"])
def test_server_that_is_stopped_is_named_within_the_timeout_and_not_the_steps(tmp_path, kind):
    env = PATIENT | {"STOPPED": "none"}
    with servers(nodes=2, shards=1) as cluster:
        sidecars = [sidecar.address for sidecar in cluster.sidecars]
        job = Job("stopped", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=JOBS)
        await_files(cluster.folder / "going0", cluster.folder / "going1")
        server = (cluster.sidecars if kind == "sidecar" else cluster.aggregators)[0]
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            told = job.wait()[0].result
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
    said = "the sidecar at" if kind == "sidecar" else "missing are aggregator shard 0"
    assert said in told["error"]
    assert told["seconds"] < PROMPT


def await_files(*paths: Path) -> None:
    until(f"{paths}", lambda: all(path.exists() for path in paths), DEADLINE, every=0.05)
    for path in paths:
        path.unlink()


def test_discriminator_that_is_frozen_in_its_first_forward_pass_trains_as_under_ddp(tmp_path):
    plain, attached = (run("adversaries", tmp_path, env)[0] for env in ({}, FP32))
    for without, result in zip(plain, attached, strict=True):
        for side in ("G", "D"):
            assert without[side]["codec"] is None
            assert (result[side]["codec"], result[side]["rounds"]) == ("fp32", 12)
            assert result[side]["digest"] == without[side]["digest"]  # as above


def test_module_that_is_unfrozen_from_its_head_down_trains_as_under_ddp(tmp_path):
    plain, attached = (run("unfreezing", tmp_path, env)[0] for env in ({}, FP32))
    for without, result in zip(plain, attached, strict=True):
        assert (without["codec"], result["codec"]) == (None, "fp32")
        assert result["rounds"] >= 12
        assert result["digest"] == without["digest"]  # as above


def test_rules_apply_to_a_compiled_module_by_the_names_of_the_module_itself(tmp_path):
    results, output = run("compiled", tmp_path, {"THALWEG_CODEC": "fp16;1.*=fp32;hed.*=bf16"})
    for result in results:
        [remark, saves_nothing], _ = result["left out"]
        assert "are rounded to fp16, and no byte is saved" in saves_nothing
        assert remark == (
            "the rule 'hed.*=bf16' applies to no parameter: the parameters are 0.weight, 0.bias, "
            "1.weight, …"
        )
    assert [sum(remark in line for line in lines) for lines in output] == [1, 0]


def by_step(ranks):
    """Yields each step's own gradients and averages, by rank; rank r has left after r + 2 steps."""
    for step in range(len(ranks[-1]["steps"])):
        both = [np.array(rank["steps"][step]) for rank in ranks if step < len(rank["steps"])]
        yield np.array([own for own, _ in both]), np.array([mean for _, mean in both])


@pytest.mark.parametrize("node_reduce", [None, "sidecar", "workers"])
def test_ranks_that_left_a_join_count_in_the_mean_as_torch_counts_them(tmp_path, node_reduce):
    """Compares torch (None) and Thalweg with float64, on two nodes of two ranks and one.

    With u float32's rounding, torch rounds 1/n, its product with each of n gradients, and at most
    W - 1 additions. Thalweg rounds W/n and its product; on a node, the quotient by the ranks per
    node and W - 1 additions; over the nodes, W - 1 additions and a quotient; quotients are products
    with rounded reciprocals: 2 (W + 2) roundings. The factor 2 covers the products of roundings.
    """
    world, u = 3, 2.0**-24
    env = FP32 | {"THALWEG_NODE_REDUCE": node_reduce} if node_reduce else {}
    with servers(nodes=2, shards=1) as cluster:
        first, second = [sidecar.address for sidecar in cluster.sidecars]
        sidecars = [first, first, second] if node_reduce else [""] * world
        job = Job("joins", cluster, tmp_path, sidecar_of=sidecars, env=env, jobs=JOBS)
        modes = zip(*job.results(), strict=True)
    for ranks in modes:
        mode, counts = ranks[0]["mode"], []
        for own, means in by_step(ranks):
            counts.append(len(own))
            divisor = world if mode == "initial world" else len(own)
            mean, size = own.sum(axis=0) / divisor, np.abs(own).sum(axis=0) / divisor
            error = np.abs(means - mean)
            assert (error <= 2 * 2 * (world + 2) * u * size).all(), (mode, counts)
            assert (means == means[0]).all(), (mode, counts)
        assert counts == [3, 3, 2, 1]
        buckets = 1 if mode == "unused" else 2  # torch then fills a single one
        assert ranks[0]["rounds"] >= (buckets * len(ranks[0]["steps"]) if node_reduce else 0)


LIGHTNING = """
import gc, hashlib, json, os, sys
import torch
import pytorch_lightning as lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(30, 2)

    def training_step(self, batch, index):
        assert self.trainer.model is not self  # it is a DistributedDataParallel module
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, index):
        self.log("loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(48, 30, generator=torch.manual_seed(2)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1])
model = Model()
wrapper = []
class Look(lightning.Callback):
    def on_train_end(self, trainer, module):
        ddp = sys.modules.get("thalweg.ddp")
        state = ddp and ddp.state_of(trainer.model)
        digest = hashlib.sha256(module.layer.weight.detach().numpy().tobytes()).hexdigest()
        said = {"type": type(trainer.model).__name__, "digest": digest,
                "codec": state and state.codec, "rounds": state.stats()["rounds"] if state else 0}
        with open(f"{sys.argv[1]}/{trainer.global_rank}.json", "w") as file:
            json.dump(said, file)
trainer.callbacks.append(Look())
trainer.fit(model, loader, loader)
# Without this, a thread of Gloo may still run when the interpreter ends, and abort the process.
del trainer, model
gc.collect()
torch.distributed.destroy_process_group()
"""


def test_lightnings_default_trainer_is_attached(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    results = []
    for env in ({}, FP32):
        with servers() as nothing:
            variables = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
            done = subprocess.run(
                [*launcher, "--log-dir", tmp_path, script, tmp_path],
                env=variables | env,
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
        assert done.returncode == 0, done.stderr
        results.append([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)])
    plain, attached = results
    for without, result in zip(plain, attached, strict=True):
        assert result["type"] == without["type"] == "DistributedDataParallel"
        assert result["codec"] == "fp32"
        assert result["rounds"] == 12  # 2 epochs of 48 samples, of which either worker has half
        # Two workers: (a + b) / 2 is rounded once by either side.
        assert result["digest"] == without["digest"]
