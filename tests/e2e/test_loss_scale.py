"""Residuals under a loss scale that changes, through real sidecars and aggregators.

All scales are powers of two, and nothing leaves the range of normal numbers: a step's average has
the same bits with and without a loss scale, once it is divided by the scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import on_nodes
import pytest


def run(name: str, tmp_path: Path) -> list[Any]:
    jobs = Path(__file__).parent / "loss_scale_jobs.py"
    return on_nodes.run(jobs, name, tmp_path, (1, 1), shards=2, seconds=150)


@pytest.mark.parametrize(("name", "first"), [("native", 2.0**16), ("mixed", 2.0**9)])
def test_averages_do_not_depend_on_a_loss_scale_that_doubles_and_halves(name, first, tmp_path):
    results = run(name, tmp_path)
    for codec, result in results[0].items():
        assert result["scales"] == [first] * 6 + [2 * first] * 4 + [first] * 4
        assert result["finite"] == [step for step in range(14) if step != 9]
        assert result["differing"] == [], codec
        assert result["digest"] == results[1][codec]["digest"]


def test_replicas_stay_bit_identical_when_nodes_are_told_different_scales(tmp_path):
    first, second = run("told_differently", tmp_path)
    assert first == second


def test_state_that_was_saved_under_one_scale_goes_on_under_another(tmp_path):
    for result in run("resumed", tmp_path):
        assert all(steps == [] for steps in result.values()), result


def test_averages_do_not_depend_on_scalers_that_come_and_go_or_are_other_modules(tmp_path):
    for result in run("beside_each_other", tmp_path):
        assert result.keys() == {"powersgd:rank=2,start=2", "onebit"}
        for codec, differing in result.items():
            assert differing == {"never": [], "at times": [], "always": [], "late": []}, codec
