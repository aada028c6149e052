"""Tests the laboratory network: links have the requested rate, and nothing is left behind."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thalweg_bench.lab import Lab, LabError, parse_rate
from thalweg_bench.lab._rate import format_rate, packet_bytes, tbf_arguments

LAB = Path(__file__).parent / "lab"
SAVED_UP = 128 << 10  # bytes, by the token buckets of these rates
pytestmark = pytest.mark.alone
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def namespaces():
    folder = Path("/run/netns")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.fixture
def nothing_left():
    before = namespaces()
    yield
    assert namespaces() <= before


def transfer(lab, source, target, size):
    """Returns bits per second from the sender's begin to the receiver's end, without what the token
    buckets had saved up.
    """
    with lab.inside(target):
        server = socket.create_server((lab.address(target), 0))
    with lab.inside(source):
        client = socket.socket()
    with server, client:
        client.settimeout(20)
        client.connect(server.getsockname())
        sender = threading.Thread(target=client.sendall, args=(bytes(size),))
        start = time.monotonic()
        sender.start()
        receiver, _ = server.accept()
        with receiver:
            receiver.settimeout(20)
            received = 0
            while received < size:
                received += len(receiver.recv(1 << 16))
            seconds = time.monotonic() - start
        sender.join(20)
    return (size - SAVED_UP) * 8 / seconds


@needs_root
def test_namespaces_reach_each_other_and_nothing_else(nothing_left):
    with Lab(["a", "b"]) as lab:
        assert transfer(lab, "a", "b", 1 << 20) > 0
        addresses = lab.run("a", ["ip", "-o", "-4", "addr"], capture_output=True, text=True).stdout
        assert addresses.count("inet ") == 2  # the loopback's and its own
        route = lab.run("a", ["ip", "route", "get", "192.0.2.1"], capture_output=True)
        assert route.returncode != 0


@needs_root
@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
def test_rate_is_limited_in_both_directions(nothing_left, source, target):
    with Lab(["a", "b"], parse_rate("100mbit")) as lab:
        assert 0.7 <= transfer(lab, source, target, 4 << 20) / 100e6 <= 1.05


@needs_root
def test_single_links_have_rates_of_their_own(nothing_left):
    with Lab(["a", "b", "c"], parse_rate("100mbit"), rates={"b": parse_rate("10mbit")}) as lab:
        assert 0.7 <= transfer(lab, "a", "c", 4 << 20) / 100e6 <= 1.05
        assert 0.7 <= transfer(lab, "a", "b", 2 << 20) / 10e6 <= 1.05
        assert 0.7 <= transfer(lab, "b", "c", 2 << 20) / 10e6 <= 1.05


@needs_root
def test_tcp_uses_the_congestion_control_that_was_asked_for(nothing_left):
    with Lab(["a", "b"], congestion="reno") as lab:
        with lab.inside("b"):
            server = socket.create_server((lab.address("b"), 0))
        with lab.inside("a"):
            client = socket.create_connection(server.getsockname(), 10)
        with server, client:
            name = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"reno"


@needs_root
def test_everything_is_gone_after_an_exception(nothing_left):
    with pytest.raises(ZeroDivisionError), Lab(["a"]) as lab:
        sleeper = lab.popen("a", ["sleep", "100"])
        raise ZeroDivisionError
    assert sleeper.wait(10) == -signal.SIGKILL


@needs_root
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_everything_is_gone_after_a_signal(nothing_left, signum, code):
    argv = [sys.executable, LAB, "--nodes", "2", "--", "sh", "-c", "echo up; sleep 100"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as lab:
        assert lab.stdout.readline().endswith(b"up\n")
        lab.send_signal(signum)
        assert lab.wait(20) == code


@needs_root
def test_next_lab_removes_what_a_killed_one_left(nothing_left):
    script = "from thalweg_bench.lab import Lab\nwith Lab(['a']) as l: print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        owner.stdout.readline()
        prefix = f"thalweg{owner.pid}-"
        owner.kill()
        owner.wait()
        assert any(name.startswith(prefix) for name in namespaces())
        with Lab(["b"]):
            assert not any(name.startswith(prefix) for name in namespaces())


@needs_root
def test_command_prefixes_output_and_returns_the_worst_code(nothing_left):
    script = 'echo "$LAB_ADDRESS"; [ "$LAB_NODE" = node0 ] || exit 7'
    result = subprocess.run(
        [sys.executable, LAB, "--nodes", "2", "--rate", "1gbit", "--", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 7
    assert "[node1] 10.77.0.2\n" in result.stdout


@needs_root
def test_without_root_it_refuses_with_exit_code_2():
    pid = os.fork()
    if pid == 0:  # root alone may read Python's files: change the user after they were loaded
        code = 99
        try:
            sys.argv = [str(LAB), "true"]
            main = runpy.run_path(str(LAB))["main"]
            os.setuid(65534)
            code = main()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2


def test_refusal_names_what_is_wrong():
    with pytest.raises(LabError, match="'no such' cannot name a namespace"):
        Lab(["no such"])
    with pytest.raises(LabError, match="different names"):
        Lab(["a", "a"])
    with pytest.raises(LabError, match=r"rates are given for \['b'\], which are not in the lab"):
        Lab(["a"], rates={"b": None})


@pytest.mark.parametrize(
    ("text", "rate"),
    [("250mbit", 250_000_000), ("1gbit", 10**9), ("2.5gbit", 2_500_000_000), ("none", None)],
)
def test_rates_are_read_and_written(text, rate):
    assert parse_rate(text) == rate
    assert parse_rate(format_rate(rate)) == rate


@pytest.mark.parametrize("text", ["", "fast", "10", "0mbit", "1kbit", "1000gbit", "-1mbit"])
def test_other_rates_are_refused(text):
    with pytest.raises(ValueError, match="the rate is"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["1mbit", "250mbit", "10gbit"])
def test_a_gso_packet_fits_the_bucket_and_ten_the_queue(text):
    packet = packet_bytes(parse_rate(text))
    assert packet >= 64 << 10
    arguments = tbf_arguments(parse_rate(text), packet)
    values = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert int(values["burst"]) >= packet + 54
    assert int(values["limit"]) - int(values["burst"]) >= 10 * packet
