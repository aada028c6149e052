"""Tests which parameters are said to be left as they are by their codec."""

import pytest

from thalweg._attach import _left_out
from thalweg._job._topology import Tensor

FLOAT = Tensor("layer.weight", "float32", (64, 64))
DOUBLE = Tensor("head.weight", "float64", (64, 64))
BIAS = Tensor("head.bias", "float64", (64,))
LOSSY = ["powersgd:rank=4", "int8", "onebit", "topk:0.1", "auto"]


@pytest.mark.parametrize("codec", [*LOSSY, "fp16", "bf16"])
def test_float64_parameters_are_counted_under_every_codec_that_would_lose_digits(codec):
    remarks, everything = _left_out.find(codec, (FLOAT, DOUBLE, BIAS), num_nodes=2)
    [remark] = remarks
    name = codec.partition(":")[0]
    gradients = "gradients of 2 of 3 parameters (head.weight, …)"
    assert remark.startswith(f"{gradients} stay uncompressed in spite of {name}: they are float64")
    assert "train in float32" in remark
    assert not everything


def test_module_in_float64_leaves_the_codec_nothing_to_do():
    left_out = _left_out.find("fp16", (DOUBLE,), num_nodes=2)
    assert "gradients of 1 of 1 parameters (head.weight) stay" in left_out.remarks[0]
    assert left_out.everything


@pytest.mark.parametrize("codec", LOSSY)
def test_one_node_compresses_nothing(codec):
    remarks, everything = _left_out.find(codec, (FLOAT,), num_nodes=1)
    [remark] = remarks
    assert remark.startswith("gradients of 1 of 1 parameters (layer.weight) stay uncompressed")
    assert f"in spite of {codec.partition(':')[0]}: all workers are on one node" in remark
    assert everything


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_casts_on_one_node_round_and_are_said_to_save_nothing(codec):
    remarks, everything = _left_out.find(codec, (FLOAT, DOUBLE), num_nodes=1)
    [of_double, remark] = remarks
    assert "they are float64" in of_double
    assert remark.startswith(
        f"gradients of 1 of 2 parameters (layer.weight) are rounded to {codec}, and no byte is "
    )
    assert "two torchruns on one machine are one node" in remark
    assert not everything


def test_casts_beside_a_codec_that_does_nothing_on_one_node_are_not_remarked():
    other = Tensor("other.weight", "float32", (8, 8))
    remarks, everything = _left_out.find("int8;layer.*=bf16", (FLOAT, other), num_nodes=1)
    assert "gradients of 1 of 2 parameters (other.weight) stay" in remarks[0]
    assert "in spite of int8: " in remarks[0]
    assert not everything


@pytest.mark.parametrize(("ratio", "times"), [("1", "1.25"), ("0.8", "1")])
def test_topk_that_sends_more_than_fp32_is_remarked(ratio, times):
    [remark] = _left_out.find(f"fp32;layer.*=topk:{ratio}", (FLOAT,), num_nodes=2).remarks
    assert remark.startswith(f"topk with ratio={ratio} sends at least {times} times the bytes of")
    assert _left_out.find("topk:0.7", (FLOAT,), num_nodes=2) == _left_out.NOTHING


@pytest.mark.parametrize(
    ("codec", "model", "nodes"),
    [
        ("fp32", (FLOAT, DOUBLE), 1),
        ("powersgd:4;head.*=fp32", (FLOAT, DOUBLE, BIAS), 2),
        ("onebit;elems>64=fp32", (FLOAT,), 1),
        ("powersgd:4", (FLOAT,), 2),
        ("powersgd:4", (), 1),
    ],
)
def test_nothing_is_remarked_where_every_parameter_has_what_was_asked_for(codec, model, nodes):
    assert _left_out.find(codec, model, nodes) == _left_out.NOTHING


def test_rules_decide_which_codecs_are_named():
    remarks, _ = _left_out.find("fp32;*.bias=int8;head.*=fp16", (FLOAT, BIAS, DOUBLE), 1)
    assert ["in spite of int8 and fp16: " in remark for remark in remarks] == [True]
    remarks, _ = _left_out.find("powersgd:4;head.*=fp16", (FLOAT, DOUBLE), 1)
    assert "in spite of fp16: they are float64" in remarks[0]
    assert "in spite of powersgd: all workers" in remarks[1]


def test_rule_that_matches_no_parameter_is_remarked_with_names_that_there_are():
    remarks, everything = _left_out.find("fp16;hed.*=fp32;layer.*=bf16", (FLOAT,), num_nodes=2)
    [remark] = remarks
    assert (
        remark == "the rule 'hed.*=fp32' applies to no parameter: the parameters are layer.weight"
    )
    assert not everything


def test_rule_that_comes_too_late_is_remarked():
    remarks, _ = _left_out.find("fp16;*.weight=fp32;layer.*=bf16", (FLOAT,), num_nodes=2)
    [remark] = remarks
    assert remark == (
        "the rule 'layer.*=bf16' applies to no parameter: rules before it apply to all that it "
        "matches (layer.weight)"
    )


def test_matrices_are_named_where_powersgd_shortens_none_of_them():
    bias = Tensor("layer.bias", "float32", (64,))
    remarks, everything = _left_out.find("powersgd:rank=16", (FLOAT, bias), num_nodes=2)
    assert remarks == (
        "gradients of 1 of 2 parameters (layer.weight) stay uncompressed in spite of powersgd: "
        "their factors would not be smaller by min_rate: choose a lower rank, or another codec",
    )
    assert everything
    other = Tensor("other.weight", "float32", (640, 640))
    assert _left_out.find("powersgd:rank=16", (FLOAT, other), num_nodes=2) == ((), False)
    # 64 * 64 elements are more than 2 * (64 + 64) * 15.
    remarks, everything = _left_out.find("powersgd:rank=15", (FLOAT, bias), num_nodes=2)
    assert (remarks, everything) == ((), False)


def test_casts_to_another_type_of_16_bits_are_said_to_do_nothing():
    half = Tensor("layer.weight", "bfloat16", (64, 64))
    remarks, everything = _left_out.find("fp16", (half,), num_nodes=2)
    assert remarks == (
        "gradients of 1 of 1 parameters (layer.weight) stay as they are in spite of fp16: they are "
        "bfloat16, which is as short",
    )
    assert everything
    assert _left_out.find("bf16", (half,), num_nodes=2) == ((), False)
