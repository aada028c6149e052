"""Tests `thalweg bench codec`, and the compressed size of a model."""

import math
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from thalweg.cli import main
from thalweg.codecs import BF16, FP16, FP32, Int8, OneBit, PowerSGD, parse
from thalweg_bench import codec_case, codec_rounds, compression, step_case
from thalweg_bench.programs import find_programs
from thalweg_bench.rows import BenchError
from thalweg_bench.shape import Shape
from thalweg_bench.shapes import shapes_of

SHAPES = [(64, 3, 7, 7), (64,), (1000, 2048), (8, 8), ()]


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (FP32(), "fp32"),
        (PowerSGD(), "powersgd"),
        (PowerSGD(rank=4, start_iter=2), "powersgd:rank=4,start=2"),
        (PowerSGD(epsilon=1e-8, wire="fp16"), "powersgd:wire=fp16,epsilon=1e-08"),
    ],
)
def test_short_text_reads_as_the_same_codec(codec, text):
    assert compression.shorten(codec) == text
    assert parse(text) == codec


def test_casts_send_every_element():
    elements = 64 * 147 + 64 + 1000 * 2048 + 64 + 1
    sizes = [compression.wire_bytes(codec, SHAPES) for codec in (FP32(), FP16(), BF16())]
    assert sizes == [4 * elements, 2 * elements, 2 * elements]


def test_factors_and_what_does_not_shrink_are_sent():
    # (8 + 8) * 4 is not less than half of 64.
    elements = (64 + 147) * 4 + 64 + (1000 + 2048) * 4 + 64 + 1
    codec = PowerSGD(rank=4)
    assert compression.wire_bytes(codec, SHAPES) == 4 * elements
    assert compression.wire_bytes(replace(codec, wire="fp16"), SHAPES) == 2 * elements
    assert compression.compressed_bytes(codec, SHAPES) == 4 * (64 * 147 + 1000 * 2048)


@pytest.mark.parametrize(
    ("codec", "blocks"),
    # 9408 elements are 36.75 blocks of 256 and 9.2 of 1024.
    [(Int8(), (37 + 8000) * 260), (OneBit(), (10 + 2000) * 132)],
)
def test_whole_blocks_and_small_tensors_in_fp16_are_sent(codec, blocks):
    assert compression.wire_bytes(codec, SHAPES) == blocks + 2 * (64 + 64 + 1)
    elements = 64 * 147 + 64 + 1000 * 2048 + 64 + 1
    assert compression.compressed_bytes(codec, SHAPES) == 4 * elements


@pytest.mark.parametrize("rank", [1, 2, 4, 32])
def test_the_same_gradients_are_compressed_as_by_torch(rank):
    for shape in shapes_of("resnet50") + shapes_of("bert-base"):
        rows, columns = shape[0], math.prod(shape[1:])
        low = min(rows, columns, rank)
        theirs, _, size = powerSGD_hook._should_compress(rows, columns, low, 2)
        theirs = theirs and len(shape) > 1
        ours = compression.wire_bytes(PowerSGD(rank=rank), [shape])
        assert ours == 4 * (size if theirs else rows * columns)


@pytest.mark.parametrize(
    ("text", "steps"),
    [("fp32", 2), ("powersgd:rank=4,start=10", 12), ("powersgd:start=0", 4), ("int8", 4)],
)
def test_warm_up_ends_after_compression_has_started(text, steps):
    assert compression.warm_up_steps(parse(text)) == steps


def test_bound_is_seven_passes_at_the_speed_of_memcpy():
    case = codec_case.CodecCase(codec="powersgd:rank=4", shapes="100x200,80", threads=2)
    # 2 * 80320 bytes are read and written in a microsecond.
    rows = case.rows({"thalweg": [3e-6, 2e-6, 9e-6], "memcpy": [1e-6]})
    ours, copy = rows
    assert (ours.case, ours.system, ours.bytes) == (
        "100x200,80, powersgd:rank=4, 2 threads",
        "thalweg",
        80320,
    )
    assert (ours.median_s, ours.min_s, ours.max_s) == (3e-6, 2e-6, 9e-6)
    assert ours.bound_s == pytest.approx(7 * 80000 / (2 * 80320 / 1e-6))
    assert (copy.system, copy.bound_s) == ("memcpy", None)


def test_step_is_bounded_by_its_factors():
    case = step_case.StepCase(
        shape=Shape(rate=100_000_000),
        codec="powersgd:rank=4,start=2,wire=fp16",
        peers=("ddp", "torch-powersgd"),
    )
    times = {"thalweg": [1.0], "ddp": [12.0], "torch-powersgd": [2.0], "local": [0.1]}
    bounds = {row.system: row.bound_s for row in case.rows(times)}
    sent = compression.wire_bytes(PowerSGD(4), shapes_of("resnet50"))
    assert bounds["thalweg"] == pytest.approx(sent / 2 * 8 / 1e8)
    # The bound is a ring of 4; torch sends fp32 factors.
    assert bounds["torch-powersgd"] == pytest.approx(2 * 3 / 4 * sent * 8 / 1e8)
    assert bounds["ddp"] == pytest.approx(2 * 3 / 4 * case.size * 8 / 1e8)


def make_program(folder, body):
    path = folder / "deep" / codec_rounds.PROGRAM
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    (found,) = find_programs(folder, codec_rounds.PROGRAM)
    return found


def test_program_gets_shapes_and_answers_rounds(tmp_path):
    answer = '{"seconds": 0.25, "copy_seconds": 0.125}'
    body = f'echo "$@" > {tmp_path}/seen; while read line; do echo "$line" >> {tmp_path}/seen\n'
    program = make_program(tmp_path, body + f"[ \"$line\" = round ] && echo '{answer}'; done")
    with codec_rounds.running(program, "powersgd:4", [(2, 3), (5,)], 2) as run_round:
        assert [run_round(), run_round()] == [(0.25, 0.125)] * 2
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen == ["powersgd:4 2", "2x3", "5", "", "round", "round"]


@pytest.mark.parametrize("reading", ["", "read line; read line; "])
def test_program_that_fails_is_named(tmp_path, reading):
    program = make_program(tmp_path, f"{reading}echo no memory >&2; exit 3")
    with (
        codec_rounds.running(program, "powersgd:4", [(2, 3)], 1) as run_round,
        pytest.raises(BenchError, match="thalweg-codec-rounds ended with 3: no memory"),
    ):
        run_round()


@pytest.mark.parametrize("line", ["", "1.0", "[]", '{"seconds": 1}'])
def test_other_answers_are_refused(line):
    with pytest.raises(BenchError, match="expected seconds and copy_seconds"):
        codec_rounds.parse(line)


def test_missing_program_is_named(tmp_path, capsys):
    assert main(["bench", "codec", "--dir", str(tmp_path)]) == 2
    expected = f"there is no program thalweg-codec-rounds in {tmp_path}: build first (make build)"
    assert expected in capsys.readouterr().err


def test_torch_runs_its_hook_on_one_bucket():
    from thalweg_bench.codec_torch import TorchRounds

    rounds = TorchRounds(PowerSGD(rank=2), [(40, 30), (7,), (32, 3, 3, 3)], 1)
    try:
        assert rounds.run() > 0
    finally:
        rounds.close()
    assert not dist.is_initialized()
