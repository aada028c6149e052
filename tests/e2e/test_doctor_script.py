"""Tests what `thalweg doctor SCRIPT` says of scripts that get what was asked for, and of others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import DEADLINE, environment, servers

# A busy machine takes minutes to load torch in three processes.
pytestmark = pytest.mark.timeout(300)
SCRIPT = """
import os, sys, threading, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
if sys.argv[1] == "raise on rank 1":
    if os.environ["RANK"] == "1":
        raise OSError("there is no data")
    threading.Event().wait()
dist.init_process_group("gloo")
model = torch.nn.Linear(100, 10)
if sys.argv[1] != "without":
    model = torch.nn.parallel.DistributedDataParallel(model)
if sys.argv[1] == "hook":
    model.register_comm_hook(dist.group.WORLD, bf16_compress_hook)
if sys.argv[1] == "bypass":
    wrapper, model = model, model.module
if sys.argv[1] == "raise":
    raise OSError("there is no data")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2 if sys.argv[1] == "short" else 10**9):
    optimizer.zero_grad()
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
"""
FP16 = {"THALWEG_CODEC": "fp16"}


def doctor(tmp_path, argument, variables, text=SCRIPT, options=()):
    """Returns the exit code and the lines of the report."""
    script = tmp_path / "train.py"
    script.write_text(text)
    with servers() as nothing:
        done = subprocess.run(
            [sys.executable, "-m", "thalweg", "doctor", *options, str(script), argument],
            env=environment(nothing.folder)
            | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
            | variables,
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE,
        )
    head, _, report = done.stdout.partition(f"{script} {argument}, with 1 worker on each of 2 ")
    assert report, head + done.stderr
    return done.returncode, report.splitlines()[1:]


def test_right_script_is_said_to_be_attached_with_the_bytes_of_its_steps(tmp_path):
    code, lines = doctor(tmp_path, "right", FP16)
    assert code == 0
    assert lines[:2] == [
        "ok    the script has made 3 steps of its optimizer",
        "ok    variables ask for Thalweg: THALWEG_CODEC=fp16",
    ]
    assert lines[2].startswith("ok    DistributedDataParallel(Linear) is attached as job-")
    # Three steps of 100 * 10 + 10 elements.
    assert lines[2].endswith(
        "0.0121 MB of its node's gradients were sent as 0.00606 MB (2.00x less)"
    )
    assert len(lines) == 3


def test_script_is_told_how_seldom_to_exchange_over_links_of_a_rate(tmp_path):
    code, lines = doctor(tmp_path, "right", FP16, options=("--rate", "1kbit"))
    assert code == 0
    assert lines[3].startswith("note  steps took ")
    # 1010 elements up and down by a half each.
    assert "to exchange 0.00404 MB takes 32.3 s with 2 nodes at 0.001 Mbit/s: " in lines[3]
    assert "local updates (thalweg.ps.LocalOptimizer) with every=" in lines[3]


@pytest.mark.parametrize("argument", ["right", "without"])
def test_script_that_asks_for_nothing_gets_the_advice_and_has_not_failed(tmp_path, argument):
    code, lines = doctor(tmp_path, argument, {}, options=("--rate", "1kbit"))
    assert code == 0
    assert lines[1].startswith("note  nothing asks for Thalweg: set THALWEG_CODEC")
    assert lines[2].startswith(
        "note  DistributedDataParallel(Linear) is not attached: neither variables nor the script"
        if argument == "right"
        else "note  there is no DistributedDataParallel module"
    )
    assert "to exchange 0.00404 MB takes 32.3 s with 2 nodes" in lines[3]


def test_script_whose_optimizer_moves_to_the_shards_is_said_to_do_so(tmp_path):
    code, lines = doctor(tmp_path, "right", {"THALWEG_PS": "auto"})
    assert code == 0
    assert lines[1] == "ok    variables ask for Thalweg: THALWEG_PS=auto"
    assert "ok    DistributedDataParallel(Linear) leaves its gradients to its optimizer" in lines[2]
    assert "ok    ServerOptimizer has pushed this worker's 0.00808 MB of gradients" in lines[3]


def test_script_whose_process_group_becomes_thalwegs_is_said_to_average_by_it(tmp_path):
    code, lines = doctor(tmp_path, "right", {"THALWEG_BACKEND": "1"})
    assert code == 0
    assert lines[1] == "ok    variables ask for Thalweg: THALWEG_BACKEND=1"
    assert "leaves its gradients to its process group, which is Thalweg's" in lines[2]


def test_script_whose_workers_step_alone_is_said_to_do_so(tmp_path):
    variables = {"THALWEG_PS_MODE": "local", "THALWEG_PS_EVERY": "50"}
    code, lines = doctor(tmp_path, "right", variables)
    assert code == 0
    asking = "THALWEG_PS_MODE=local, THALWEG_PS_EVERY=50"
    assert lines[1] == f"ok    variables ask for Thalweg: {asking}"
    assert "leaves its gradients to its optimizer, which does local updates" in lines[2]
    assert lines[3].endswith("exchanges what has changed of 0.00404 MB every 50 steps")
    assert not any(line.startswith("FAIL") for line in lines)


OTHERS = """
import sys, torch, torch.distributed as dist, thalweg
dist.init_process_group("thalweg")
model = torch.nn.Linear(100, 10)
if sys.argv[1] == "served":
    optimizer = thalweg.ps.ServerOptimizer(model.parameters(), "sgd", lr=0.1)
