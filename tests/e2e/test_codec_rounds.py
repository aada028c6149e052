"""Tests `thalweg bench codec` with the program of this build."""

import json
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build" / "release"
KEYS = {"case", "system", "bytes", "median_s", "min_s", "max_s", "bound_s"}


def bench(*arguments):
    argv = [sys.executable, "-m", "thalweg", "bench", "codec", "--dir", BUILD, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100)


def test_thalweg_and_torch_are_measured(tmp_path):
    shapes = ["--shapes", "64x3x7x7,64,400x300", "--repeats", "2", "--threads", "2"]
    result = bench("--codec", "powersgd:rank=2,wire=fp16", *shapes, "--json", tmp_path / "rows")
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "rows").read_text())
    assert [row["system"] for row in rows] == ["thalweg", "torch", "memcpy"]
    for row in rows:
        assert set(row) == KEYS
        assert row["bytes"] == 4 * (64 * 147 + 64 + 400 * 300)
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]


def test_shapes_without_gain_are_refused():
    result = bench("--shapes", "4x4,100", "--peers", "")
    assert result.returncode == 1
    assert "no shape has enough to gain by powersgd:rank=4" in result.stderr
