"""Tests the arguments of `thalweg bench`."""

import pytest

from thalweg.cli import main
from thalweg_bench.cli import COMMANDS, case_of, make_parser
from thalweg_bench.options import step_codec


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lab", "--rate", "fast"], "the rate is 'fast'"),
        (["lab", "--peers", "gloo,nccl"], "unknown: nccl; known are gloo, iperf3, memcpy"),
        (["lab", "--bytes", "400,401"], "argument --bytes: expected a multiple of 4, got '401'"),
        (
            ["lab", "--nodes", "0"],
            "argument --nodes: expected a whole number, from 1 to 64, got '0'",
        ),
        (["lab", "--json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
        (["lab", "--shards", "0"], "--shards 0 is for one node, got --nodes 4"),
        (["lab", "--nodes", "1", "--shards", "0", "--peers", "iperf3"], "give --shards 1 or more"),
        (["lab", "--weighted"], "give --slow-shard as well"),
        (["lab", "--slow-shard", "10", "--shards", "1"], "give --shards 2 and --rate"),
        (["lab", "--slow-node", "10"], "give --nodes 2, --rate, --local-shards 1"),
        (["lab", "--local-shards", "1", "--nodes", "1"], "is for several nodes"),
        (["step", "--model", "vgg16"], "invalid choice: 'vgg16'"),
        (["step", "--codec", "zip"], "the codec is 'zip', expected one of fp32, fp16"),
        (["step", "--codec", "topk"], "topk is not measured here: expected fp32, fp16, bf16, int8"),
        (["step", "--codec", "powersgd:x"], "the codec is 'powersgd:x'"),
        (["step", "--peers", "torch-powersgd"], "does what --codec powersgd:… says: give one"),
        (["step", "--codec", "powersgd:2", "--peers", "torch-powersgd"], "give another rank"),
        (["ps", "--codec", "powersgd:4"], "invalid choice: 'powersgd:4'"),
        (["ps", "--codec", "int8", "--snapshot-every", "2"], "does not go with --snapshot-every"),
        (["local", "--rate", "none"], "links of a known rate"),
        (["local", "--codec", "int8"], "invalid choice: 'int8'"),
        (["ps", "--snapshot-every", "2", "--shards", "0"], "needs aggregators alone"),
        (["ps", "--clip", "0"], "argument --clip: expected a number, more than 0, got '0'"),
        (["codec", "--codec", "fp16"], "fp16 is not measured here: expected powersgd"),
        (["codec", "--shapes", "vgg16"], "'vgg16' is neither one of resnet50, bert-base, swin-t"),
        (["codec", "--shapes", "4x0"], "nor shapes such as 64x3x7x7,1000x2048"),
        (["codec", "--threads", "many"], "expected a whole number, from 1 to 256, got 'many'"),
        (["fsdp", "--codecs", "powersgd:4"], "shards are sent in fp16, bf16 or int8"),
        (["fsdp", "--cases", "round"], "unknown: round"),
        (["latency", "--count", "0"], "a whole number, from 1 to 100000, got '0'"),
        (["accuracy", "--seeds", "1,x"], "'1,x' is not a list of whole numbers"),
        (["accuracy", "--codec", "fp32;x"], "the codec: rule 1 'x'"),
        (["accuracy"], "give --json FILE"),
        (["suite", "--out", "x", "--only", "soak,speed"], "unknown: speed; known are allreduce-4x"),
        (["suite"], "one of --out and --list is required"),
    ],
)
def test_wrong_arguments_are_named_with_exit_code_2(capsys, arguments, message):
    try:
        code = main(["bench", *arguments])
    except SystemExit as stop:  # argparse's
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("case", COMMANDS)
def test_help_lists_the_exit_codes(capsys, case):
    with pytest.raises(SystemExit, match="0"):
        main(["bench", case, "--help"])
    assert "exit codes:" in capsys.readouterr().out


def parse(*arguments):
    return case_of(make_parser().parse_args(arguments))


def test_arguments_become_the_case():
    arguments = ["--nodes", "8", "--shards", "2", "--workers", "3", "--rate", "1gbit"]
    arguments += ["--dtype", "bf16", "--bytes", "400,8", "--peers", "gloo,memcpy", "--repeats", "7"]
    case = parse("lab", *arguments)
    shape = case.shape
    assert (shape.nodes, shape.shards, shape.workers, shape.rate) == (8, 2, 3, 10**9)
    assert (case.dtype, case.bytes, case.size) == ("bf16", (400, 8), 400)
    assert (case.peers, case.repeats, case.json) == (("gloo", "memcpy"), 7, None)


def test_what_is_not_given_has_the_defaults_of_its_case():
    assert (parse("lab").shape.rate, parse("latency").shape.rate) == (250_000_000, None)
    assert (parse("lab", "--peers", "").peers, parse("ps").codec) == ((), "bf16")
    assert parse("pace", "--nodes", "2").shape.rate is None


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
    assert step_codec(given) == codec
