"""Tests that the check of a step's gradients detects wrong ones, however coarse the codec is."""

import pytest
import torch

from thalweg.codecs import parse
from thalweg_bench.rows import BenchError
from thalweg_bench.step_check import make_check

LARGEST = 9.0
NUMBERS = (0.0, 3.0, 7.5)


def step(change=lambda gradient: gradient):
    return [(change(torch.full((64, 4), number)), number) for number in NUMBERS]


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "auto", "powersgd:4", "onebit"])
def test_exact_gradients_pass(codec):
    check = make_check(parse(codec), LARGEST)
    for _ in range(10):
        check(step())


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "auto", "powersgd:4"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.3, -0.3])
def test_one_wrong_element_is_refused(codec, wrong):
    gradients = step()
    gradients[1][0][5, 2] += wrong
    with pytest.raises(BenchError, match="the gradient of parameter 1 is wrong"):
        make_check(parse(codec), LARGEST)(gradients)


def test_half_a_step_of_an_eight_bit_number_passes_twice():
    # 9 / 125 = 0.072: nodes and shards each add one such step of error.
    make_check(parse("int8"), LARGEST)(step(lambda gradient: gradient + 0.143))
    with pytest.raises(BenchError):
        make_check(parse("int8"), LARGEST)(step(lambda gradient: gradient + 0.16))


@pytest.mark.parametrize(
    "change",
    [
        lambda gradient: gradient * 0,
        lambda gradient: -gradient,
        lambda gradient: gradient * 2,
        lambda gradient: gradient * float("nan"),
    ],
)
def test_signs_are_refused_when_their_sum_runs_away(change):
    check = make_check(parse("onebit"), LARGEST)
    with pytest.raises(BenchError, match=r"the gradients of \d steps are wrong"):
        for _ in range(9):
            check(step(change))


def test_signs_may_be_late():
    check = make_check(parse("onebit"), LARGEST)
    check(step(lambda gradient: gradient * 0))
    check(step(lambda gradient: gradient * 2))
    for _ in range(8):
        check(step())
