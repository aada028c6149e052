import json
import logging
import re
import subprocess
from pathlib import Path

import pytest

import thalweg
from thalweg import _binaries
from thalweg._settings import _config, _variables
from thalweg._settings._config import Config, ConfigError, JobArguments, Network
from thalweg._settings._variables import KNOWN


def test_empty_environment_gives_the_defaults():
    config = Config.from_env({})
    assert config.aggregators == ()
    assert (config.codec, config.chunk_bytes, config.timeout) == ("fp32", 0, 30.0)
    assert (config.job, config.sidecar) == ("", "")
    assert (config.local_shards, config.node_reduce) == ("auto", "sidecar")


def test_empty_value_means_default():
    assert Config.from_env({"THALWEG_CODEC": "", "THALWEG_TIMEOUT": ""}) == Config.from_env({})


def test_values_are_read():
    config = Config.from_env(
        {
            "THALWEG_AGGREGATORS": "a:1, [::1]:2,",
            "THALWEG_CHUNK_BYTES": "65536",
            "THALWEG_CODEC": "bf16",
            "THALWEG_JOB": "night",
            "THALWEG_LOCAL_SHARDS": "1",
            "THALWEG_MIN_NODES": "3",
            "THALWEG_NODE_REDUCE": "workers",
            "THALWEG_RECONNECT": "0.5",
            "THALWEG_RESIDUALS": "held",
            "THALWEG_SIDECAR": "/run/s.sock",
            "THALWEG_SNAPSHOT_EVERY": "100",
            "THALWEG_STEP_TIMEOUT": "600",
            "THALWEG_TIMEOUT": "2.5",
        }
    )
    assert config == Config(
        *(("a:1", "[::1]:2"), 65536, "bf16", "night", "1", 3, "workers", 0.5, "held"),
        *("/run/s.sock", 100, 600.0, 2.5),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("THALWEG_AGGREGATORS", "host"),
        ("THALWEG_AGGREGATORS", "host:0"),
        ("THALWEG_AGGREGATORS", "host:99999"),
        ("THALWEG_AGGREGATORS", ":70"),
        ("THALWEG_CHUNK_BYTES", "many"),
        ("THALWEG_CHUNK_BYTES", "4095"),
        ("THALWEG_CHUNK_BYTES", "4194305"),
        ("THALWEG_CODEC", "fp64"),
        ("THALWEG_LOCAL_SHARDS", "yes"),
        ("THALWEG_MIN_NODES", "-1"),
        ("THALWEG_MIN_NODES", "most"),
        ("THALWEG_MIN_NODES", "\N{FULLWIDTH DIGIT TWO}"),
        ("THALWEG_NODE_REDUCE", "worker"),
        ("THALWEG_RECONNECT", "-1"),
        ("THALWEG_RECONNECT", "3601"),
        ("THALWEG_RECONNECT", "long"),
        ("THALWEG_RECONNECT", "nan"),
        ("THALWEG_SNAPSHOT_EVERY", "-1"),
        ("THALWEG_SNAPSHOT_EVERY", "often"),
        ("THALWEG_STEP_TIMEOUT", "never"),
        ("THALWEG_TIMEOUT", "0"),
        ("THALWEG_TIMEOUT", "-1"),
        ("THALWEG_TIMEOUT", "nan"),
        ("THALWEG_TIMEOUT", "inf"),
        ("THALWEG_TIMEOUT", "soon"),
        ("THALWEG_TIMEOUT", "\N{FULLWIDTH DIGIT TWO}"),
        ("THALWEG_TIMEOUT", "3_0"),
    ],
)
def test_malformed_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        Config.from_env({name: value})


@pytest.mark.parametrize(
    "address", ["dns:///host:7070", "dns://names:53/host:7070", "https://host:7070", "http://host"]
)
def test_addresses_with_a_scheme_are_refused_with_advice(address):
    expected = f"THALWEG_AGGREGATORS contains '{address}', expected host:port, without a scheme"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Config.from_env({"THALWEG_AGGREGATORS": f"host:1,{address}"})


