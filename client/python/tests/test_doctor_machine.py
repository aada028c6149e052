"""Tests what `thalweg doctor` says of GPUs, networks and variables, on machines of files."""

import re
import socket
import sys

import pytest

from thalweg._job import _addresses
from thalweg._settings import _variables
from thalweg._settings._config import Network
from thalweg.cli import _doctor_machine, _doctor_variables, main
from thalweg.cli._doctor_machine import Build

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
NONE = Network(shard_ports="0", interface="", gloo_interfaces="", nccl_interfaces="", master="")


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_driver_is_named_by_its_version(tmp_path):
    assert _doctor_machine.driver(tmp_path) == ""
    write(tmp_path, "proc/driver/nvidia/version", DRIVER)
    assert _doctor_machine.driver(tmp_path) == "580.95.05"


@pytest.mark.parametrize(
    ("build", "driver", "level", "said"),
    [
        (Build("13.0", ("H100 (80 GiB)",)), "580.95", "ok", "H100 (80 GiB); torch is built"),
        (Build("", ()), "580.95", "warn", "is loaded, but torch is built for CPUs only: install "),
        (Build("13.0", (), "too old"), "470.1", "warn", "and cannot use driver 470.1: too old"),
        (Build("13.0", (), "none"), "", "note", "driver is not loaded, and torch is built"),
    ],
)
def test_torch_that_cannot_use_the_gpus_of_a_machine_is_warned_of(build, driver, level, said):
    finding = _doctor_machine.gpus(build, driver)
    assert finding.level == level
    assert said in finding.text


def test_nccl_that_sidecars_would_not_find_is_warned_of():
    finding = _doctor_machine.nccl("libnothing.so.2")
    assert finding.level == "warn"
    assert "libnothing.so.2 cannot be used (OSError: libnothing.so.2: cannot open" in finding.text
    assert "set THALWEG_NCCL_LIBRARY to its path" in finding.text


def test_nccl_is_named_by_its_version(monkeypatch):
    monkeypatch.setattr(_doctor_machine, "_ASK_NCCL", "print(22703)")
    assert str(_doctor_machine.nccl(sys.executable)).endswith(" is version 2.27.3")


def test_daemon_of_mps_is_noted(tmp_path):
    assert _doctor_machine.mps(str(tmp_path)).level == "ok"
    write(tmp_path, "control", "")
    assert _doctor_machine.mps(str(tmp_path)).level == "note"


def test_rdma_devices_are_named_and_said_to_be_idle(tmp_path):
    assert _doctor_machine.rdma(tmp_path).level == "ok"
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "sys/class/infiniband" / name).mkdir(parents=True)
    assert "RDMA: mlx5_0, mlx5_1: Thalweg uses TCP" in _doctor_machine.rdma(tmp_path).text


@pytest.mark.parametrize(
    ("speed", "level", "said"),
    [
        ("10000\n", "ok", "eth7 is one of 10 Gbit/s"),
        ("-1\n", "note", "eth7 does not say how fast it is"),
        ("", "note", "eth7 does not say how fast it is"),
    ],
)
def test_link_of_the_address_for_other_hosts_is_that_of_its_interface(
    tmp_path, monkeypatch, speed, level, said
):
    monkeypatch.setattr(
        _addresses, "candidate", lambda *_: _addresses.Candidate("10.1.2.3", "a rule")
    )
    found = {"lo": ["127.0.0.1"], "eth7": ["10.1.2.3"]}
    monkeypatch.setattr(_addresses, "interfaces", lambda: found)
    write(tmp_path, "sys/class/net/eth7/speed", speed)
    finding = _doctor_machine.link(NONE, tmp_path)
    assert finding.level == level
    assert said in finding.text


def test_every_variable_has_a_meaning():
    assert set(_doctor_variables.meanings()) == set(_variables.KNOWN)


WORKERS = {"THALWEG_NODE_REDUCE": "workers"}
RANK = "AIAK_MATRIX_APPROXIMATION_RANK"


@pytest.mark.parametrize(
    ("host", "interfaces", "level", "said"),
    [
        ("127.0.1.1", "", "note", "stands for 127.0.1.1, at which no other host reaches it"),
        ("127.0.1.1", "eth0", "ok", "other hosts reach eth0 (GLOO_SOCKET_IFNAME)"),
        ("192.0.2.1", "", "ok", "other hosts reach 192.0.2.1"),
    ],
)
def test_hosts_whose_name_is_loopbacks_are_noted_because_gloo_takes_that(
    host, interfaces, level, said
):
    finding = _doctor_machine.gloo(NONE._replace(gloo_interfaces=interfaces), host)
    assert finding.level == level
    assert said in finding.text


