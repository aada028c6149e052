import dataclasses
import pickle
import subprocess
import sys

import pytest

import thalweg
from thalweg import codecs
from thalweg.codecs import BF16, FP16, FP32, Auto, Codec, Int8, OneBit, PowerSGD, TopK, parse

KINDS = [FP32, FP16, BF16, PowerSGD, Int8, OneBit, TopK, Auto]
POWERSGD = "powersgd:rank=1,start=1000,min_rate=2,wire=fp32,warm=1,feedback=1,seed=0,epsilon=0"


@pytest.mark.parametrize(
    ("codec", "spec"),
    [
        (FP32(), "fp32"),
        (FP16(), "fp16"),
        (BF16(), "bf16"),
        (PowerSGD(), POWERSGD),
        (
            PowerSGD(
                rank=4,
                start_iter=10,
                min_compression_rate=1.5,
                wire="fp16",
                warm_start=False,
                use_error_feedback=False,
                seed=7,
                epsilon=1e-8,
            ),
            "powersgd:rank=4,start=10,min_rate=1.5,wire=fp16,warm=0,feedback=0,seed=7,epsilon=1e-08",
        ),
        (Int8(), "int8:start=2,feedback=1"),
        (OneBit(start_iter=0), "onebit:start=0,feedback=1"),
        (TopK(), "topk:ratio=0.01,start=2,feedback=1"),
        (TopK(0.25, use_error_feedback=False), "topk:ratio=0.25,start=2,feedback=0"),
        (Auto(), "auto:rank=4,start=1000,seed=0"),
        (Auto(rank=2, start_iter=5, seed=9), "auto:rank=2,start=5,seed=9"),
    ],
)
def test_text_form_has_every_key_and_is_read_back(codec, spec):
    assert codec.spec() == spec
    assert parse(spec) == codec


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("fp16", FP16()),
        ("powersgd", PowerSGD()),
        ("powersgd:4", PowerSGD(rank=4)),
        ("powersgd:wire=bf16,rank=2", PowerSGD(rank=2, wire="bf16")),
        ("powersgd:seed=18446744073709551615", PowerSGD(seed=2**64 - 1)),
        ("int8", Int8()),
        ("int8:feedback=0", Int8(use_error_feedback=False)),
        ("topk:0.001", TopK(0.001)),
        ("topk:1", TopK(1)),
        ("topk:1e-3", TopK(0.001)),
        ("auto:2", Auto(rank=2)),
    ],
)
def test_short_forms_are_read(text, codec):
    assert parse(text) == codec
    assert parse(codec.spec()) == codec


