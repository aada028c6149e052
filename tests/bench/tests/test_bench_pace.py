"""Tests what `thalweg bench pace` and `predict` compare their times with."""

import dataclasses
import itertools

import pytest

from thalweg_bench import predict_case
from thalweg_bench.cluster import Shape
from thalweg_bench.pace_case import PaceCase
from thalweg_bench.rows import make_row

ONE = PaceCase(Shape(4, 1, 1, None, "fp32"), 1000, 100, 0.05, "one", 10.0, 8, 3)


def test_one_slow_node_holds_up_all_but_those_that_wait_for_nobody():
    assert ONE.bound("sync") == pytest.approx(100 * 0.5)
    assert ONE.bound("stale 8") == pytest.approx(100 * 0.5)
    # Three nodes at full speed and one at a tenth share four times 100 steps.
    assert ONE.bound("async") == pytest.approx(400 / 3.1 * 0.05)


@pytest.mark.parametrize("nodes", [4, 8])
def test_random_slow_node_is_another_one_in_most_steps_and_all_are_slow_alike(nodes):
    shape = dataclasses.replace(ONE.shape, nodes=nodes)
    case = dataclasses.replace(ONE, shape=shape, slow="random", factor=3.0, steps=1000)
    slow = [
        [rank for rank in range(nodes) if case.seconds_of(rank, step) > 0.1] for step in range(1000)
    ]
    assert all(len(each) == 1 for each in slow)
    counts = [slow.count([rank]) for rank in range(nodes)]
    assert min(counts) > 0.8 * 1000 / nodes
    assert sum(a != b for a, b in itertools.pairwise(slow)) > 500
    assert case.bound("sync") == pytest.approx(1000 * 0.15)
    # The node that is slow most often needs the longest; its slow steps take three times 50 ms.
    assert case.bound("stale 8") == pytest.approx(0.05 * (1000 + 2 * max(counts)))


def test_predictions_are_of_twelve_configurations_and_errors_of_both_signs_count():
    asked = predict_case.predictions("resnet50", 10, 0.1)
    assert len({str(each) for each in asked}) == 12
    # 25.6 million parameters of 4 bytes go up and come down, each for a half.
    assert asked[0].seconds == pytest.approx(3 + 25_557_032 * 32 / 50e6)
    rows = [
        make_row("", "local", 0, [each.seconds * (1.2 if number else 0.7)], None)
        for number, each in enumerate(asked)
    ]
    assert "off by 20.0% (median), 30.0% (worst)" in predict_case.format_errors(asked, rows)
