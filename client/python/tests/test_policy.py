import pickle

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thalweg
from thalweg import policy
from thalweg._attach import _model
from thalweg._settings._config import ConfigError
from thalweg.codecs import BF16, FP16, FP32, Auto, Int8, OneBit, PowerSGD, TopK
from thalweg.policy import Policy, Rule, except_embeddings, except_small_tensors, parse


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (Policy(FP16()), "fp16"),
        (
            Policy(Int8(), [Rule(FP32(), "*.bias"), Rule(TopK(0.5), "conv*", max_elems=4095)]),
            "int8:start=2,feedback=1;*.bias=fp32;"
            "conv*&elems<4096=topk:ratio=0.5,start=2,feedback=1",
        ),
        (
            Policy(
                FP32(),
                [
                    Rule(BF16(), "a?", min_elems=1, max_elems=899, min_dims=2, max_dims=3),
                    Rule(FP16()),
                    Rule(BF16(), min_dims=1),
                ],
            ),
            "fp32;a?&elems>0&elems<900&dims>1&dims<4=bf16;*=fp16;dims>0=bf16",
        ),
    ],
)
def test_text_form_is_in_full_and_in_order_and_is_read_back(value, spec):
    assert value.spec() == spec
    assert parse(spec) == value


def test_order_and_spaces_of_a_text_do_not_matter():
    text = " int8 ;\tdims<4 & elems<900&a?&elems>0 &dims>1= bf16\n"
    expected = "int8:start=2,feedback=1;a?&elems>0&elems<900&dims>1&dims<4=bf16"
    assert parse(text).spec() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "codec is '', expected one of fp32"),
        ("zip;a=fp32", "codec is 'zip', expected one of fp32"),
        ("fp32;", "codec: rule 1 '': expected MATCH=CODEC"),
        ("fp32;a=fp16;b", "codec: rule 2 'b': expected MATCH=CODEC"),
        ("fp32;a=zip:1", "rule 1 'a=zip:1': the codec is 'zip:1', expected one of"),
        ("fp32;a=int8:rank=2", "int8 has no key 'rank'"),
        ("fp32;=fp16", "'' is neither a pattern of names nor a bound"),
        ("fp32;a&&b=fp16", "'' is neither a pattern"),
        ("fp32;a&b=fp16", "two matches of one sort, the second 'b'"),
        ("fp32;dims>1&dims>1=fp16", "two matches of one sort, the second 'dims>1'"),
        ("fp32;size<3=fp16", "'size<3' is neither a pattern of names nor a bound: expected elems<"),
        ("fp32;elems<=fp16", "the bound of 'elems<' is '', expected a number from 1"),
        ("fp32;elems<0=fp16", "the bound of 'elems<0' is '0', expected a number from 1"),
        ("fp32;dims>x=fp16", "the bound of 'dims>x' is 'x', expected a number from 0"),
        ("fp32;elems>281474976710657=fp16", "min_elems is 281474976710658, expected a whole"),
        ("fp32;a=auto", "auto chooses for whole buckets: make it the policy's default"),
        ("fp32;a=fp16;b=bf16;c=int8;d=onebit;e=topk", "6 different codecs .fp32, fp16, bf16"),
        ("auto;a=bf16;b=onebit", "6 different codecs .fp32, fp16, int8, powersgd, bf16, onebit., "),
        ("fp32" + ";a=powersgd" * 3000, "bytes of text, at most 65536 are allowed"),
    ],
)
def test_wrong_text_is_refused_naming_the_piece(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codec": "fp16"}, "Rule: codec is 'fp16', expected one such as"),
        ({"codec": Auto()}, "auto chooses for whole buckets"),
        ({"name": ""}, "Rule: name is '', expected a pattern"),
        ({"name": "a=b"}, "name is 'a=b', expected a pattern without any of ;&=<>"),
        ({"name": " a"}, "without spaces around it"),
        ({"min_elems": -1}, "min_elems is -1, expected a whole number from 0"),
        ({"max_elems": 1.5}, r"max_elems is 1\.5, expected"),
        ({"max_dims": True}, "max_dims is True, expected"),
    ],
)
def test_wrong_argument_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rule(**{"codec": FP16(), **arguments})


