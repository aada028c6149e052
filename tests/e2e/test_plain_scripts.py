"""Tests scripts that do not mention Thalweg, run with variables only: docs/zero_code.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness import DEADLINE, Job, environment, metric, servers
from leftovers import processes_below

JOBS = Path(__file__).parent / "plain_jobs.py"
FP16 = {"AIAK_FP16_COMPRESSION": "1"}


def lines(worker, text):
    return [line for line in worker.output.splitlines() if text in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Returns the digest of the replicas without Thalweg."""
    with servers() as nothing:
        folder = tmp_path_factory.mktemp("plain")
        job = Job("plain", nothing, folder, sidecar_of=["", ""], jobs=JOBS, afresh=True)
        results = job.results()
        assert "thalweg" not in job.output
    loaded = {name for result in results for name in result["modules"]}
    assert loaded == {
        "thalweg",
        "thalweg._autoload",
        "thalweg._backend",
        "thalweg._settings",
        "thalweg._settings._variables",
    }
    assert results[0]["digest"] == results[1]["digest"]
    return results[0]["digest"]


def test_variables_alone_give_a_plain_script_our_group_and_its_module_the_same_job(plain, tmp_path):
    env = {"THALWEG_BACKEND": "1", "THALWEG_CODEC": "fp32"}
    with servers(nodes=1) as cluster:
        sockets = [cluster.sidecars[0].address] * 2
        job = Job("plain", cluster, tmp_path, sidecar_of=sockets, env=env, jobs=JOBS, afresh=True)
        results = job.results()
        assert metric(cluster.sidecars[0], "thalweg_sidecar_steps_total") > 0
    # Halving is exact: the mean of two numbers has the same one rounding, whoever takes it.
    assert results[0]["digest"] == results[1]["digest"] == plain
    said = lines(job.workers[0], "the default process group is thalweg, where the script asks")
    assert len(said) == 1
    assert len(set(re.findall(r"job-[0-9a-f]+", job.workers[0].output))) == 1
    assert lines(job.workers[0], "is attached as job-")
    # destroy_process_group() ends the session, and the module's job says before what it saved.
    assert len(lines(job.workers[0], "MB of gradients, nothing saved: all 2 workers are on")) == 1


def test_variable_alone_halves_the_bytes_of_a_plain_script(plain, tmp_path):
    with servers(nodes=2, shards=1) as cluster:
        sockets = [server.address for server in cluster.sidecars]
        job = Job("plain", cluster, tmp_path, sidecar_of=sockets, env=FP16, jobs=JOBS)
        results = job.results()
        for server in cluster.sidecars:
            raw = metric(server, "thalweg_sidecar_raw_bytes_total")
            assert metric(server, "thalweg_sidecar_wire_bytes_total") * 2 == raw > 0
    assert results[0]["digest"] == results[1]["digest"] != plain
    said = lines(job.workers[0], "AIAK_FP16_COMPRESSION=1")
    assert len(said) == 1
    assert "is attached as job-" in said[0]
    assert "with codec fp16" in said[0]
    [last] = lines(job.workers[0], "MB of gradients crossed a node's link as ")
    assert " MB (2.00x less); waited " in last
    assert "; by the measured links its bytes take " in last
    assert not lines(job.workers[1], "thalweg")


def test_bytes_drop_at_the_iteration_that_the_variables_name(tmp_path):
    env = {"AIAK_POWERSGD_COMPRESSION": "1", "AIAK_START_COMPRESS_ITER": "10"}
    with servers(nodes=2, shards=1) as cluster:
        sockets = [server.address for server in cluster.sidecars]
        job = Job("plain", cluster, tmp_path, sidecar_of=sockets, env=env, jobs=JOBS)
        results = job.results()
        parameters = 64 * 5000 + 5000 + 5000 * 10 + 10
        # With rank 1: rows + columns of both weights, and both biases unchanged.
        sent = (5000 + 64) + 5000 + (10 + 5000) + 10
        for server in cluster.sidecars:
            for codec, steps, elements in (("fp32", 10, parameters), ("powersgd", 2, sent)):
                label = f'codec="{codec}",direction="sent"'
                raw = metric(server, "thalweg_sidecar_raw_bytes_total", label)
                wire = metric(server, "thalweg_sidecar_wire_bytes_total", label)
                assert raw == steps * parameters * 4
                assert wire == steps * elements * 4
    assert results[0]["digest"] == results[1]["digest"]


def test_fp32_without_code_gives_what_the_call_gives(plain, tmp_path):
    env = {"AIAK_HIERARCHICAL_ALLREDUCE": "1"}
    with servers() as nothing:
        job = Job("plain", nothing, tmp_path, sidecar_of=["", ""], env=env, jobs=JOBS)
        results = job.results()
    # With two workers, either side rounds (a + b) / 2 once.
    assert [result["digest"] for result in results] == [plain, plain]
    assert "thalweg.ddp" in results[0]["modules"]


