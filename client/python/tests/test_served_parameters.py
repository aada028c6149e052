"""Tests which parameters shards update, and which of them are in a bucket."""

import itertools

import pytest
import torch
from torch import nn

from thalweg.codecs import FP16, FP32, Int8, OneBit
from thalweg.policy import Policy, Rule
from thalweg.ps._parameters import Parameter, cut, served
from thalweg.ps._pushed_grad import PushedGrad

MIB = 1 << 20


def parameters(sizes, dtypes=()):
    """Returns some of so many bytes each, "0", "1" and so on; types are float32 by default."""
    each = itertools.zip_longest(sizes, dtypes, fillvalue=torch.float32)
    return [
        Parameter(str(number), torch.empty(size // dtype.itemsize, dtype=dtype), 0, 0)
        for number, (size, dtype) in enumerate(each)
    ]


def names(buckets):
    return ["".join(each.name for each in bucket) for bucket in buckets]


def test_buckets_have_the_parameters_from_the_last_on_as_far_as_their_bytes_allow():
    assert names(cut(parameters([4, 8, 4, 8]), 12)) == ["32", "10"]
    assert names(cut(parameters([4, 8, 4, 8]), 11)) == ["3", "2", "1", "0"]
    assert names(cut(parameters([4, 4, 16, 4, 4]), 12)) == ["43", "2", "10"]
    assert names(cut(parameters([4, 0, 4]), 4)) == ["21", "0"]
    assert cut([], 12) == []


def test_first_bucket_is_small_so_that_it_leaves_early():
    quarters = parameters([MIB // 4] * 10)
    assert names(cut(quarters, 2 * MIB)) == ["9876", "543210"]
    assert names(cut(quarters, MIB // 2)) == ["98", "76", "54", "32", "10"]


def test_bucket_has_one_type_and_each_type_goes_on_filling_its_own():
    dtypes = [torch.float32, torch.bfloat16] * 3
    assert names(cut(parameters([4] * 6, dtypes), 8)) == ["53", "42", "1", "0"]


CODECS = [(Int8(), ["3", "2", "10"]), (OneBit(), ["3", "2", "10"]), (FP16(), ["3210"])]


@pytest.mark.parametrize(("codec", "buckets"), CODECS)
def test_parameter_whose_gradient_is_not_sent_in_floats_has_a_bucket_alone(codec, buckets):
    codecs = Policy(FP32(), [Rule(codec, name="2"), Rule(codec, name="3")])
    assert names(cut(parameters([4] * 4), 100, codecs)) == buckets


def group(*sizes, **settings):
    return {"params": [nn.Parameter(torch.empty(size)) for size in sizes], **settings}


def test_served_parameters_require_a_gradient_and_are_told_apart_by_name_and_group():
    groups = [group(1, 2, 3), group(4, 5, param_names=["head", "tail"])]
    groups[0]["params"][1].requires_grad_(False)
    found = [(each.name, each.tensor.numel(), each.group) for each in served(groups)]
    assert found == [("0.0", 1, 0), ("0.2", 3, 0), ("head", 4, 1), ("tail", 5, 1)]
    assert [each.settings for each in served(groups)] == [0, 0, 1, 1]
    assert [each.settings for each in served(groups, apart=True)] == [0, 1, 2, 3]


def test_gradient_that_has_been_pushed_is_none_to_gather():
    weight = nn.Parameter(torch.ones(2))
    [parameter] = served([{"params": [weight]}])
    assert not parameter.has_gradient
    weight.grad = torch.zeros(2)
    assert parameter.has_gradient
    weight.grad = PushedGrad(weight, "0.0", set())
    assert not parameter.has_gradient
