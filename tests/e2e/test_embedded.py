"""Tests jobs without servers: the workers start a sidecar with an aggregator inside."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap

from harness import DEADLINE, Job, environment, servers
from leftovers import processes_below

EMBEDDED = ["", ""]


def test_two_models_share_one_sidecar_that_leaves_with_the_workers(tmp_path):
    with servers() as nothing:  # checks that nothing is left
        results = Job("two_models", nothing, tmp_path, sidecar_of=EMBEDDED).results()
    assert results[0]["digests"] == results[1]["digests"]
    sidecars = {path for result in results for path in result["sidecars"]}
    assert len(sidecars) == 1
    assert sidecars.pop().startswith(str(nothing.folder))


def test_worker_killed_midway_is_named_to_the_others_and_nothing_is_left(tmp_path):
    with servers() as nothing:
        workers = Job("killed_midway", nothing, tmp_path, sidecar_of=["", "", ""]).wait()
        assert workers[2].code == -9
        for worker in workers[:2]:
            assert worker.code == 0, worker.output
            assert worker.result["error"].startswith("thalweg: ")
            assert "rank 2" in worker.result["error"]


def test_codec_that_compresses_nothing_is_said_once_and_in_the_summary(tmp_path):
    said = [
        "2 of 4 parameters (1.weight, …) stay uncompressed in spite of powersgd and fp16: ",
        "2 of 4 parameters (0.weight, …) stay uncompressed in spite of powersgd: all workers",
    ]
    with servers() as nothing:
        workers = Job("left_out", nothing, tmp_path, sidecar_of=EMBEDDED).wait()
    for worker, times in zip(workers, (1, 0), strict=True):
        assert worker.code == 0, worker.output
        for remark in said:
            assert worker.output.count(remark) == times, worker.output
            assert remark in worker.result["summary"]
        assert "not compressing yet" not in worker.result["summary"]


def test_torchrun_needs_one_added_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import gc, torch, torch.distributed as dist, thalweg.ddp
            dist.init_process_group("gloo")
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 2))
            state = thalweg.ddp.attach(model)
            for _ in range(10):
                model(torch.randn(4, 30)).sum().backward()
            if dist.get_rank() == 0:
                print(state.summary())
            del model, state
            gc.collect()
            dist.destroy_process_group()
        """)
    )
    with servers() as nothing:
        env = environment(nothing.folder) | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        result = subprocess.run(
            [*command, "--standalone", script],
            env=env,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert result.returncode == 0, result.stderr
        assert "10 buckets" in result.stdout
        for folder in nothing.folder.glob("torchelastic_*"):  # not ours
            shutil.rmtree(folder)
        assert not [c for c in processes_below(nothing.folder).values() if "python" in c]
