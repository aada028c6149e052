"""Tests the presentation of statistics: State.summary() and thalweg.tensorboard."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from thalweg._attach import _stats
from thalweg._attach._left_out import LeftOut
from thalweg.tensorboard import StatsWriter

POWERSGD = "powersgd:rank=4,start=10,min_rate=2,wire=fp32,warm=1,feedback=1,seed=0,epsilon=0"
PLAIN = {
    "rounds": 20,
    "raw_bytes": 4_000_000,
    "wire_bytes_sent": 2_000_000,
    "wire_bytes_received": 1_000_000,
    "nonfinite_elems": 3,
    "skipped_steps": 0,
    "copy_seconds": 0.1,
    "wait_seconds": 0.2,
    "reduce_seconds": 0.3,
    "decode_seconds": 0.06,
    "wire_seconds": 0.4,
    "total_seconds": 1.0,
    "compressed_since": 0,
    "error_ratio": 0.0,
    "residual_norm": 0.0,
    "loss_scale": 0.0,
}
PAGE = Path(__file__).parents[3] / "docs" / "summary.md"
COMPRESSED = PLAIN | {"compressed_since": 11, "error_ratio": 0.25, "residual_norm": 12.5}


def test_casts_are_described_by_bytes_of_each_direction():
    assert _stats.describe("fp16", PLAIN, "cpu") == (
        "gradients: 20 buckets, 4.0 MB\npath: cpu\ncodec: fp16\n"
        "network: sent 2.0 MB (2.00x less), received 1.0 MB (4.00x less)\n"
        "seconds: copy 0.10, wait 0.20, reduce 0.30, decode 0.06, wire 0.40, total 1.00\n"
        "non-finite elements: 3"
    )


def test_placement_follows_the_path():
    text = _stats.describe("fp16", PLAIN, "cpu, 2 shards", placement="100 MB take 1 s")
    assert "\npath: cpu, 2 shards\nplacement: 100 MB take 1 s\ncodec: fp16\n" in text


def test_compression_is_described_with_its_begin_and_its_loss():
    text = _stats.describe(POWERSGD, COMPRESSED, "pinned")
    assert f"\npath: pinned\ncodec: {POWERSGD} since iteration 10\nnetwork: sent 2.0 MB" in text
    assert "\nrelative error: 0.25\nnorm of the residual: 12.5\nseconds: " in text


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (0, "sent nothing, "),
        (4_000_000, "sent 4.0 MB, "),
        (5_000_000, "sent 5.0 MB (1.25x more), "),
    ],
)
def test_bytes_that_are_not_fewer_are_not_said_to_be_less(wire, said):
    assert said in _stats.describe("fp16", PLAIN | {"wire_bytes_sent": wire}, "cpu")


@pytest.mark.parametrize(
    ("codec", "meaning"),
    [
        ("topk:ratio=0.01,start=2,feedback=1", "(of one step: what it leaves out is held back"),
        ("topk:ratio=0.01,start=2,feedback=0", "(feedback=0: what a step leaves out is lost)"),
    ],
)
def test_error_of_a_step_that_leaves_most_out_is_explained(codec, meaning):
    text = _stats.describe(codec, COMPRESSED | {"error_ratio": 1.0}, "cpu")
    assert f"relative error: 1 {meaning}" in text


def test_compression_that_has_not_begun_says_so():
    text = _stats.describe(POWERSGD, PLAIN, "cpu")
    assert f"codec: {POWERSGD} (not compressing yet)\nnetwork: sent" in text
    assert "relative error" not in text
    assert "residual" not in text
    assert "not compressing" not in _stats.describe("fp32", PLAIN, "cpu")


def test_what_the_codec_leaves_out_is_described_in_place_of_a_beginning_to_come():
    alone = LeftOut(("powersgd compresses nothing: why",), everything=True)
    text = _stats.describe(POWERSGD, PLAIN, "cpu", alone)
    assert f"\ncodec: {POWERSGD}\npowersgd compresses nothing: why\nnetwork: sent" in text
    text = _stats.describe(POWERSGD, PLAIN, "cpu", alone._replace(everything=False))
    assert "(not compressing yet)\npowersgd compresses nothing: why\nnetwork: sent" in text


def test_loss_scale_is_described_where_there_is_one():
    text = _stats.describe("fp16", PLAIN | {"loss_scale": 65536.0, "skipped_steps": 2}, "cpu")
    assert "\nloss scale: 65536, skipped steps 2\nseconds: " in text


def test_page_explains_every_line_and_every_key():
    page = PAGE.read_text("utf-8")
    rows = {row[0]: row[1] for row in re.findall(r"^\| (.+?) \| (.*?) \|", page, re.MULTILINE)}
    stats = COMPRESSED | {"loss_scale": 2.0, "compression": 2.0}
    text = _stats.describe("fp16", stats, "cpu", placement="2 shards")
    assert {line.partition(": ")[0] for line in text.splitlines()} - set(rows) == set()
    in_the_middle = {f"{name}_seconds" for name in _stats.SECONDS[1:-1]}  # of copy … total
    keys = set(re.findall(r"`(\w+)`", " ".join(rows.values())))
    assert set(stats) - in_the_middle - keys == set()


@pytest.mark.parametrize(("raw", "wire", "ratio"), [(8, 2, 4.0), (0, 0, 1.0)])
def test_nothing_sent_is_no_compression(raw, wire, ratio):
    assert _stats.ratio(raw, wire) == ratio


class Recorder:
    """Records scalars; its arguments are positional, as in torch's SummaryWriter."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        assert walltime is None
        self.scalars[tag, global_step] = scalar_value


