"""Tests THALWEG_TRACE on real jobs: traces must merge and be complete."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from harness import DEADLINE, environment, servers

from thalweg.cli import main
from thalweg.timeline import files, spans

# torch profiles rank 0 during its steps.
SCRIPT = textwrap.dedent("""
    import gc, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, record_function
    import thalweg.ddp

    def train():
        for _ in range(4):
            model(torch.randn(4, 300)).sum().backward()

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(
        torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)), bucket_cap_mb=0.2)
    thalweg.ddp.attach(model, codec=sys.argv[1], chunk_bytes=16384)
    if dist.get_rank() == 0:
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("all steps"):
            train()
        profiler.export_chrome_trace(sys.argv[2])
    else:
        train()
    del model
    gc.collect()
    dist.destroy_process_group()
""")
COLLECTIVES = textwrap.dedent("""
    import torch, torch.distributed as dist

    dist.init_process_group("thalweg")
    for _ in range(3):
        dist.all_reduce(torch.ones(100_000))
    dist.destroy_process_group()
""")
SERVED = textwrap.dedent("""
    import torch, torch.distributed as dist
    import thalweg.ps

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 5))
    clipping = thalweg.ps.ServerOptimizer(model.parameters(), "adamw", max_grad_norm=1.0)
    other = torch.nn.Linear(300, 5)
    lamb = thalweg.ps.ServerOptimizer(other.parameters(), "lamb", lr=1e-3)
    for _ in range(3):
        (model(torch.randn(4, 300)) + other(torch.randn(4, 300))).sum().backward()
        for optimizer in (clipping, lamb):
            optimizer.step()
            optimizer.zero_grad()
    clipping.close()
    lamb.close()
    dist.destroy_process_group()
""")
TORCH_WRONG_US = 2_000_000  # clocks of a busy machine; a wrong convention would be years off


def run(folder: Path, tmp_path: Path, codec: str, command: list[str], text: str = SCRIPT) -> Path:
    """Runs the script with traces; returns the folder that holds them."""
    traces, script = tmp_path / "traces", tmp_path / "train.py"
    script.write_text(text)
    env = environment(folder) | {"THALWEG_TRACE": str(traces), "THALWEG_TIMEOUT": "30"}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # otherwise torch makes one in TMPDIR
    argv = [sys.executable, "-m", *command, str(script), codec, str(tmp_path / "torch.json")]
    result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert result.returncode == 0, result.stdout + result.stderr
    return traces


def test_cluster_with_two_shards_has_every_phase_and_torch_fits_in(tmp_path, capsys):
    command = ["thalweg", "run", "--nodes", "2", "--shards", "2"]
    with servers() as nothing:
        traces = run(nothing.folder, tmp_path, "powersgd:rank=2,start=2", command)
    found = [files.read(path) for path in files.find([traces])]
    assert sorted(trace.program for trace in found) == 2 * ["aggregator"] + 2 * ["sidecar"] + 2 * [
        "worker"
    ]
    # A busy machine may lose some of the five comparisons with either shard. All programs read one
    # clock here, so a comparison's result is at most its error.
    for trace in found:
        assert len(trace.offsets) >= (8 if trace.program == "sidecar" else 0)
        assert {offset.clock for offset in trace.offsets} <= {trace.clock}
        assert all(abs(offset.nanos) <= offset.error for offset in trace.offsets)

    merged = tmp_path / "merged.json"
    torch_json = str(tmp_path / "torch.json")
    assert main(["trace", "merge", str(traces), "--torch", torch_json, "-o", str(merged)]) == 0
    assert main(["trace", "check", str(merged)]) == 0, capsys.readouterr().err
    timeline = spans.read(merged)
    rounds = {s.bucket_round for s in timeline.spans if s.side == "worker"}
    assert len({bucket for _, bucket, *_ in rounds}) > 1
    assert {s.args["shard"] for s in timeline.spans if s.side == "shard"} == {0, 1}
    assert {"compress", "wait_copy"} <= {s.phase for s in timeline.spans}
    assert {s.args["codec"] for s in timeline.spans if s.phase == "send"} >= {"fp32", "powersgd"}

    events = json.loads(merged.read_text())["traceEvents"]
    (steps,) = [e for e in events if e.get("name") == "all steps" and e["ph"] == "X"]
    copies = [s for s in timeline.spans if s.phase == "copy_in" and s.args["rank"] == 0]
    assert min(s.begin for s in copies) > steps["ts"] - TORCH_WRONG_US
    assert max(s.end for s in copies) < steps["ts"] + steps["dur"] + TORCH_WRONG_US


def test_collectives_of_a_process_group_are_there_by_name_at_nodes_and_shards(tmp_path, capsys):
    command = ["thalweg", "run", "--nodes", "2", "--shards", "1"]
    with servers() as nothing:
        traces = run(nothing.folder, tmp_path, "fp32", command, COLLECTIVES)
    merged = tmp_path / "merged.json"
    assert main(["trace", "merge", str(traces), "-o", str(merged)]) == 0
    assert main(["trace", "check", str(merged)]) == 0, capsys.readouterr().err
    seen = [span for span in spans.read(merged).spans if "collective" in span.args]
    for node in range(2):
        mine = [span for span in seen if span.args.get("node") == node]
        name = "allreduce 3 of group '0', sum of 100000 elements of fp32"
        came, sent = (span for span in mine if span.args["collective"] == name)
        assert (came.phase, sent.phase) == ("wait_workers", "exchange")
        assert came.end <= sent.begin <= sent.end
    phases = {span.phase for span in seen if span.side == "shard"}
    assert phases == {"wait_for_slowest", "fold", "deliver"}
    assert any("collective 3 of group 1" in span.args["collective"] for span in seen)


def test_optimizers_that_ask_for_weights_in_rounds_of_their_own_are_complete(tmp_path, capsys):
    command = ["thalweg", "run", "--nodes", "2"]
    with servers() as nothing:
        traces = run(nothing.folder, tmp_path, "fp32", command, SERVED)
    merged = tmp_path / "merged.json"
    assert main(["trace", "merge", str(traces), "-o", str(merged)]) == 0
    assert main(["trace", "check", str(merged)]) == 0, capsys.readouterr().err
    seen = [span for span in spans.read(merged).spans if span.side == "worker"]
    rounds = {phase: sum(span.phase == phase for span in seen) for phase in ("copy_in", "copy_out")}
    assert 0 < rounds["copy_in"] < rounds["copy_out"]


def test_sidecar_that_attach_starts_is_traced_too(tmp_path):
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    with servers() as nothing:
        traces = run(nothing.folder, tmp_path, "fp16", command)
        for left in nothing.folder.glob("torchelastic_*"):  # not ours
            for path in sorted(left.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            left.rmdir()
    found = [files.read(path).program for path in files.find([traces])]
    assert sorted(found) == ["sidecar", "worker"]
    merged = tmp_path / "merged.json"
    assert main(["trace", "merge", str(traces), "-o", str(merged)]) == 0
    assert main(["trace", "check", str(merged)]) == 0


def test_folder_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "never.py").write_text("")
    with servers() as nothing:
        env = environment(nothing.folder) | {"THALWEG_TRACE": str(tmp_path / "file" / "below")}
        argv = [sys.executable, "-m", "thalweg", "run", str(tmp_path / "never.py")]
        result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert result.returncode == 1
    assert f"cannot trace to the folder '{tmp_path}/file/below'" in result.stderr