def test_host_whose_name_has_no_address_is_noted_as_loopback(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "set GLOO_SOCKET_IFNAME" in _doctor_machine.gloo(NONE, "somewhere").text


@pytest.mark.parametrize(
    ("env", "variable", "why"),
    [
        ({"THALWEG_ENABLE": "0"}, "THALWEG_ENABLE", ""),
        ({"THALWEG_ENABLE": "0", "THALWEG_PS": "auto"}, "THALWEG_PS", "THALWEG_ENABLE is 0"),
        ({"THALWEG_CODEC": "fp16"}, "THALWEG_CODEC", ""),
        (
            {"THALWEG_CODEC": "fp16", "TORCH_DEVICE_BACKEND_AUTOLOAD": "false"},
            "THALWEG_CODEC",
            "without code, because TORCH_DEVICE_BACKEND_AUTOLOAD is not 1",
        ),
        (
            {"THALWEG_CODEC": "fp16", "AIAK_FP16_COMPRESSION": "1"},
            "AIAK_FP16_COMPRESSION",
            "THALWEG_CODEC wins over it",
        ),
        (
            {"THALWEG_FP16_COMPRESSION": "0", "AIAK_FP16_COMPRESSION": "1"},
            "AIAK_FP16_COMPRESSION",
            "THALWEG_FP16_COMPRESSION wins over it",
        ),
        ({RANK: "4"}, RANK, "AIAK_POWERSGD_COMPRESSION is off"),
        ({RANK: "4", "THALWEG_POWERSGD_COMPRESSION": "1"}, RANK, ""),
        (
            {RANK: "4", "THALWEG_POWERSGD_COMPRESSION": "0", "AIAK_POWERSGD_COMPRESSION": "1"},
            RANK,
            "because THALWEG_POWERSGD_COMPRESSION is off",
        ),
        (
            {"THALWEG_PS_EVERY": "50", "THALWEG_PS_MODE": "0"},
            "THALWEG_PS_EVERY",
            "because THALWEG_PS_MODE is not local",
        ),
        ({"THALWEG_PS_EVERY": "50", "THALWEG_PS_MODE": "local"}, "THALWEG_PS_EVERY", ""),
        (WORKERS | {"THALWEG_PS": "auto"}, "THALWEG_NODE_REDUCE", "because THALWEG_PS wins over"),
        (
            WORKERS | {"THALWEG_PS_MODE": "local"},
            "THALWEG_NODE_REDUCE",
            "because THALWEG_PS_MODE=local wins over",
        ),
        (WORKERS | {"THALWEG_PS": "0"}, "THALWEG_NODE_REDUCE", ""),
        (WORKERS | {"THALWEG_PS": "auto", "THALWEG_ENABLE": "0"}, "THALWEG_NODE_REDUCE", ""),
        (
            {"THALWEG_INTERFACE": "eth0", "THALWEG_SIDECAR": "/s"},
            "THALWEG_INTERFACE",
            "because THALWEG_SIDECAR names one that runs",
        ),
        (
            {"THALWEG_SHARD_PORTS": "7000", "THALWEG_LOCAL_SHARDS": "0"},
            "THALWEG_SHARD_PORTS",
            "because THALWEG_LOCAL_SHARDS is 0",
        ),
    ],
)
def test_variable_that_does_nothing_is_said_to_and_why(env, variable, why):
    finding = next(f for f in _doctor_variables.findings(env, {}) if f.text.startswith(variable))
    assert finding.level == ("note" if why else "ok")
    assert ("does nothing" in finding.text) == bool(why)
    assert why in finding.text


def test_doctor_tells_what_is_set_and_what_is_misspelt(capsys, monkeypatch):
    monkeypatch.setenv("THALWEG_CODEC", "fp16")
    monkeypatch.setenv("THALWG_ENABLE", "1")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    meaning = "how fp32 gradients cross the network, e.g. fp16 or powersgd:4"
    assert f"ok    THALWEG_CODEC=fp16 ({meaning})" in lines
    assert "warn  THALWG_ENABLE=1 means nothing (did you mean THALWEG_ENABLE?)" in lines
    for name in ("GPUs", "bfloat16", "RDMA", "link"):
        assert len([line for line in lines if f"  {name}: " in line]) == 1, lines


def test_value_that_only_torchs_import_would_complain_of_fails(capsys, monkeypatch):
    monkeypatch.setenv("THALWEG_COMPAT", "apx")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAIL  THALWEG_COMPAT is 'apx', expected 0, 1 or apex" in lines
    passed, checks = re.fullmatch(r"(\d+) of (\d+) checks passed", lines[-1]).groups()
    assert int(passed) == int(checks) - 1
