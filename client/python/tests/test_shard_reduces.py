"""Tests the sums of compressed gradients, between two nodes of which the other one is made up."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.distributed_c10d import ReduceOp

from thalweg._sharded._codecs import Blocks, Parts, Piece
from thalweg._sharded._comms import CompressedReduceScatter
from thalweg._sharded._copies import CopiesGroup

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


@pytest.mark.parametrize(("op", "lost"), [(ReduceOp.SUM, 1), (ReduceOp.AVG, 0)])
def test_sums_over_copies_count_what_their_type_cannot_hold_beside_what_the_job_counts(op, lost):
    bucket = SimpleNamespace(elements=4, mean=lambda values: values.clone())
    exact = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    state = SimpleNamespace(became_nonfinite=0)
    group = CopiesGroup("a unit", exact, bucket, state, lambda: "")
    values = torch.tensor([1.0, 40000.0, math.inf, math.nan], dtype=torch.float16)
    how = AllreduceOptions()
    how.reduceOp = op
    group.allreduce([values], how)
    assert values.isfinite().sum() == 2 - lost
    assert state.became_nonfinite == lost