def test_wrong_parts_of_a_policy_are_refused():
    with pytest.raises(ValueError, match="default is 'fp16'"):
        Policy("fp16")
    with pytest.raises(ValueError, match="a rule is 'a=fp16'"):
        Policy(FP16(), ["a=fp16"])


def test_policies_are_immutable_values():
    value = Policy(FP16(), [Rule(FP32(), "a")])
    assert value == Policy(FP16(), (Rule(FP32(), "a"),))
    assert len({value, parse("fp16;a=fp32")}) == 1
    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises(AttributeError):
        value.default = FP32()


def test_codecs_are_the_different_ones_in_order_of_mention():
    assert parse("onebit;a=fp32;b=onebit:start=2;c=int8").codecs == (OneBit(), FP32(), Int8())
    assert parse("auto:2;a=fp32;b=bf16").codecs == (*Auto(2).candidates, BF16())


@pytest.mark.parametrize(
    ("rule", "name", "shape", "holds"),
    [
        (Rule(FP16(), "*.bias"), "a.bias", (3,), True),
        (Rule(FP16(), "*.bias"), "a.bias2", (3,), False),
        (Rule(FP16(), "l?.w"), "l1.w", (3,), True),
        (Rule(FP16(), "l?.w"), "l12.w", (3,), False),
        (Rule(FP16(), "[a]"), "a", (3,), False),
        (Rule(FP16(), min_elems=12, max_elems=12), "a", (3, 4), True),
        (Rule(FP16(), min_elems=13), "a", (3, 4), False),
        (Rule(FP16(), max_elems=11), "a", (3, 4), False),
        (Rule(FP16(), min_dims=2, max_dims=2), "a", (3, 4), True),
        (Rule(FP16(), min_dims=3), "a", (3, 4), False),
        (Rule(FP16(), max_dims=1), "a", (3, 4), False),
        (Rule(FP16(), max_dims=0, max_elems=1), "scalar", (), True),
    ],
)
def test_rule_holds_for_the_tensors_it_names(rule, name, shape, holds):
    assert rule.matches(name, shape) is holds


@pytest.mark.parametrize(
    ("text", "spared"),
    [
        ("powersgd:4", "e.weight=fp32"),
        ("powersgd:wire=bf16", "e.weight=bf16"),
        ("auto", "e.weight=fp32"),
        ("powersgd;*.bias=fp32", "e.weight=fp32"),
        ("powersgd;e.*=topk", ""),  # the user's rule takes precedence
        ("int8", ""),
        ("fp16", ""),
    ],
)
def test_embeddings_are_spared_from_factors_unless_a_rule_decides(text, spared):
    before = parse(text)
    after = except_embeddings(before, [("e.weight", (100, 8))])
    assert after.spec() == (f"{before.spec()};{spared}" if spared else before.spec())


@pytest.mark.parametrize("name", ["a;b", "a&b=c", "x<1", " a\t", "elems>3", "*", "ä=", "a?"])
def test_embedding_of_any_name_is_spared_by_a_rule_that_holds(name):
    rules = parse(except_embeddings(Policy(PowerSGD()), [(name, (9, 9))]).spec()).rules
    assert [rule.matches(name, (9, 9)) for rule in rules] == [True]


