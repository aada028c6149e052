"""Tests when fragments leave, and what is in them."""

import pytest
import torch

from thalweg.ps._parameters import Parameter
from thalweg.ps._plan import Plan, cut_fragments

PLANS = [(every, fragments) for every in (1, 2, 7, 50) for fragments in range(1, every + 1)]


@pytest.mark.parametrize(("every", "fragments"), PLANS)
def test_each_fragment_leaves_once_in_an_interval_and_alone(every, fragments):
    plan = Plan(every, fragments, 0, 0.0, False)
    plan.check()
    steps = range(1, 2 * every + 1)
    left = [(step, f) for step in steps for f in range(fragments) if plan.leaves(f, step)]
    assert [f for _, f in left] == 2 * list(range(fragments))
    # As evenly as whole steps allow, and the last fragment at the end of the interval.
    ends = [step for step, _ in left]
    gaps = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    assert set(gaps) <= {every // fragments, -(-every // fragments)}
    assert ends[-1] == 2 * every


def parameters(sizes: list[int]) -> list[Parameter]:
    return [Parameter(f"p{i}", torch.empty(size), 0, 0) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [[9, 1, 1, 1, 1, 1], [3, 3, 3, 3, 3], [1, 2, 4, 8, 16, 32, 31]])
def test_fragments_have_all_parameters_and_differ_by_one_at_most(count, sizes):
    fragments = cut_fragments(parameters(sizes), count)
    names = [each.name for fragment in fragments for each in fragment]
    assert sorted(names) == sorted(f"p{i}" for i in range(len(sizes)))
    totals = [sum(each.tensor.numel() for each in fragment) for fragment in fragments]
    # The last parameter that the largest fragment got was dealt out when it was the smallest one.
    assert max(totals) - min(totals) <= max(sizes)
    for fragment in fragments:
        assert [each.name for each in fragment] == sorted(each.name for each in fragment)


def test_one_large_parameter_is_a_fragment_of_its_own():
    first, second = cut_fragments(parameters([1, 2, 100, 3, 4]), 2)
    assert [each.name for each in first] == ["p2"]
    assert [each.name for each in second] == ["p0", "p1", "p3", "p4"]
