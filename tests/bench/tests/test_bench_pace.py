"""Tests what `thalweg bench pace`, `local` and `ps` compare their times with."""

import dataclasses
import itertools

import pytest

from thalweg.cli import _local_advice
from thalweg_bench.local_case import LocalCase
from thalweg_bench.pace_case import PaceCase
from thalweg_bench.ps_case import PsCase
from thalweg_bench.shape import Shape
from thalweg_bench.shapes import count_elements, shapes_of

ONE = PaceCase(shape=Shape(4, 1, 1, None), bytes=1000)


def test_one_slow_node_holds_up_all_but_those_that_wait_for_nobody():
    assert ONE.bound("sync") == pytest.approx(100 * 0.5)
    assert ONE.bound("stale 8") == pytest.approx(100 * 0.5)
    # Three nodes at full speed and one at a tenth share four times 100 steps.
    assert ONE.bound("async") == pytest.approx(400 / 3.1 * 0.05)
    assert ONE.systems[-2:] == ("local 10", "quorum of 3, local 10")
    assert ONE.bound("local 10") == ONE.bound("sync")
    assert ONE.bound("quorum of 3, local 10") == ONE.bound("async")


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
    # Some node is slow in at most all ten steps of an interval, and in each one somebody is.
    assert case.bound("stale 8") < case.bound("local 10") < case.bound("sync")
    # The node that is slow most often needs the longest; its slow steps take three times 50 ms.
    assert case.bound("stale 8") == pytest.approx(0.05 * (1000 + 2 * max(counts)))


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_local_updates_take_their_steps_and_the_exchange_that_is_advised_by(nodes):
    case = LocalCase(shape=Shape(nodes, 0, 1, 50_000_000, 1), every=10, forward=0.1, codec="fp16")
    size = 2 * count_elements(shapes_of("resnet50"))  # bytes, each way
    exchange = _local_advice.exchange_seconds(size, size, nodes, 50e6)
    assert case.bound("alone", 5e7) == pytest.approx(10 * (0.1 + 0.2))
    assert case.bound("local", 5e7) == pytest.approx(10 * (0.1 + 0.2) + exchange)
    # The steps took a second longer than their work; what is predicted has that second.
    times = {"alone": [4.0], "local": [1.2 * (4.0 + exchange)]}
    expected = f"local: +20.0% from the {4 + exchange:.3f} s that advice predicts, of which 4.000 s"
    assert case.advice(times).startswith(expected)


def test_steps_with_snapshots_have_the_bound_of_those_without():
    case = PsCase(shape=Shape(2, 1), steps=10, clip=1.0, snapshot_every=10, peers=())
    assert case.systems == ("workers", "servers", "snapshots")
    bounds = [case.bound(system, 5e7) for system in case.systems]
    assert bounds[1] == bounds[2] == pytest.approx(2 * bounds[0])