elif sys.argv[1] == "local":
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = thalweg.ps.LocalOptimizer(inner, every=50)
else:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
    thalweg.fsdp.compress(model, "int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("served", "ServerOptimizer has pushed this worker's 0.0121 MB of gradients to the shar"),
        ("local", "LocalOptimizer exchanges what has changed of 0.00404 MB every 50 steps"),
        ("sharded", "shards of fully_shard() are sent compressed: gradients in int8"),
    ],
)
def test_models_without_distributed_data_parallel_are_said_to_use_thalweg(tmp_path, argument, said):
    code, lines = doctor(tmp_path, argument, {}, OTHERS)
    assert code == 0
    assert lines[1] == "ok    the script asks for Thalweg itself"
    assert lines[2].startswith(f"ok    {said}")


@pytest.mark.parametrize(
    ("argument", "variables", "said"),
    [
        (
            "without",
            FP16,
            "there is no DistributedDataParallel module, which the variables and att",
        ),
        ("right", {}, "nothing asks for Thalweg: set THALWEG_CODEC, or call thalweg.ddp.attac"),
        ("hook", FP16, "is not attached: its communication hook bf16_compress_hook wins over vari"),
        (
            "bypass",
            FP16,
            "no forward pass in training mode has gone through it: does the script ca",
        ),
        ("short", FP16, "the script has made 2 steps of its optimizer, before 3 were made"),
        ("raise", FP16, "the script ends after 0 steps with OSError: there is no data"),
        # Rank 0 is killed before it has made a report.
        ("raise on rank 1", FP16, "on rank 1 the script ends after 0 steps with OSError: there is"),
        (
            "misspelt variable",
            {"THALWEG_CODECC": "fp16"},
            "the variable THALWEG_CODECC means nothing (did you mean THALWEG_CODEC?)",
        ),
        (
            "misspelt prefix",
            {"THALWG_CODEC": "fp16"},
            "the variable THALWG_CODEC means nothing (did you mean THALWEG_CODEC?)",
        ),
    ],
)
def test_script_that_does_not_get_what_was_asked_for_is_told_why(
    tmp_path, argument, variables, said
):
    code, lines = doctor(tmp_path, argument, variables)
    assert code == 1
    assert len([line for line in lines if line.startswith("FAIL  ") and said in line]) == 1, lines
