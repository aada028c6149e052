import logging

import pytest

from thalweg._settings._config import Activation, Config, ConfigError, LocalUpdates, Served
from thalweg._settings._variables import KNOWN, activation_is_wanted
from thalweg.codecs import FP16, FP32, Int8, PowerSGD

AIAK = {
    "AIAK_HIERARCHICAL_ALLREDUCE": "0",
    "AIAK_FP16_COMPRESSION": "0",
    "AIAK_POWERSGD_COMPRESSION": "0",
    "AIAK_MATRIX_APPROXIMATION_RANK": "1",
    "AIAK_START_COMPRESS_ITER": "1000",
    "AIAK_FUSED_OPTIMIZER": "0",
}


def test_every_variable_of_aiak_is_known_under_our_prefix_with_its_default():
    ours = {name.replace("AIAK_", "THALWEG_"): default for name, default in AIAK.items()}
    assert ours.items() <= KNOWN.items()


@pytest.mark.parametrize(
    "env", [{}, AIAK, {"AIAK_FP16_COMPRESSION": ""}, {"THALWEG_CODEC": ""}, {"AIAK_OTHER": "1"}]
)
def test_nothing_is_activated_by_what_is_unset_or_off(env):
    assert not activation_is_wanted(env)
    assert Activation.from_env(env).codec == ""


@pytest.mark.parametrize("prefix", ["AIAK_", "THALWEG_"])
@pytest.mark.parametrize(
    ("variables", "codec"),
    [
        ({"HIERARCHICAL_ALLREDUCE": "1"}, FP32()),
        ({"FP16_COMPRESSION": "1"}, FP16()),
        ({"POWERSGD_COMPRESSION": "1"}, PowerSGD(rank=1, start_iter=1000)),
        (
            {
                "POWERSGD_COMPRESSION": "1",
                "MATRIX_APPROXIMATION_RANK": "4",
                "START_COMPRESS_ITER": "10",
            },
            PowerSGD(rank=4, start_iter=10),
        ),
        (
            {"POWERSGD_COMPRESSION": "1", "FP16_COMPRESSION": "1", "FUSED_OPTIMIZER": "0"},
            PowerSGD(rank=1, start_iter=1000, wire="fp16"),
        ),
    ],
)
def test_switches_choose_the_codec(prefix, variables, codec):
    env = {prefix + name: value for name, value in variables.items()}
    assert activation_is_wanted(env)
    activation = Activation.from_env(env)
    assert activation.codec == codec.spec()
    said = {f"{name}={value}" for name, value in env.items() if value != "0"}
    assert set(activation.variables) == said
    assert Config.from_env(env).codec == codec.spec()  # attach() without a codec uses the same


def test_enable_takes_the_codec_as_configured():
    assert Activation.from_env({"THALWEG_ENABLE": "1"}).codec == "fp32"
    activation = Activation.from_env({"THALWEG_ENABLE": "1", "THALWEG_CODEC": "int8"})
    assert activation.codec == Int8().spec()
    assert activation.variables == ("THALWEG_ENABLE=1", "THALWEG_CODEC=int8")


@pytest.mark.parametrize("codec", ["int8", "fp32"])
def test_codec_alone_activates(codec):
    env = {"THALWEG_CODEC": codec}
    assert activation_is_wanted(env)
    activation = Activation.from_env(env)
    assert activation.codec == Config.from_env(env).codec != ""
    assert activation.variables == (f"THALWEG_CODEC={codec}",)
    assert not activation_is_wanted(env | {"THALWEG_ENABLE": "0"})


def test_who_reduces_in_the_node_is_said_and_activates_nothing():
    choice = {"THALWEG_NODE_REDUCE": "workers"}
    assert not activation_is_wanted(choice)
    activation = Activation.from_env({"AIAK_HIERARCHICAL_ALLREDUCE": "1"} | choice)
    assert activation.variables == ("AIAK_HIERARCHICAL_ALLREDUCE=1", "THALWEG_NODE_REDUCE=workers")
    assert Config.from_env({"AIAK_HIERARCHICAL_ALLREDUCE": "1"}).node_reduce == "sidecar"


def test_configured_codec_may_have_rules():
    env = {"THALWEG_ENABLE": "1", "THALWEG_CODEC": "fp16;*.bias=fp32"}
    assert Activation.from_env(env).codec == "fp16;*.bias=fp32"


