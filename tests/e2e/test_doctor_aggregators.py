"""Tests what `thalweg doctor --aggregators` says of ports that are no aggregator's, and the job."""

from __future__ import annotations

import contextlib
import io
import socket
from pathlib import Path

import pytest
from certificates import Authority
from harness import Job, servers

from thalweg.cli import _probe, main

JOBS = Path(__file__).parent / "plain_jobs.py"


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """Yields addresses by name, and the variables of TLS."""
    authority = Authority(tmp_path_factory.mktemp("tls") / "authority")
    secret = authority.issue("all", "127.0.0.1")
    stranger = Authority(tmp_path_factory.mktemp("other") / "authority").issue("all", "127.0.0.1")
    with servers(shards=1) as plain, servers(shards=1, env=secret.environment()) as secured:
        one, two = plain.aggregators[0], secured.aggregators[0]
        yield (
            {"plain": one.address, "http": one.http, "tls": two.address, "https": two.http},
            {"no tls": {}, "tls": secret.environment(), "other ca": stranger.environment()},
        )


@pytest.mark.parametrize(
    ("port", "variables", "said"),
    [
        ("plain", "no tls", "ok    aggregator 0: PORT answers as a gRPC server\n"),
        ("tls", "tls", "ok    aggregator 0: PORT answers as a gRPC server, with TLS\n"),
        ("http", "no tls", "FAIL  aggregator 0: PORT: it speaks HTTP/1: is this its HTTP port?"),
        ("https", "tls", "FAIL  aggregator 0: PORT: it speaks HTTP/1: is this its HTTP port?"),
        ("tls", "no tls", "FAIL  aggregator 0: PORT expects TLS: set THALWEG_TLS_CERT,"),
        ("https", "no tls", "THALWEG_TLS_KEY and THALWEG_TLS_CA. Or is this its HTTP port?\n"),
        ("plain", "tls", "FAIL  aggregator 0: PORT: it does not use TLS, and THALWEG_TLS_CERT is"),
        ("http", "tls", "FAIL  aggregator 0: PORT: it speaks HTTP/1: is this its HTTP port?"),
        ("tls", "other ca", "FAIL  aggregator 0: PORT: its certificate is not one of THALWEG_TLS_"),
    ],
)
def test_doctor_says_what_answers_at_a_port(ports, port, variables, said, monkeypatch):
    addresses, environments = ports
    monkeypatch.setattr("thalweg.cli._doctor._CONNECT_SECONDS", 20.0)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        for name, value in environments[variables].items():
            patch.setenv(name, value)
        code = main(["doctor", "--aggregators", addresses[port]])
    assert said.replace("PORT", addresses[port]) in out.getvalue()
    assert code == (0 if said.startswith("ok") else 1)


def test_port_that_says_nothing_is_not_taken_for_an_aggregators(monkeypatch, capsys):
    monkeypatch.setattr("thalweg.cli._doctor._CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["doctor", "--aggregators", address]) == 1
    said = f"{address} accepts connections, but does not answer a gRPC client"
    assert said in capsys.readouterr().out


def test_answers_of_other_protocols_are_no_settings():
    assert _probe._is_settings(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0]))
    for other in (b"", b"\0\0\6\4", b"SSH-2.0-OpenSSH", bytes([0, 0, 6, 7, 0, 0, 0, 0, 0])):
        assert not _probe._is_settings(other)


@pytest.mark.parametrize(
    ("port", "asked"),
    [("tls", "does it expect TLS ("), ("http", "is this its HTTP port?")],
)
def test_error_of_a_job_asks_what_the_port_is(ports, tmp_path, port, asked):
    with servers() as cluster:
        for _ in range(2):
            cluster.add_sidecar(aggregators=ports[0][port])
        sockets = [sidecar.address for sidecar in cluster.sidecars]
        env = {"THALWEG_CODEC": "fp16", "THALWEG_TIMEOUT": "20"}
        job = Job("plain", cluster, tmp_path, sidecar_of=sockets, env=env, jobs=JOBS)
        workers = job.wait()
    for worker in workers:
        assert worker.code != 0
        [error] = [line for line in worker.output.splitlines() if "ConnectionError: " in line]
        assert asked in error
        assert "`thalweg doctor --aggregators` tells" in error
