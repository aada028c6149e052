"""Tests the T5 example in a tiny variant: one worker on each of two nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import Job, servers

from thalweg.examples.t5 import data, loop

JOBS = Path(__file__).parent / "t5_jobs.py"
TINY = ["--size", "tiny", "--source-length", "32", "--target-length", "8", "--batch-size", "8"]
TESTED = ["--test-batch-size", "4", "--test-limit", "8", "--samples", "1"]


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    data.prepare(folder, vocabulary=400, limit=60)
    return folder


def run(tmp_path: Path, functions: Path, out: Path, *options: str, workers: int = 1) -> str:
    """Runs the example, with so many workers on each node, to its end; returns what it prints."""
    tmp_path.mkdir(exist_ok=True)
    argv = ["--data", str(functions), "--out", str(out), *TINY, *TESTED, *options]
    with servers() as cluster:
        for _ in range(2):
            cluster.add_sidecar("--shard-listen", "127.0.0.1:0")
        sockets = [str(cluster.folder / f"s{node}.sock") for node in range(2)]
        sockets = [socket for socket in sockets for _ in range(workers)]
        env = {"OPTIONS": json.dumps(argv), "LOCAL_WORLD_SIZE": str(workers)}
        job = Job("t5", cluster, tmp_path, sidecar_of=sockets, env=env, jobs=JOBS)
        assert job.results() == [0] * len(sockets)
        return job.output


def history_of(out: Path):
    return json.loads((out / "history.json").read_text(encoding="utf-8"))


@pytest.mark.long
def test_example_trains_tests_and_saves(functions, tmp_path):
    out = tmp_path / "out"
    said = run(tmp_path, functions, out, "--epochs", "1", "--steps", "6", "--save-model")
    history = history_of(out)
    losses = history["step_losses"]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    [epoch] = history["epochs"]
    assert {"test_loss", "rouge1", "rougeL", "tokens_per_second", "state_mb"} <= epoch.keys()
    assert "chosen:" in said
    [folder] = [path for path in out.iterdir() if path.is_dir()]
    assert loop.is_complete(folder)
    [file] = out.glob("t5-*.pt")
    assert "encoder.block.0.layer.0.SelfAttention.q.weight" in torch.load(file)["model"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ["--strategy", "full", "--precision", "bf16"],
        ["--strategy", "grad-op", "--precision", "fp16", "--activation-checkpointing"],
        ["--strategy", "hybrid", "--precision", "gradients-bf16"],
        ["--strategy", "full", "--fsdp", "1", "--prefetch", "post", "--activation-checkpointing"],
        ["--strategy", "ddp"],
        ["--strategy", "full", "--codec", "int8"],
        ["--strategy", "hybrid", "--codec", "powersgd:rank=2,start=1"],
    ],
    ids=lambda options: "-".join(option.strip("-") for option in options),
)
def test_resumed_example_has_the_losses_of_one_that_never_stopped(functions, tmp_path, options):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = [*options, "--steps", "3", "--no-validation"]
    run(tmp_path / "1", functions, whole, *options, "--epochs", "2")
    run(tmp_path / "2", functions, halves, *options, "--epochs", "1")
    [saved] = [path for path in halves.iterdir() if path.is_dir()]
    run(tmp_path / "3", functions, halves, *options, "--epochs", "2", "--resume", str(saved))
    assert history_of(halves)["step_losses"] == history_of(whole)["step_losses"]


@pytest.mark.long
def test_example_goes_on_with_another_number_of_workers_without_what_was_held_back(
    functions, tmp_path
):
    options, resume = (
        ["--codec", "int8", "--batch-size", "4", "--steps", "3", "--no-validation"],
        [],
    )
    for epochs, workers in enumerate([2, 1, 2], 1):
        out = tmp_path / f"out{epochs}"
        of_now = [*options, "--epochs", str(epochs), *resume]
        said = run(tmp_path / str(epochs), functions, out, *of_now, workers=workers)
        assert ("what is held back of gradients begins at zero" in said) == (epochs > 1)
        assert len(history_of(out)["step_losses"]) == 3 * epochs
        [saved] = [path for path in out.iterdir() if path.is_dir()]
        resume = ["--resume", str(saved)]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["1", "2"])
def test_table_has_all_precisions_and_strategies(functions, tmp_path, kind):
    said = run(tmp_path, functions, tmp_path / "out", "--compare", "--steps", "1", "--fsdp", kind)
    table = json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))
    rows = {(row["precision"], row["strategy"]): row for row in table["rows"]}
    assert len(rows) == 13  # 4 precisions x 3 strategies, and DistributedDataParallel
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    # Two workers keep half of the state each, but for padding; with one worker on each node,
    # "hybrid" has nothing to shard.
    sharded, copied = (rows["fp32", name]["state_mb"] for name in ("full", "hybrid"))
    assert copied / 2 <= sharded < 0.6 * copied
    assert (tmp_path / "out" / "table.png").stat().st_size > 0
    assert "| fp32 | full |" in said


NEAR = 0.05  # of a loss


def losses_of(functions, folder, *options):
    """Returns what the comparison of codecs prints, and its losses by strategy and codec."""
    said = run(folder, functions, folder, "--losses", "--steps", "4", "--seeds", "2", *options)
    table = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    return said, {(row["strategy"], row["codec"]): row["losses"] for row in table["rows"]}


@pytest.mark.long
def test_losses_of_each_codec_stand_beside_those_of_float32(functions, tmp_path):
    said, rows = losses_of(functions, tmp_path / "trained", "--codecs", "int8", "onebit")
    _, untrained = losses_of(functions, tmp_path / "untrained", "--codecs", "int8", "--lr", "0")
    assert list(rows) == [
        *(("full", "fp32"), ("full", "int8")),
        *(("hybrid", "fp32"), ("hybrid", "int8"), ("hybrid", "onebit")),
    ]
    for losses in rows.values():
        assert len(set(losses)) == 2  # seeds choose weights and order
        assert losses == pytest.approx(rows["full", "fp32"], rel=NEAR)
    # So near is only what has trained.
    for still, exact in zip(untrained["full", "int8"], rows["full", "fp32"], strict=True):
        assert still != pytest.approx(exact, rel=NEAR)
    assert rows["full", "fp32"] != rows["hybrid", "onebit"]
    assert "| full | fp32 |" in said