def test_enable_is_the_main_switch():
    env = {"THALWEG_ENABLE": "0", "AIAK_FP16_COMPRESSION": "1"}
    assert not activation_is_wanted(env)


def test_switched_off_in_the_script_after_the_import_nothing_is_asked_for():
    env = {"THALWEG_ENABLE": "0", "THALWEG_CODEC": "int8", "THALWEG_FUSED_OPTIMIZER": "1"}
    activation = Activation.from_env(env)
    assert (activation.codec, activation.fused_optimizer, activation.variables) == ("", "", ())


def test_configured_codec_wins_over_the_switches_and_says_so():
    env = {"AIAK_POWERSGD_COMPRESSION": "1", "THALWEG_CODEC": "bf16"}
    activation = Activation.from_env(env)
    assert activation.codec == "bf16"
    assert activation.variables == ("THALWEG_CODEC=bf16",)
    assert activation.remarks == ("THALWEG_CODEC wins over AIAK_POWERSGD_COMPRESSION=1",)


@pytest.mark.parametrize(
    ("env", "variables", "remarks"),
    [
        (
            {"THALWEG_CODEC": "powersgd:4", "AIAK_START_COMPRESS_ITER": "5"},
            ("THALWEG_CODEC=powersgd:4",),
            ("THALWEG_CODEC wins over AIAK_START_COMPRESS_ITER=5",),
        ),
        (
            {"THALWEG_ENABLE": "1", "THALWEG_CODEC": "bf16", "AIAK_FP16_COMPRESSION": "1"},
            ("THALWEG_ENABLE=1", "THALWEG_CODEC=bf16"),
            ("THALWEG_CODEC wins over AIAK_FP16_COMPRESSION=1",),
        ),
        (
            {"AIAK_FP16_COMPRESSION": "1", "AIAK_MATRIX_APPROXIMATION_RANK": "4"},
            ("AIAK_FP16_COMPRESSION=1",),
            ("AIAK_MATRIX_APPROXIMATION_RANK=4 has no effect without PowerSGD",),
        ),
        (AIAK | {"AIAK_FP16_COMPRESSION": "1"}, ("AIAK_FP16_COMPRESSION=1",), None),
    ],
)
def test_only_variables_that_have_an_effect_are_named_as_reasons(env, variables, remarks):
    activation = Activation.from_env(env)
    assert activation.variables == variables
    if remarks is not None:
        assert activation.remarks == remarks


def test_fp16_and_powersgd_together_are_remarked_once():
    env = {"AIAK_POWERSGD_COMPRESSION": "1", "AIAK_FP16_COMPRESSION": "1"}
    remarks = ("FP16 and PowerSGD together are PowerSGD with fp16 factors",)
    assert Activation.from_env(env).remarks == remarks


def test_our_prefix_wins():
    env = {"AIAK_FP16_COMPRESSION": "1", "THALWEG_FP16_COMPRESSION": "0"}
    assert not activation_is_wanted(env)
    env = {
        "AIAK_POWERSGD_COMPRESSION": "1",
        "AIAK_MATRIX_APPROXIMATION_RANK": "2",
        "THALWEG_MATRIX_APPROXIMATION_RANK": "3",
    }
    assert Activation.from_env(env).codec == PowerSGD(rank=3).spec()


def test_fused_optimizer_is_recognised_and_leaves_gradients_alone():
    activation = Activation.from_env({"AIAK_FUSED_OPTIMIZER": "1"})
    assert activation_is_wanted({"AIAK_FUSED_OPTIMIZER": "1"})
    assert activation.codec == ""
    assert activation.fused_optimizer == "AIAK_FUSED_OPTIMIZER=1"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"AIAK_FP16_COMPRESSION": "yes"}, "AIAK_FP16_COMPRESSION is 'yes', expected 0 or 1"),
        ({"THALWEG_ENABLE": "2"}, "THALWEG_ENABLE is '2', expected 0 or 1"),
        (
            {"AIAK_POWERSGD_COMPRESSION": "1", "AIAK_MATRIX_APPROXIMATION_RANK": "0"},
            "AIAK_MATRIX_APPROXIMATION_RANK is '0', expected a whole number from 1 to 256",
        ),
        (
            {"AIAK_POWERSGD_COMPRESSION": "1", "THALWEG_START_COMPRESS_ITER": "soon"},
            "THALWEG_START_COMPRESS_ITER is 'soon', expected a whole number from 0",
        ),
        ({"THALWEG_ENABLE": "1", "THALWEG_CODEC": "zip"}, "THALWEG_CODEC is 'zip', expected one"),
        ({"THALWEG_ENABLE": "1", "THALWEG_LOG": "loud"}, "THALWEG_LOG is 'loud', expected trace"),
    ],
)
def test_malformed_value_activates_and_is_then_refused_by_name(env, message):
    assert activation_is_wanted(env)
    with pytest.raises(ConfigError, match=message):
        Activation.from_env(env)


