"""Tests a job over mutual TLS and its clients, with and without certificate and token."""

from __future__ import annotations

import json
import math
import re
import urllib.error

import pytest
from certificates import Authority
from watched import JOB, browser, watched_job

from thalweg.cli import main

TOKEN = "hunter2"


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """Yields a job that has made some steps. Its servers' environment names the certificates."""
    folder = tmp_path_factory.mktemp("secured")
    secret = Authority(folder / "authority").issue("all", "127.0.0.1")
    (folder / "token").write_text(f"{TOKEN}\n", encoding="ascii")
    env = secret.environment() | {"THALWEG_HTTP_TOKEN_FILE": str(folder / "token")}
    with watched_job(folder, env) as result:
        result.step(3)
        yield result


@pytest.fixture(autouse=True)
def on_machines_of_any_speed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # hides kubectl
    monkeypatch.setattr("thalweg.cli._cluster._CONNECT_SECONDS", 20.0)
    monkeypatch.setattr("thalweg.cli._http._ANSWER_SECONDS", 60.0)
    monkeypatch.setattr("thalweg.cli._cluster._SILENT_SECONDS", math.inf)


def as_servers(secured, monkeypatch):
    for name, value in secured.cluster.env.items():
        monkeypatch.setenv(name, value)


def doctor(secured, capsys, *arguments):
    address = secured.cluster.aggregators[0].address
    code = main(
        ["doctor", "--cluster", "--aggregators", address, "--shards", secured.http, *arguments]
    )
    return code, capsys.readouterr().out.replace(address, "GRPC").replace(secured.http, "HTTP")


def test_status_sees_the_job(secured, capsys):
    env = secured.cluster.env
    flags = ["--tls-ca", env["THALWEG_TLS_CA"], "--http-token-file", env["THALWEG_HTTP_TOKEN_FILE"]]
    code = main(["status", "--json", "--shards", secured.http, *flags])
    (look,) = json.loads(capsys.readouterr().out)["shards"]
    assert (code, look["error"]) == (0, "")
    assert look["jobs"][0]["name"].startswith(JOB)


def test_status_without_anything_says_what_is_missing(secured, capsys):
    assert main(["status", "--json", "--shards", secured.http]) == 1
    assert "--tls-ca" in json.loads(capsys.readouterr().out)["shards"][0]["error"]


def test_status_without_a_token_says_so(secured, capsys):
    ca = secured.cluster.env["THALWEG_TLS_CA"]
    assert main(["status", "--json", "--shards", secured.http, "--tls-ca", ca]) == 1
    (look,) = json.loads(capsys.readouterr().out)["shards"]
    assert look["error"] == "wants a token: --http-token-file"


def test_doctor_with_a_nodes_certificate_finds_all_well(secured, capsys, monkeypatch):
    as_servers(secured, monkeypatch)
    code, out = doctor(secured, capsys)
    assert code == 0, out
    assert "ok    gRPC GRPC: answers" in out
    # Whether one aggregator for two nodes is worth a warning depends on the rates just measured.
    assert re.search(r"^(ok  |warn)  job .*100 MB take .*times as long as in a ring", out, re.M), (
        out
    )
    assert out.endswith(("\n3 ok, 1 warn, 0 FAIL\n", "\n4 ok, 0 warn, 0 FAIL\n"))


def test_doctor_of_a_stranger_fails_on_both_ports(secured, capsys, monkeypatch, tmp_path):
    stranger = Authority(tmp_path / "stranger").issue("node", "127.0.0.1")
    variables = stranger.environment() | {"THALWEG_TLS_CA": secured.cluster.env["THALWEG_TLS_CA"]}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out = doctor(secured, capsys)
    assert code == 1
    assert "FAIL  gRPC GRPC: " in out
    assert "it refuses the certificate in THALWEG_TLS_CERT" in out
    assert "FAIL  HTTP HTTP: wants a token" in out


def test_doctor_without_tls_is_told_of_it_on_both_ports(secured, capsys):
    code, out = doctor(secured, capsys)
    assert code == 1
    told = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert len(told) == 2 and all("--tls-ca" in line for line in told), out


def test_probes_need_no_token_and_everything_else_does(secured):
    shard, cluster = secured.cluster.aggregators[0], secured.cluster
    paths = ("/", "/metrics", "/api/v1/shard", "/api/v1/jobs", "/page.js")
    assert all(cluster.page(shard, path) for path in paths)
    without = type(cluster)(cluster.folder, {"THALWEG_TLS_CA": cluster.env["THALWEG_TLS_CA"]})
    assert all(without.page(shard, path) for path in ("/healthz", "/readyz"))
    for path in paths:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            without.page(shard, path)


def test_live_page_shows_the_job_to_a_browser_with_the_password(secured):
    credentials = {"username": "anybody", "password": TOKEN}
    with browser(ignore_https_errors=True, http_credentials=credentials) as view:
        view.page.goto(f"https://{secured.http}/")
        view.page.get_by_text(JOB).first.wait_for(timeout=20_000)
        assert view.complaints == []
