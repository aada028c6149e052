"""Tests which sidecars attach() starts and where they listen, with programs that are not real."""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist
from amp_models import script_environment
from job_of_threads import Workers, worker

from thalweg._job import _addresses, _processes, _starting
from thalweg._job._addresses import System
from thalweg._job._collectives import Meeting
from thalweg._settings._config import ConfigError, Network

PORTS = Network.from_env({"THALWEG_SHARD_PORTS": "7000-7010"})


class FakeServer:
    """Notes the arguments of the programs that would be started."""

    started: list[list[str]]

    def __init__(self, name, argv, *, env):
        FakeServer.started.append(argv)
        self.process = subprocess.Popen(["true"])

    def wait_ready(self, timeout):
        pass


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Returns a function that starts the sidecars of workers: (what find_sidecars() returns or
    raises on each, --shard-listen of each sidecar; None: it has none).
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nobody removes sidecars' folders
    monkeypatch.setattr(_processes, "Server", FakeServer)
    monkeypatch.setattr(_starting, "_started", [])
    FakeServer.started = []

    def started(introductions, networks=None):
        job = Workers(len(introductions), monkeypatch)
        meeting = Meeting(None, "group", 0, len(introductions), 30.0, dist.HashStore())
        networks = networks or [PORTS] * len(introductions)
        results = job.run(
            lambda rank: _starting.find_sidecars(
                introductions, rank, networks[rank], meeting._replace(rank=rank)
            )
        )
        return results, [
            argv[argv.index("--shard-listen") + 1] if "--shard-listen" in argv else None
            for argv in FakeServer.started
        ]

    return started


ROUTES = {"myself": "127.0.1.1", "a": "10.0.0.2", "10.0.0.2": "10.0.0.1", "v6": "fd00::2"}


@pytest.fixture(autouse=True)
def imaginary_network(monkeypatch):
    """Replaces this host's interfaces and routes."""
    system = System(lambda: {"eth0": ["10.5.0.1"]}, lambda _: False, ROUTES.__getitem__)
    for name in ("candidate", "settle"):
        function = functools.partial(getattr(_addresses, name), system=system)
        monkeypatch.setattr(_addresses, name, function)


def test_sidecar_of_a_single_node_does_not_listen(start):
    results, listens = start([worker(), worker()])
    assert listens == [None]
    assert results[0] == results[1]
    assert results[0][0] == results[0][1] != ""


def test_sidecar_beside_others_of_one_machine_listens_on_loopback(start):
    results, listens = start([worker(), worker(sidecar="/other.sock")])
    assert listens == ["127.0.0.1:7000-7010"]
    assert results[0][1] == "/other.sock"


def test_no_sidecar_listens_where_local_shards_are_off(start):
    setting = {"local_shards": "0", "aggregators": ("x:1",)}
    _, listens = start([worker("a", **setting), worker("b", **setting)])
    assert listens == [None, None]


def test_sidecars_that_serve_already_are_used_again(start):
    running = {"running": "/r.sock", "running_listens": True}
    results, listens = start([worker("a", **running), worker("b", **running)])
    assert listens == []
    assert results == [["/r.sock"] * 2] * 2


def test_each_host_listens_at_the_address_that_others_reach(start):
    networks = [PORTS._replace(master=master) for master in ("myself", "", "a")]
    results, listens = start([worker("a"), worker("a"), worker("b")], networks)
    assert sorted(listens) == ["10.0.0.1:7000-7010", "10.0.0.2:7000-7010"]
    assert results[0] == results[1] == results[2]
    assert results[0][0] == results[0][1] != results[0][2]


def test_address_of_ipv6_is_in_brackets(start):
    networks = [PORTS._replace(interface="eth0"), PORTS._replace(master="v6")]
    _, listens = start([worker("a"), worker("b")], networks)
    assert sorted(listens) == ["10.5.0.1:7000-7010", "[fd00::2]:7000-7010"]


def test_host_that_others_cannot_reach_is_named_to_all_before_a_sidecar_is_started(start):
    networks = [PORTS._replace(master="myself")] * 2
    results, listens = start([worker("a/boot"), worker("b/boot")], networks)
    assert listens == []
    text = "thalweg: a would publish 127.0.1.1 as the address of the shard that it hosts"
    for error in results:
        assert isinstance(error, ConfigError)
        assert str(error).startswith(text)
        assert "THALWEG_INTERFACE" in str(error)


def test_unknown_interface_of_one_host_is_told_to_all(start):
    networks = [PORTS._replace(interface="eth0"), PORTS._replace(interface="eth7")]
    results, listens = start([worker("a"), worker("b")], networks)
    assert listens == []
    assert isinstance(results[1], ConfigError)
    for error in results:
        assert "THALWEG_INTERFACE=eth7 names no interface with an address" in str(error)
        assert "eth0 (10.5.0.1)" in str(error)


def test_interfaces_are_not_asked_for_where_no_sidecar_is_started(start):
    networks = [PORTS._replace(interface="eth7")] * 2
    results, listens = start([worker("a", "/s"), worker("b", "/s")], networks)
    assert (results, listens) == ([["/s", "/s"]] * 2, [])


@pytest.fixture
def lasting():
    """Yields a program that does not end by itself."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_exit_does_not_wait_longer_than_the_timeout_for_other_nodes(lasting, caplog):
    _starting._await_end(lasting, 0.01)
    (record,) = caplog.records
    assert f"(process {lasting.pid}) within 0.01 s" in record.getMessage()


def test_exit_of_a_process_that_has_failed_does_not_wait(lasting, caplog, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    _starting._await_end(lasting, 1000)
    assert caplog.records == []


@pytest.mark.parametrize(("how", "waits"), [("fails", False), ("succeeds", True)])
def test_spawned_worker_waits_for_other_nodes_only_if_it_has_not_failed(how, waits, tmp_path):
    script = Path(__file__).parent / "spawning_worker.py"
    with subprocess.Popen(
        [sys.executable, script, how],
        env=script_environment() | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        said, errors = process.communicate(timeout=90)
    assert ("other nodes have not left the shard" in said) == waits, errors
    assert ("no such file" in errors) == (how == "fails")
    assert (process.returncode == 0) == waits
