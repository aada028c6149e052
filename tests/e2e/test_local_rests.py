"""Tests that what a worker of a LocalOptimizer has not sent is not lost."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import on_nodes
import pytest

JOBS = Path(__file__).parent / "local_rests_jobs.py"
run = functools.partial(on_nodes.run, JOBS)

LITTLE = 2.0**-16  # of a few units in the last place of float32


@pytest.mark.parametrize("codec", ["fp32", "signs:4", "sparse:0.02"])
def test_worker_that_counts_nothing_at_the_end_loses_nothing_of_before(codec, tmp_path):
    for result in run("ended_earlier", tmp_path, (1, 1), 0, CODEC=codec):
        assert result == pytest.approx([9.0, 9.0], abs=LITTLE)


@pytest.mark.parametrize("codec", ["signs:4", "sparse:0.02"])
@pytest.mark.parametrize(
    ("other", "options"),
    [
        *((other, {}) for other in ("fp32", "int8:start=0", "signs:8")),
        *((other, {"weighted": True}) for other in ("fp32", "int8:start=0", "signs:8")),
        ("fp32", {"quorum": 2}),
    ],
)
def test_finish_in_another_codec_right_after_loading_sends_the_rest(
    codec, other, options, tmp_path
):
    env = {"CODEC": codec, "OTHER": other, "OPTIONS": json.dumps(options)}
    for result in run("moved", tmp_path, (1, 1), 0, **env):
        assert result == pytest.approx([1.5, 1.5], abs=2.0**-7 if "int8" in other else LITTLE)


@pytest.mark.parametrize("codec", ["fp32", "int8:start=0", "signs"])
def test_nodes_that_may_be_lost_by_the_environment_alone_are_refused(codec, tmp_path):
    env = {"CODEC": codec, "THALWEG_MIN_NODES": "1"}
    for result in run("refused", tmp_path, (1, 1), 1, **env):
        assert "ValueError: thalweg: min_nodes (THALWEG_MIN_NODES) is 1" in result
