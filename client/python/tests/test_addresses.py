"""Tests which address a host publishes, on this host's interfaces and on imaginary ones."""

import socket

import pytest

from thalweg._job import _addresses
from thalweg._job._addresses import LOOPBACK, System, candidate, settle
from thalweg._settings._config import ConfigError, Network

UNSET = Network.from_env({})
HAS = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.1", "fd00::1"],
    "eth1": ["10.1.0.1"],
    "ib0": ["10.2.0.1"],
    "down": [],
}
ROUTES = {"master": "10.0.0.1", "localhost": LOOPBACK, "10.0.0.2": "10.0.0.1", "fd00::2": "fd00::1"}


def source_to(host):
    if host not in ROUTES:
        raise OSError("Network is unreachable")
    return ROUTES[host]


SYSTEM = System(lambda: HAS, lambda address: any(address in its for its in HAS.values()), source_to)


def network(**variables):
    return UNSET._replace(**variables)


def test_interfaces_of_this_host_have_their_addresses():
    found = _addresses.interfaces()
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert found["lo"][0] == "127.0.0.1"
    for addresses in found.values():
        assert all(_addresses.is_ours(address) for address in addresses)


def test_routes_of_this_host_begin_at_its_addresses():
    assert _addresses.source_to("127.0.0.1") == "127.0.0.1"
    if "::1" in _addresses.interfaces()["lo"]:
        assert _addresses.source_to("::1") == "::1"


def test_host_that_nothing_can_be_sent_to_is_an_error():
    with pytest.raises(OSError, match=r"\[Errno \d+\]"):
        _addresses.source_to("255.255.255.255")  # not without SO_BROADCAST


def test_address_of_another_host_is_not_ours():
    assert _addresses.is_ours("127.0.0.1")
    assert not _addresses.is_ours("203.0.113.7")


def test_interface_of_this_host_is_found_by_name():
    assert candidate(network(interface="lo"), "") == ("127.0.0.1", "THALWEG_INTERFACE=lo")


def test_unknown_interface_is_refused_with_those_that_there_are():
    text = r"THALWEG_INTERFACE=nowhere0 names no interface with an address: .* has .*lo \(127.0.0.1"
    with pytest.raises(ConfigError, match=text):
        candidate(network(interface="nowhere0"), "")


@pytest.mark.parametrize(
    ("variables", "store_host", "address", "rule"),
    [
        ({"interface": "eth1", "gloo_interfaces": "eth0"}, "master", "10.1.0.1", "=eth1"),
        ({"interface": "fd00::1"}, "master", "fd00::1", "THALWEG_INTERFACE=fd00::1"),
        ({"gloo_interfaces": "eth9, eth1", "nccl_interfaces": "ib0"}, "", "10.1.0.1", "GLOO_"),
        ({"gloo_interfaces": "down,eth1"}, "", "10.1.0.1", "GLOO_SOCKET_IFNAME=down,eth1"),
        ({"nccl_interfaces": "ib0", "master": "localhost"}, "master", "10.2.0.1", "NCCL_SOCKET"),
        ({"master": "localhost"}, "master", "10.0.0.1", "the route to master"),
        ({"master": "master"}, "", "10.0.0.1", "the route to master"),
        ({"master": "localhost"}, "", LOOPBACK, "the route to localhost"),
        ({"master": "moon"}, "", LOOPBACK, "there is no route to moon: Network is unreachable"),
        ({}, "", LOOPBACK, "there is no MASTER_ADDR"),
    ],
)
def test_first_rule_that_applies_decides(variables, store_host, address, rule):
    found = candidate(network(**variables), store_host, SYSTEM)
    assert found.address == address
    assert rule in found.rule


@pytest.mark.parametrize(
    ("spec", "address"),
    [
        ("eth", "10.0.0.1"),
        ("ib,eth1", "10.1.0.1"),
        ("=eth1", "10.1.0.1"),
        ("^eth", "10.2.0.1"),
        ("^eth0,ib", "10.1.0.1"),
        ("^=eth0,lo", "10.1.0.1"),
        ("lo", "127.0.0.1"),
        ("^eth,ib", "127.0.0.1"),
    ],
)
def test_interfaces_of_nccl_are_read_as_nccl_reads_them(spec, address):
    assert candidate(network(nccl_interfaces=spec), "", SYSTEM).address == address


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"interface": "10.9.9.9"}, "THALWEG_INTERFACE=10.9.9.9 is not an address of this host"),
        ({"interface": "0.0.0.0"}, "THALWEG_INTERFACE=0.0.0.0 is not an address of this host"),
        ({"interface": "down"}, "THALWEG_INTERFACE=down names no interface with an address"),
        ({"gloo_interfaces": "eth8,eth9"}, "GLOO_SOCKET_IFNAME=eth8,eth9 names no interface"),
        ({"nccl_interfaces": "=eth"}, "NCCL_SOCKET_IFNAME==eth names no interface"),
    ],
)
def test_interface_that_cannot_be_used_is_refused(variables, message):
    with pytest.raises(ConfigError) as refused:
        candidate(network(**variables), "master", SYSTEM)
    assert message in str(refused.value)
    assert f"{socket.gethostname()} has lo (127.0.0.1, ::1), eth0 (10.0.0.1, " in str(refused.value)
    assert "down (no address)" in str(refused.value)


@pytest.mark.parametrize(
    ("candidates", "published"),
    [
        (["10.0.0.1", "", "10.0.0.2"], "10.0.0.1"),
        # The master's name is a loopback address on the master itself.
        (["127.0.1.1", "", "10.0.0.2"], "10.0.0.1"),
        (["::1", "", "fd00::2"], "fd00::1"),
        # Nothing better is known, or there is no route to it.
        ([LOOPBACK, "", LOOPBACK], LOOPBACK),
        ([LOOPBACK, "", "10.7.7.7"], LOOPBACK),
        # The second worker is on the same host: its address says nothing.
        ([LOOPBACK, "10.0.0.2", LOOPBACK], LOOPBACK),
    ],
)
def test_host_with_a_loopback_address_takes_the_route_to_another_one(candidates, published):
    assert settle(["a", "a", "b"], candidates, 0, SYSTEM) == published


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost", "0.0.0.0", "::"])
def test_address_that_no_other_host_can_reach_is_refused(address):
    with pytest.raises(ConfigError, match=rf"hosta would publish {address} .*THALWEG_INTERFACE"):
        _addresses.check_published("hosta", address)


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "hosta.cluster"])
def test_address_of_a_network_is_accepted(address):
    _addresses.check_published("hosta", address)


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.1", "10.0.0.1:7000"), ("fd00::1", "[fd00::1]:7000")]
)
def test_host_and_port_are_joined_and_parted(host, address):
    assert _addresses.join(host, "7000") == address
    assert _addresses.host_in(address) == host