@pytest.mark.parametrize(("text", "level"), [("warn", logging.WARNING), ("", logging.INFO)])
def test_log_level_is_that_of_the_servers(text, level):
    assert Activation.from_env({"THALWEG_LOG": text}).log_level == level


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", ("", None, False)),
        ("0", ("", None, False)),
        ("auto", ("auto", None, False)),
        ("adamw:pull=bf16,overlap=1", ("adamw", "bf16", True)),
    ],
)
def test_optimizers_move_to_the_shards_as_asked(text, asked):
    assert Served.from_env({"THALWEG_PS": text})[:3] == asked
    assert not Served.from_env({"THALWEG_PS": text, "THALWEG_ENABLE": "0"}).kind


def test_what_averages_gradients_is_named_where_optimizers_move():
    env = {"THALWEG_PS": "sgd", "THALWEG_CODEC": "fp16", "THALWEG_FUSED_OPTIMIZER": "1"}
    served = Served.from_env(env)
    assert (served.variables, served.averaging) == (("THALWEG_PS=sgd",), ("THALWEG_CODEC=fp16",))


def test_workers_step_alone_as_asked():
    env = {"THALWEG_PS_MODE": "local", "THALWEG_PS_EVERY": "50", "THALWEG_PS": "0"}
    variables = ("THALWEG_PS_MODE=local", "THALWEG_PS_EVERY=50")
    assert LocalUpdates.from_env(env) == (50, variables)
    for off in ({}, {"THALWEG_PS_MODE": "0"}, env | {"THALWEG_ENABLE": "0"}):
        assert LocalUpdates.from_env(off) == (0, ())


LOCAL = {"THALWEG_PS_MODE": "local"}


@pytest.mark.parametrize(
    ("read", "env", "message"),
    [
        (Served, {"THALWEG_PS": "adagrad"}, "THALWEG_PS is 'adagrad', expected auto, sgd, adam"),
        (Served, {"THALWEG_PS": "sgd:pull=zip"}, "THALWEG_PS's pull is 'zip', expected fp32"),
        (Served, {"THALWEG_PS": "sgd:overlap=2"}, "THALWEG_PS's overlap is '2', expected 0 or 1"),
        (Served, {"THALWEG_PS": "auto:overlap=1,overlap=0"}, "overlap=0': overlap is given twice"),
        (Served, {"THALWEG_PS": "sgd:push=bf16"}, "THALWEG_PS has 'push=bf16', expected pull="),
        (
            Served,
            {"THALWEG_PS": "sgd", "THALWEG_ENABLE": "false"},
            "THALWEG_ENABLE is 'false', expected 0 or 1",
        ),
        (LocalUpdates, LOCAL | {"THALWEG_ENABLE": "0 "}, "THALWEG_ENABLE is '0 ', expected 0 or 1"),
        (LocalUpdates, {"THALWEG_PS_MODE": "stale"}, "THALWEG_PS_MODE is 'stale', expected 0 or"),
        (
            LocalUpdates,
            LOCAL,
            "THALWEG_PS_MODE=local asks for THALWEG_PS_EVERY: set it to a number of",
        ),
        (LocalUpdates, LOCAL | {"THALWEG_PS_EVERY": "0"}, "THALWEG_PS_EVERY is '0', expected"),
        (LocalUpdates, LOCAL | {"THALWEG_PS": "sgd"}, "THALWEG_PS=sgd lets shards do every step"),
    ],
)
def test_malformed_wish_is_refused_by_name(read, env, message):
    with pytest.raises(ConfigError, match=message):
        read.from_env(env)
