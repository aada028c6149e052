"""Tests the arguments of `thalweg bench`."""

import pytest

from thalweg.cli import main
from thalweg_bench import lab_case
from thalweg_bench.cli import _types as types


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lab", "--rate", "fast"], "the rate is 'fast'"),
        (["lab", "--peers", "gloo,nccl"], "unknown: nccl; known are gloo, iperf3, memcpy"),
        (["lab", "--bytes", "401"], "401 is not a multiple of 4"),
        (["lab", "--nodes", "0"], "0 is not between 1 and 64"),
        (["lab", "--json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
        (["lab", "--shards", "0"], "--shards 0 is for one node, got --nodes 4"),
        (["lab", "--nodes", "1", "--shards", "0", "--peers", "iperf3"], "give --shards 1 or more"),
        (["lab", "--weighted"], "give --slow-shard as well"),
        (["lab", "--slow-shard", "10", "--shards", "1"], "give --shards 2 and --rate"),
        (["step", "--model", "vgg16"], "invalid choice: 'vgg16'"),
        (["step", "--codec", "zip"], "the codec is 'zip', expected one of fp32, fp16"),
        (["step", "--codec", "topk"], "topk is not measured here: expected fp32, fp16, bf16, int8"),
        (["step", "--codec", "powersgd:x"], "the codec is 'powersgd:x'"),
        (["step", "--peers", "torch-powersgd"], "does what --codec powersgd:… says: give one"),
        (["step", "--codec", "powersgd:2", "--peers", "torch-powersgd"], "give another rank"),
        (["ps", "--codec", "powersgd:4"], "invalid choice: 'powersgd:4'"),
        (["codec", "--codec", "fp16"], "fp16 is not measured here: expected powersgd"),
        (["codec", "--shapes", "vgg16"], "'vgg16' is neither one of resnet50, bert-base, swin-t"),
        (["codec", "--shapes", "4x0"], "nor shapes such as 64x3x7x7,1000x2048"),
        (["codec", "--threads", "0"], "0 is not between 1 and 256"),
        (["placement", "--nodes", "1,2"], "1 is not between 2 and 64"),
        (["fsdp", "--codecs", "powersgd:4"], "shards are sent in fp16, bf16 or int8"),
        (["fsdp", "--cases", "round"], "round"),
        (["latency", "--count", "0"], "0 is not between 1 and 100000"),
    ],
)
def test_wrong_arguments_are_named_with_exit_code_2(capsys, arguments, message):
    try:
        code = main(["bench", *arguments])
    except SystemExit as stop:  # argparse's
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "case",
    [
        "lab",
        "step",
        "latency",
        "sweep",
        "soak",
        "placement",
        "codec",
        "fsdp",
        "accuracy",
        "suite",
        "report",
        "micro",
    ],
)
def test_help_lists_the_exit_codes(capsys, case):
    with pytest.raises(SystemExit, match="0"):
        main(["bench", case, "--help"])
    assert "exit codes:" in capsys.readouterr().out


def test_arguments_become_the_case(monkeypatch, capsys):
    cases = []

    def run(case):
        cases.append(case)
        return lab_case.Outcome([], [])

    monkeypatch.setattr(lab_case, "run", run)
    arguments = ["--nodes", "8", "--shards", "2", "--workers", "3", "--rate", "1gbit"]
    arguments += ["--dtype", "bf16", "--bytes", "400", "--peers", "gloo,memcpy", "--repeats", "7"]
    assert main(["bench", "lab", *arguments]) == 0
    (case,) = cases
    shape = case.shape
    assert (shape.nodes, shape.shards, shape.workers, shape.rate) == (8, 2, 3, 10**9)
    assert (case.dtype, case.size, case.peers, case.repeats) == (
        "bf16",
        400,
        ("gloo", "memcpy"),
        7,
    )


@pytest.mark.parametrize(
    ("given", "codec"),
    [
        ("bf16", "bf16"),
        ("powersgd:4", "powersgd:rank=4,start=2"),
        ("powersgd:rank=4,start=1000", "powersgd:rank=4"),
        ("powersgd:start=7,wire=fp16", "powersgd:start=7,wire=fp16"),
    ],
)
def test_steps_are_compressed_from_the_start(given, codec):
    assert types.step_codec(given) == codec
