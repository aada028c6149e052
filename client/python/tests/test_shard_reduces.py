"""Tests the sums of compressed gradients, between two nodes of which the other one is made up."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.distributed_c10d import ReduceOp

from thalweg._sharded._codecs import Blocks, Parts, Piece
from thalweg._sharded._comms import CompressedReduceScatter

ELEMENTS = 2048
PAIR = SimpleNamespace(size=lambda: 2)


class Pair:
    """Two nodes of a worker each, which have the same gradients."""

    carries = 1

    def sum_in_node(self, rows):
        return rows.float()

    def exchange(self, payload):
        return SimpleNamespace(wait=lambda _: None), payload

    def add_nodes(self, own, others):
        return own + sum(others)


@pytest.fixture
def reduce():
    pieces = [Piece(ELEMENTS // 2, ELEMENTS)] * 2
    codec = Parts(Blocks, pieces)
    return CompressedReduceScatter(
        "a unit", Pair(), codec, start=0, feedback=True, change=lambda: ""
    )


@pytest.fixture
def rows():
    return torch.ones(2, ELEMENTS, dtype=torch.float16)


def sums(reduce, rows):
    out = torch.empty(ELEMENTS, dtype=rows.dtype)
    assert reduce(out, rows.view(-1), PAIR, ReduceOp.SUM) is None
    return out


def test_finite_sums_are_not_counted(reduce, rows):
    assert sums(reduce, rows).isfinite().all()
    assert reduce.nonfinite_elems == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_elements_that_are_not_finite_are_counted(reduce, rows, bad):
    rows[0, 3] = rows[1, 1500] = bad
    rows[1, 7] = -bad
    assert sums(reduce, rows).isfinite().sum() == ELEMENTS - 3
    assert reduce.nonfinite_elems == 3


def test_sums_that_a_type_of_two_bytes_cannot_hold_are_counted(reduce, rows):
    rows[:, 3:5] = 40000
    assert sums(reduce, rows).isinf().sum() == 2
    assert reduce.nonfinite_elems == 2