class Counting:
    """A state that returns the given statistics, one after the other."""

    def __init__(self, *stats):
        self.left = list(stats)

    def stats(self):
        return self.left.pop(0)


def test_scalars_are_what_happened_since_the_write_before():
    later = COMPRESSED | {
        "rounds": 30,
        "raw_bytes": 6_000_000,
        "wire_bytes_sent": 2_100_000,
        "wire_bytes_received": 1_200_000,
        "decode_seconds": 0.5,
        "error_ratio": 0.5,
        "loss_scale": 512.0,
        "skipped_steps": 3,
    }
    writer = Recorder()
    log = StatsWriter(Counting(COMPRESSED, later), writer)
    log.write(7)
    log.write(8)
    found = writer.scalars
    assert found["thalweg/bytes/raw", 7] == 4_000_000
    assert found["thalweg/bytes/raw", 8] == 2_000_000
    assert found["thalweg/bytes/sent", 8] == 100_000
    assert found["thalweg/bytes/received", 8] == 200_000
    assert found["thalweg/compression/sent", 7] == 2
    assert found["thalweg/compression/sent", 8] == 20
    assert found["thalweg/compression/received", 8] == 10
    assert found["thalweg/seconds/decode", 8] == pytest.approx(0.44)
    assert found["thalweg/buckets", 8] == 10
    assert found["thalweg/nonfinite_elements", 7] == 3
    assert found["thalweg/error_ratio", 8] == 0.5
    assert found["thalweg/residual_norm", 8] == 12.5
    assert found["thalweg/skipped_steps", 8] == 3
    assert found["thalweg/loss_scale", 8] == 512
    assert {step for _, step in found} == {7, 8}


def test_what_there_is_nothing_to_say_of_is_left_out():
    writer = Recorder()
    log = StatsWriter(Counting(PLAIN, PLAIN), writer, prefix="job")
    log.write(0)
    log.write(1)
    tags = {tag for tag, _ in writer.scalars}
    assert all(tag.startswith("job/") for tag in tags)
    assert not tags & {"job/error_ratio", "job/residual_norm", "job/loss_scale"}
    assert ("job/compression/sent", 0) in writer.scalars
    assert ("job/compression/sent", 1) not in writer.scalars  # nothing was sent


def test_writing_needs_neither_torch_nor_tensorboard():
    script = "import sys, thalweg.tensorboard; print(*{'torch', 'tensorboard'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (printed.returncode, printed.stdout.strip()) == (0, ""), printed.stderr