class Tables(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(50, 8)
        self.bags = torch.nn.EmbeddingBag(20, 8)
        self.frozen = torch.nn.Embedding(9, 8).requires_grad_(False)
        self.out = torch.nn.Linear(8, 50)


@pytest.fixture
def wrapped(lone_group):
    """Returns a function that wraps a module as in a script; this process is the only one."""
    return DistributedDataParallel


def test_embeddings_of_a_module_are_found_by_name(wrapped):
    spec = _model.add_exceptions(wrapped(Tables()), "powersgd:4")
    assert spec == f"{PowerSGD(4).spec()};words.weight=fp32;bags.weight=fp32"


def test_tied_embedding_is_found_under_the_name_that_its_gradient_has(wrapped):
    module = torch.nn.Sequential(torch.nn.Linear(8, 50, bias=False), torch.nn.Embedding(50, 8))
    module[1].weight = module[0].weight
    assert _model.add_exceptions(wrapped(module), "auto").endswith(";0.weight=fp32")


def test_too_many_codecs_with_embeddings_say_where_the_last_comes_from(wrapped):
    codec = "powersgd;a=fp16;b=bf16;c=int8;d=onebit"
    with pytest.raises(ConfigError, match="embeddings and small tensors, Policy: 6 diff"):
        _model.add_exceptions(wrapped(Tables()), codec)


SMALL = [("bias", (1023,)), ("scale", ())]
LARGE = [("weight", (32, 32))]


@pytest.mark.parametrize(
    ("text", "parameters", "added"),
    [
        ("int8", SMALL, "elems<1024=fp16"),
        ("onebit:start=5", SMALL + LARGE, "elems<1024=fp16"),
        ("topk:0.1", SMALL, "elems<1024=fp16"),
        ("int8;bias=fp32", SMALL, "elems<1024=fp16"),  # for the scalar
        ("int8", LARGE, ""),
        ("int8;elems<1024=int8", SMALL, ""),  # the user's rule takes precedence
        ("int8;bias=fp32;s*=topk", SMALL, ""),
        ("auto", SMALL, ""),
        ("powersgd", SMALL, ""),
        ("fp32;a=int8", SMALL, ""),
    ],
)
def test_small_tensors_are_excepted_from_lossy_defaults_unless_a_rule_decides(
    text, parameters, added
):
    before = parse(text)
    after = except_small_tensors(before, parameters)
    assert after.spec() == (f"{before.spec()};{added}" if added else before.spec())


def test_small_tensors_of_a_module_are_found(wrapped):
    module = torch.nn.Linear(64, 16)  # a weight of 1024 elements
    spec = _model.add_exceptions(wrapped(module), "onebit")
    assert spec == f"{OneBit().spec()};elems<1024=fp16"
    module.bias.requires_grad_(False)
    assert _model.add_exceptions(wrapped(module), "onebit") == OneBit().spec()


def test_too_many_codecs_with_small_tensors_say_where_the_last_comes_from(wrapped):
    codec = "int8;a=fp32;b=bf16;c=topk;d=onebit"
    with pytest.raises(ConfigError, match=r"embeddings and small tensors, Policy: 6 diff.*fp16"):
        _model.add_exceptions(wrapped(Tables()), codec)


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("onebit", ";elems<1024=fp16"),
        ("onebit;*.bias=fp32", ";elems<1024=fp16"),
        ("onebit;elems<4096=fp32", ""),
        ("powersgd:4", ""),
        ("int8;a=fp32;b=bf16;c=topk;d=onebit", ""),  # there is no room for a sixth codec
    ],
)
def test_policy_for_any_model_spares_small_tensors_where_no_rule_decides(text, added):
    assert policy.for_any_model(parse(text)).spec() == f"{parse(text).spec()}{added}"


def test_codec_of_a_parameter_is_the_first_rules_that_holds():
    chosen = parse("onebit;*.bias=fp32;elems<1024=fp16")
    assert chosen.codec_of("a.bias", (8,)) == FP32()
    assert chosen.codec_of("a.weight", (8,)) == FP16()
    assert chosen.codec_of("a.weight", (1024,)) == OneBit()


def test_policy_is_found_in_the_package():
    assert (thalweg.Policy, thalweg.Rule) == (policy.Policy, policy.Rule)
    assert {"Policy", "Rule"} < set(thalweg.__all__)
