"""Tests what optimizers whose work shards do say of arguments, before workers meet."""

import pytest
import torch

from thalweg.codecs import Signs, Sparse
from thalweg.ps import _local
from thalweg.ps._plan import Outer
from thalweg.ps._rules import make


def make_weights():
    return [torch.nn.Parameter(torch.zeros(3))]


def test_argument_that_an_optimizer_does_not_have_is_named_as_the_script_gives_it():
    with pytest.raises(TypeError, match=r"thalweg: Here\(\) has no argument beta; .* lr, momentum"):
        make("sgd", make_weights(), {"lr": 0.1, "beta": 1}, "Here()")


def test_argument_of_the_other_optimizer_is_named_as_that_one_s():
    with pytest.raises(TypeError, match="no argument quorum, which is one of LocalOptimizer"):
        make("adamw", make_weights(), {"quorum": 2}, "ServerOptimizer(…, 'adamw')")


def test_argument_that_the_outer_optimizer_does_not_have_is_named_with_it():
    with pytest.raises(
        TypeError, match=r"LocalOptimizer\(outer=.*'adam', …}\) has no argument beta;"
    ):
        Outer.of({"name": "adam", "beta": 1}, make_weights())


@pytest.mark.parametrize(("kind", "native"), [("lamb", "max_grad_norm"), ("sgd", "nesterov")])
def test_arguments_that_an_optimizer_has_are_taken(kind, native):
    group = make(kind, make_weights(), {"lr": 0.1, native: 0}, "Here()").param_groups[0]
    assert (group["lr"], group[native]) == (0.1, 0)


@pytest.mark.parametrize("codec", ["sign", "sparse-entries:0.1", "sign;bias=fp32"])
def test_misspelt_codec_of_local_updates_is_refused_with_those_of_workers(codec):
    with pytest.raises(ValueError, match=r"auto, sparse, signs"):
        _local._of_workers(codec)


@pytest.mark.parametrize(
    ("codec", "own"),
    [
        ("signs:2", Signs(2)),
        ("sparse", Sparse()),
        (Signs(), Signs()),
        ("int8; bias=fp32", None),
        (" fp16 ; a=fp32", None),
        (None, None),
    ],
)
def test_codec_of_workers_is_told_from_those_of_gradients(codec, own):
    assert _local._of_workers(codec) == own
