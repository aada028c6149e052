"""Tests `thalweg status` and `doctor --cluster` with servers that use TLS and require a token."""

import json
import socket
import ssl
import threading
import time

import pytest
from certificates import Authority
from shard_answers import http_server, job, shard

from thalweg.cli import main

TOKEN = "hunter2"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def secret(authority):
    return authority.issue("shard", "127.0.0.1", "localhost")


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """Removes kubectl and all variables of Thalweg."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("AGGREGATORS", "TLS_CA", "TLS_CERT", "TLS_KEY", "HTTP_TOKEN_FILE"):
        monkeypatch.delenv(f"THALWEG_{name}", raising=False)


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="ascii")
    return path


def server_context(secret):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secret.folder / "tls.crt", secret.folder / "tls.key")
    return context


def serving(secret=None, token=""):
    bodies = {
        "/api/v1/shard": json.dumps(shard() | {"unix_seconds": time.time()}),
        "/api/v1/jobs": json.dumps({"jobs": [job()]}),
    }
    tls = None if secret is None else server_context(secret)
    return http_server(bodies, tls=tls, token=token)


def error_of(address, capsys, *arguments):
    """Returns the error of `thalweg status` for the one shard; empty if it has answered."""
    main(["status", "--json", "--shards", address, *map(str, arguments)])
    return json.loads(capsys.readouterr().out)["shards"][0]["error"]


def test_status_trusts_the_ca_and_bears_the_token(secret, token_file, capsys):
    with serving(secret, TOKEN) as address:
        arguments = ("--tls-ca", secret.ca, "--http-token-file", token_file)
        assert error_of(address, capsys, *arguments) == ""


def test_environment_says_the_same(secret, token_file, capsys, monkeypatch):
    monkeypatch.setenv("THALWEG_TLS_CA", str(secret.ca))
    monkeypatch.setenv("THALWEG_HTTP_TOKEN_FILE", str(token_file))
    with serving(secret, TOKEN) as address:
        assert error_of(address, capsys) == ""
        assert main(["doctor", "--cluster", "--shards", address]) == 0


def test_token_goes_without_tls_too(token_file, capsys):
    with serving(token=TOKEN) as address:
        assert error_of(address, capsys, "--http-token-file", token_file) == ""


def test_missing_token_and_wrong_token_are_told_apart(token_file, capsys):
    with serving(token=TOKEN) as address:
        assert error_of(address, capsys) == "wants a token: --http-token-file"
    with serving(token="another") as address:
        told = error_of(address, capsys, "--http-token-file", token_file)
    assert told == "wants another token than that in --http-token-file"


def test_certificate_of_another_ca_is_not_trusted(secret, tmp_path, capsys):
    other = Authority(tmp_path / "other").issue("shard", "127.0.0.1")
    with serving(other) as address:
        told = error_of(address, capsys, "--tls-ca", secret.ca)
    assert told.startswith("its certificate is not trusted: ")


def test_certificate_of_another_host_is_not_trusted(authority, capsys):
    elsewhere = authority.issue("elsewhere", "shard-0.test")
    with serving(elsewhere) as address:
        told = error_of(address, capsys, "--tls-ca", elsewhere.ca)
    assert "IP address mismatch" in told


def test_tls_is_hinted_at_where_it_was_not_asked_for(secret, capsys):
    with serving(secret) as address:
        assert "if the server uses TLS, give --tls-ca" in error_of(address, capsys)


def test_server_without_tls_is_said_so(secret, capsys):
    with serving() as address:
        told = error_of(address, capsys, "--tls-ca", secret.ca)
    assert told == "does not speak TLS, which --tls-ca or THALWEG_TLS_CA asks for"


@pytest.mark.parametrize("flag", ["--tls-ca", "--http-token-file"])
@pytest.mark.parametrize("content", [None, ""])
def test_files_that_are_missing_or_empty_exit_with_2(flag, content, tmp_path, capsys):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content, encoding="ascii")
    assert main(["status", flag, str(path)]) == 2
    told = capsys.readouterr().err
    assert flag in told and str(path) in told


def test_flags_of_the_cluster_are_for_the_cluster(secret, capsys):
    assert main(["doctor", "--tls-ca", str(secret.ca)]) == 2
    assert "--tls-ca" in capsys.readouterr().err


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # gRPC's answer to the greeting


def greeted(capsys, context, *arguments):
    """Returns the line of `doctor --cluster` on a gRPC port that uses TLS."""
    return greeted_by(capsys, context, "--cluster", *arguments)


def greeted_by(capsys, context, *arguments, connections=1):
    """Returns the doctor's line on a gRPC port that uses TLS, to which it connects so often."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for _ in range(connections):
                connection, _ = server.accept()
                try:
                    with context.wrap_socket(connection, server_side=True) as tls:
                        if tls.recv(100):
                            tls.sendall(SETTINGS)
                            tls.recv(100)
                except OSError:
                    pass  # the client has gone, or was refused
                finally:
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        main(["doctor", "--aggregators", address, *map(str, arguments)])
        thread.join()
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if address in line and "HTTP" not in line]
    return line.replace(address, "HOST")


def mutual(secret):
    context = server_context(secret)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(secret.ca)
    context.set_alpn_protocols(["h2"])
    return context


def test_doctor_shows_its_certificate_to_shards(secret, capsys, monkeypatch):
    for name, value in secret.environment().items():
        monkeypatch.setenv(name, value)
    assert greeted(capsys, mutual(secret)) == "ok    gRPC HOST: answers"


def test_ca_without_key_usage_is_trusted_where_python_is_strict(tmp_path, capsys, monkeypatch):
    lax = ssl.create_default_context

    def strict(*args, **options):  # as from Python 3.13 on
        context = lax(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    secret = Authority(tmp_path / "old", "ca_without_usage").issue("shard", "127.0.0.1")
    for name, value in secret.environment().items():
        monkeypatch.setenv(name, value)
    with serving(secret) as address:
        assert error_of(address, capsys) == ""
    assert greeted(capsys, mutual(secret)) == "ok    gRPC HOST: answers"
    line = greeted_by(capsys, mutual(secret), connections=2)
    assert line == "ok    aggregator 0: HOST answers as a gRPC server, with TLS"


def test_doctor_without_a_certificate_says_what_it_has_not_asked(secret, capsys):
    line = greeted(capsys, mutual(secret), "--tls-ca", secret.ca)
    assert line.startswith("note  gRPC HOST: speaks TLS; not asked more without THALWEG_TLS_CERT")


def test_doctor_with_a_strangers_certificate_is_refused(secret, tmp_path, capsys, monkeypatch):
    stranger = Authority(tmp_path / "other").issue("node", "127.0.0.1")
    variables = stranger.environment() | {"THALWEG_TLS_CA": str(secret.ca)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = greeted(capsys, mutual(secret))
    assert line.startswith("FAIL  gRPC HOST: ")
    assert "it refuses the certificate in THALWEG_TLS_CERT" in line


def test_doctor_hints_at_tls_on_the_grpc_port(secret, capsys):
    line = greeted(capsys, mutual(secret))
    assert line.startswith("FAIL  gRPC HOST: ") and "--tls-ca" in line