def test_only_settings_read_our_variables():
    package = Path(thalweg.__file__).parent
    sources = [path for path in package.rglob("*.py") if path.parent.name != "_settings"]
    assert len(sources) > 200
    reads = re.compile(
        r"(environ\.get\(|getenv\(|environ\[)\s*f?[\"'](THALWEG|AIAK)_\w+[\"'](?!\]\s*=[^=])"
    )
    assert [path for path in sources if reads.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("ports", ["0", "7000", "65535", "7000-7000", "7000-7010"])
def test_network_is_read(ports):
    network = Network.from_env(
        {
            "THALWEG_INTERFACE": "eth0",
            "THALWEG_SHARD_PORTS": ports,
            "MASTER_ADDR": "host0",
            "GLOO_SOCKET_IFNAME": "eth1",
            "NCCL_SOCKET_IFNAME": "^lo",
        }
    )
    assert network == Network("eth0", ports, "host0", "eth1", "^lo")


def test_any_interface_and_port_is_the_default():
    assert Network.from_env({}) == Network("", "0", "", "", "")


@pytest.mark.parametrize(
    "ports", ["65536", "-1", "any", "0-10", "10-9", "7000-65536", "1-2-3", "7-"]
)
def test_malformed_ports_are_refused(ports):
    with pytest.raises(ConfigError, match=f"THALWEG_SHARD_PORTS is '{ports}', expected a port"):
        Network.from_env({"THALWEG_SHARD_PORTS": ports})


def test_codec_may_be_a_policy():
    text = "int8;*.bias=fp32"
    full = "int8:start=2,feedback=1;*.bias=fp32"
    assert Config.from_env({"THALWEG_CODEC": text}).codec == full
    by_value = thalweg.Policy(thalweg.Int8(), [thalweg.Rule(thalweg.FP32(), name="*.bias")])
    for codec in (text, by_value):
        assert Config.from_env({}).override(JobArguments(codec=codec)).codec == full


def test_wrong_rule_is_refused_by_the_variables_name():
    with pytest.raises(ConfigError, match=r"THALWEG_CODEC: rule 1 '\*=zip': the codec is 'zip'"):
        Config.from_env({"THALWEG_CODEC": "int8;*=zip"})


def test_arguments_win_over_the_environment():
    env = Config.from_env({"THALWEG_CODEC": "bf16", "THALWEG_TIMEOUT": "7"})
    arguments = JobArguments(codec="fp16", chunk_bytes=4096, node_reduce="workers")
    config = env.override(arguments)
    assert (config.codec, config.timeout, config.chunk_bytes) == ("fp16", 7.0, 4096)
    assert config.node_reduce == "workers"


@pytest.mark.parametrize(
    ("argument", "setting"), [(True, "1"), (False, "0"), ("auto", "auto"), ("1", "1"), (None, "0")]
)
def test_local_shards_may_be_a_bool_or_text(argument, setting):
    env = Config.from_env({"THALWEG_LOCAL_SHARDS": "0"})
    assert env.override(JobArguments(local_shards=argument)).local_shards == setting


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("codec", "zip"),
        ("codec", 7),
        ("timeout", 0),
        ("chunk_bytes", 0),
        ("local_shards", 2),
        ("node_reduce", "us"),
    ],
)
def test_malformed_argument_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        Config.from_env({}).override(JobArguments(**{name: value}))


@pytest.mark.parametrize(
    ("name", "right"),
    [("THALWEG_CODEK", "THALWEG_CODEC"), ("AIAK_FP16_COMPRESION", "AIAK_FP16_COMPRESSION")],
)
def test_unknown_variable_is_warned_about_once(monkeypatch, caplog, name, right):
    monkeypatch.setenv(name, "1")
    _variables.warn_of_unknown.cache_clear()
    with caplog.at_level(logging.WARNING, logger="thalweg"):
        Config.from_env()
        Config.from_env()
    [message] = [record.getMessage() for record in caplog.records]
    said = f"thalweg: unknown environment variable {name} is ignored (did you mean {right}?)"
    assert message == said


def test_unknown_variable_that_is_like_none_is_warned_about_with_all_that_are_known(
    monkeypatch, caplog
):
    monkeypatch.setenv("THALWEG_QQQQQQ", "1")
    _variables.warn_of_unknown.cache_clear()
    with caplog.at_level(logging.WARNING, logger="thalweg"):
        _variables.warn_of_unknown()
    assert "; known are THALWEG_AGGREGATORS, " in caplog.messages[0]


def test_variables_that_kubernetes_makes_for_services_are_not_warned_about():
    port = "THALWEG_AGGREGATOR_0_PORT"
    made = [f"{port}{end}" for end in ("", "_7070_TCP", "_7070_TCP_ADDR", "_7070_TCP_PORT")]
    made += ["THALWEG_AGGREGATOR_0_SERVICE_HOST", "THALWEG_AGGREGATOR_0_SERVICE_PORT_HTTP"]
    environ = dict.fromkeys([*made, "THALWEG_PORTS"], "1")
    assert _variables.unknown_variables(environ) == ["THALWEG_PORTS"]


def test_server_environment_keeps_the_users_log_level(monkeypatch):
    monkeypatch.delenv("THALWEG_LOG", raising=False)
    assert _config.server_environment(log="warn")["THALWEG_LOG"] == "warn"
    monkeypatch.setenv("THALWEG_LOG", "trace")
    assert _config.server_environment(log="warn")["THALWEG_LOG"] == "trace"


@pytest.mark.parametrize("program", [_binaries.SIDECAR, _binaries.AGGREGATOR])
def test_servers_know_the_same_variables_with_the_same_defaults(program):
    output = subprocess.run(
        [_binaries.find(program), "--list-env"], check=True, capture_output=True, timeout=10
    ).stdout
    assert json.loads(output) == KNOWN
