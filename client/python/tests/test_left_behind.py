"""Tests that a job knows what an earlier one of the same parameters may hold back."""

import pytest
import torch

from thalweg._attach import _left_behind
from thalweg._attach._left_behind import Owner


@pytest.fixture
def parameters():
    return [(name, torch.nn.Parameter(torch.zeros(3))) for name in ("a", "b", "c")]


@pytest.mark.parametrize(
    "codec", ["powersgd:4", "int8", "onebit:feedback=0", "topk:0.01", "auto", "fp32;a=topk"]
)
def test_parameters_of_an_earlier_job_are_named_once(parameters, codec):
    assert _left_behind.own(parameters[:2], Owner("first", codec, compresses=True)) == []
    [remark] = _left_behind.own(parameters, Owner("second", codec, compresses=True))
    assert remark.startswith(
        f"2 of its parameters (a, …) are those of job first, and what its codec {codec} "
    )
    [remark] = _left_behind.own(parameters[2:], Owner("third", codec, compresses=True))
    assert remark.startswith("1 of its parameters (c) are those of job second")


@pytest.mark.parametrize(
    ("codec", "compresses"),
    [("fp32", True), ("bf16;a=fp16", True), ("powersgd:warm=0,feedback=0", True), ("topk", False)],
)
def test_nothing_is_said_of_a_job_that_holds_back_nothing(parameters, codec, compresses):
    _left_behind.own(parameters, Owner("first", codec, compresses))
    assert _left_behind.own(parameters, Owner("second", "topk", compresses=True)) == []


def test_parameters_that_are_gone_are_forgotten(parameters):
    _left_behind.own(parameters, Owner("first", "topk", compresses=True))
    before = len(_left_behind._owners)
    del parameters[:]
    assert len(_left_behind._owners) == before - 3
