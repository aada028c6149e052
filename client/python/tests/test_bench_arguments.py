"""What `thalweg bench` accepts."""

import pytest

from thalweg.bench import lab_case
from thalweg.cli import main


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
    "case", ["lab", "step", "latency", "sweep", "soak", "suite", "report", "micro"]
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
    arguments += ["--codec", "bf16", "--bytes", "400", "--peers", "gloo,memcpy", "--repeats", "7"]
    assert main(["bench", "lab", *arguments]) == 0
    (case,) = cases
    shape = case.shape
    assert (shape.nodes, shape.shards, shape.workers, shape.rate) == (8, 2, 3, 10**9)
    assert (shape.codec, case.size, case.peers, case.repeats) == (
        "bf16",
        400,
        ("gloo", "memcpy"),
        7,
    )
