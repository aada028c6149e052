"""Tests what `thalweg bench ps` compares its times with."""

import pytest

from thalweg.cli import _local_advice
from thalweg_bench.cluster import Shape
from thalweg_bench.ps_case import PsCase
from thalweg_bench.shapes import count_elements, shapes_of


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_local_updates_take_their_work_and_the_exchange_that_is_advised_by(nodes):
    shape = Shape(nodes, 0, 1, 50_000_000, "bf16", local=True)
    case = PsCase(shape, "resnet50", 10, 0.1, None, False, True, 0, (), 1)
    size = 2 * count_elements(shapes_of("resnet50"))  # bytes, each way
    exchange = _local_advice.exchange_seconds(size, size, nodes, 50e6)
    assert case.bound("local") == pytest.approx(10 * (0.1 + 0.2) + exchange)
    assert case.bound("workers") == pytest.approx(10 * exchange)
    assert case.systems == ("workers", "servers", "local")


def test_steps_with_snapshots_have_the_bound_of_those_without():
    shape = Shape(2, 1, 1, 50_000_000, "bf16")
    case = PsCase(shape, "resnet50", 10, 0.0, 1.0, False, False, 10, (), 1)
    assert case.systems == ("workers", "servers", "snapshots")
    assert (
        case.bound("snapshots") == case.bound("servers") == pytest.approx(2 * case.bound("workers"))
    )