@pytest.mark.parametrize("value", [1 / 3, 0.1234567, 1e-30, 123456.75, 1e6, 0, -0.0])
def test_real_numbers_survive_the_text_form(value):
    codec = PowerSGD(epsilon=value)
    assert parse(codec.spec()) == codec
    assert "-" not in codec.spec().replace("e-", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "codec is '', expected one of fp32, fp16, bf16, powersgd, int8, onebit, topk"),
        ("zip:1", "codec is 'zip:1', expected one of fp32, "),
        ("PowerSGD", r"codec is 'PowerSGD', expected one of .* \(did you mean powersgd\?\)"),
        ("fp32:", "codec is 'fp32:': fp32 has no keys, got ''"),
        ("fp16:start=2", "fp16 has no keys, got 'start=2'"),
        (
            "powersgd:rnk=4",
            r"powersgd has no key 'rnk' \(did you mean rank\?\); keys are rank, start, min_rate, ",
        ),
        ("powersgd:", "rank is '', expected a whole number from 1 to 256"),
        ("powersgd:four", "rank is 'four', expected a whole number from 1 to 256"),
        ("powersgd:rank=0", "rank is '0', expected a whole number from 1 to 256"),
        ("powersgd:rank=4.0", "rank is '4.0', expected a whole number"),
        ("powersgd:rank=٤", "rank is '٤', expected a whole number"),
        (
            "powersgd:4,start=2",
            r"expected key=value \(rank=4 beside other keys\), got '4'; keys are rank, start",
        ),
        ("powersgd:rank=4,", "expected key=value, got ''"),
        ("powersgd:rank=4,rank=4", "rank is given twice"),
        ("powersgd:wire=fp64", "wire is 'fp64', expected one of fp32, fp16, bf16"),
        ("powersgd:warm=yes", r"warm is 'yes', expected True or False \(in text 1 or 0\)"),
        ("powersgd:epsilon=nan", "epsilon is 'nan', expected a number from 0 to 1e\\+06"),
        ("powersgd:min_rate=-1", "min_rate is '-1', expected a number from 0"),
        ("int8:2", "expected key=value, got '2'; keys are start, feedback"),
        ("int8:ratio=1", "int8 has no key 'ratio'; keys are start, feedback"),
        ("topk:0", "ratio is '0', expected a number above 0, at most 1"),
        ("topk:1.1", "ratio is '1.1', expected"),
        ("auto:wire=fp16", "auto has no key 'wire'; keys are rank, start, seed"),
    ],
)
def test_malformed_text_is_refused_with_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (PowerSGD, {"rank": 0}, "PowerSGD: rank is 0, expected a whole number from 1 to 256"),
        (PowerSGD, {"rank": 4.0}, "rank is 4.0, expected"),
        (PowerSGD, {"rank": True}, "rank is True, expected"),
        (PowerSGD, {"start_iter": -1}, "start_iter is -1, expected a whole number from 0"),
        (PowerSGD, {"min_compression_rate": float("inf")}, "min_compression_rate is inf, expected"),
        (PowerSGD, {"wire": "fp8"}, "wire is 'fp8', expected one of fp32, fp16, bf16"),
        (PowerSGD, {"warm_start": 1}, "warm_start is 1, expected True or False"),
        (PowerSGD, {"epsilon": None}, "epsilon is None, expected a number"),
        (Int8, {"start_iter": "2"}, "Int8: start_iter is '2', expected"),
        (TopK, {"ratio": 0}, "TopK: ratio is 0, expected"),
    ],
)
def test_wrong_argument_is_refused_by_name(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_codec_is_an_immutable_value_with_a_key_for_each_field(kind):
    codec = kind()
    assert isinstance(codec, Codec)
    assert codec == kind()
    assert len({codec, kind()}) == 1
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert list(kind._keys) == [field.name for field in dataclasses.fields(kind)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.name = "other"


def test_codecs_differ_from_each_other():
    assert len({kind() for kind in KINDS}) == len(KINDS)
    assert PowerSGD(rank=2) != PowerSGD(rank=3)


# core/base/codec_spec_test.cc has the same cases.
@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (TopK(0.0001234567), "ratio=0.0001234567,"),
        (TopK(0.00001234567), "ratio=1.234567e-05,"),
        (PowerSGD(min_compression_rate=123456.75), "min_rate=123456.75,"),
        (PowerSGD(min_compression_rate=1e6), "min_rate=1e+06,"),
    ],
)
def test_real_numbers_have_as_many_digits_as_it_takes(codec, text):
    assert text in codec.spec()


def test_auto_chooses_from_the_exact_to_the_coarse():
    factors = PowerSGD(rank=2, start_iter=5, seed=9)
    assert Auto(2, 5, 9).candidates == (FP32(), FP16(), Int8(), factors)


def test_codecs_are_found_in_the_package_without_torch():
    names = [kind.__name__ for kind in KINDS]
    assert [getattr(thalweg, name) for name in names] == KINDS
    assert set(names) < set(thalweg.__all__)
    code = (
        f"import sys; from thalweg import {', '.join(names)}; print(TopK(0.5).spec());"
        "print('torch' in sys.modules, '_C' in str(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["topk:ratio=0.5,start=2,feedback=1", "False", "False"]


def test_package_has_no_other_attributes():
    with pytest.raises(AttributeError, match="has no attribute 'PowerSDG'"):
        _ = thalweg.PowerSDG
    assert (FP32.name, FP16.name, BF16.name) == codecs.WIRE_TYPES