@pytest.fixture(scope="module")
def who_wins(tmp_path_factory):
    with servers() as nothing:
        folder = tmp_path_factory.mktemp("wins")
        job = Job(
            "who_wins", nothing, folder, sidecar_of=["", ""], env=FP16, jobs=JOBS, afresh=True
        )
        results = job.results()
        assert "thalweg/_" not in job.output  # torch.compile has not traced our code
        return results, lines(job.workers[0], "thalweg: ")


@pytest.mark.parametrize("treatment", ["registers", "registers_builtin", "registers_late"])
def test_hook_of_the_script_wins(who_wins, plain, treatment):
    results, said = who_wins
    for result in results:
        assert result[treatment]["codec"] is None
        assert result[treatment]["digest"] == plain
    assert len([line for line in said if "keeps its communication hook" in line]) == 3


def test_call_of_attach_wins(who_wins):
    for result in who_wins[0]:
        assert result["attaches"]["codec"] == "bf16"


@pytest.mark.parametrize("treatment", ["evaluates", "compiles"])
def test_module_is_attached_in_its_first_training_step(who_wins, treatment):
    for result in who_wins[0]:
        assert result[treatment]["codec"] == "fp16"
        assert result[treatment]["rounds"] >= 12


def test_model_that_cannot_be_served_stays_with_torch_and_says_why(tmp_path):
    with servers() as nothing:
        job = Job("sparse", nothing, tmp_path, sidecar_of=["", ""], env=FP16, jobs=JOBS)
        results = job.results()
    expected = [[0.5] * 4] * 2 + [[0.0] * 4] * 8
    assert [result["grad"] for result in results] == [expected] * 2
    said = lines(job.workers[0], "thalweg")
    assert len(said) == 1
    assert "stays with torch's allreduce in spite of AIAK_FP16_COMPRESSION=1" in said[0]
    assert "sparse" in said[0]
    assert not lines(job.workers[1], "thalweg")


def test_sidecar_that_is_not_there_is_an_error_on_all_workers(tmp_path):
    with servers() as nothing:
        sockets = ["/nonexistent/x.sock"] * 2
        job = Job("caught", nothing, tmp_path, sidecar_of=sockets, env=FP16, jobs=JOBS)
        errors = [result["error"] for result in job.results()]
    for error in errors:
        assert error.startswith("ConnectionError: thalweg: ")
        assert "/nonexistent/x.sock" in error


def test_malformed_variable_is_an_error_on_all_workers(tmp_path):
    env = {"AIAK_POWERSGD_COMPRESSION": "1", "AIAK_MATRIX_APPROXIMATION_RANK": "none"}
    with servers() as nothing:
        job = Job("caught", nothing, tmp_path, sidecar_of=["", ""], env=env, jobs=JOBS)
        errors = [result["error"] for result in job.results()]
    text = "AIAK_MATRIX_APPROXIMATION_RANK is 'none', expected a whole number from 1 to 256"
    assert errors == [f"ConfigError: thalweg: rank 0: {text}"] * 2


def test_rank_without_the_variables_is_named(tmp_path):
    env = FP16 | {"UNAWARE_RANK": "1", "THALWEG_TIMEOUT": "2"}
    with servers() as nothing:
        job = Job("plain", nothing, tmp_path, sidecar_of=["", ""], env=env, jobs=JOBS, afresh=True)
        workers = job.wait()
    assert workers[0].code != 0
    assert "the environment activates it here, but not on rank 1" in workers[0].output


TRAINING = """
import gc, torch, torch.distributed as dist

def train(rank=None):
    options = {} if rank is None else dict(
        init_method=f"file://{__file__}.store", rank=rank, world_size=2)
    dist.init_process_group("gloo", **options)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 2))
    for _ in range(3):
        model(torch.randn(4, 30)).sum().backward()
    del model
    gc.collect()
    dist.destroy_process_group()

if __name__ == "__main__":
"""
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "spawn": [],
    "alone": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"],
    "thalweg run": ["-m", "thalweg", "run", "--nproc", "2", "--codec", "fp16"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_is_activated_however_it_is_launched(launcher, tmp_path):
    script = tmp_path / "train.py"
    call = "torch.multiprocessing.spawn(train, nprocs=2)" if launcher == "spawn" else "train()"
    script.write_text(TRAINING + textwrap.indent(call, "    "))
    with servers() as nothing:
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        result = subprocess.run(
            [sys.executable, *LAUNCHERS[launcher], script],
            env=env if launcher == "thalweg run" else env | FP16,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        for folder in nothing.folder.glob("torchelastic_*"):  # not ours
            shutil.rmtree(folder)
        assert not [c for c in processes_below(nothing.folder).values() if "python" in c]
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if "with codec fp16" in line]
    assert len(said) == (0 if launcher == "alone" else 1), result.stderr
