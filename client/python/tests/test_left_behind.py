"""Tests that a job knows what an earlier one of the same parameters may hold back."""

from types import SimpleNamespace

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
    assert _left_behind.own(parameters[:2], Owner("first", codec, compresses=True), None) == []
    [remark] = _left_behind.own(parameters, Owner("second", codec, compresses=True), None)
    assert remark.startswith(
        f"2 of its parameters (a, …) are those of job first, and what its codec {codec} "
    )
    [remark] = _left_behind.own(parameters[2:], Owner("third", codec, compresses=True), None)
    assert remark.startswith("1 of its parameters (c) are those of job second")


@pytest.mark.parametrize(
    ("codec", "compresses"),
    [("fp32", True), ("bf16;a=fp16", True), ("powersgd:warm=0,feedback=0", True), ("topk", False)],
)
def test_nothing_is_said_of_a_job_that_holds_back_nothing(parameters, codec, compresses):
    _left_behind.own(parameters, Owner("first", codec, compresses), None)
    assert _left_behind.own(parameters, Owner("second", "topk", compresses=True), None) == []


def test_nothing_is_said_of_a_job_that_goes_on_with_parameters_that_another_module_shares(
    parameters,
):
    actor, critic, wrapped_anew = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    goes_on = Owner("actor", "topk", True, lambda module: module is not wrapped_anew)
    _left_behind.own(parameters[:2], goes_on, actor)
    other = Owner("critic", "topk", True, lambda module: True)
    assert _left_behind.own(parameters[1:], other, critic) == []
    [remark] = _left_behind.own(parameters[:2], Owner("third", "topk", True), wrapped_anew)
    assert remark.startswith("2 of its parameters (a, …) are those of job actor")


def test_parameters_that_are_gone_are_forgotten(parameters):
    _left_behind.own(parameters, Owner("first", "topk", compresses=True), None)
    before = len(_left_behind._owners)
    del parameters[:]
    assert len(_left_behind._owners) == before - 3
