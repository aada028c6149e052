"""Opens the programs' HTTP ports for the command line: with TLS and a token, or without."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from thalweg._settings import _config
from thalweg._settings._config import ConfigError

_ANSWER_SECONDS = 5.0
_MOST_BYTES = 64 << 20


class AccessError(Exception):
    """The server refuses us or we refuse the server; the message says what to do."""


class Access(NamedTuple):
    """Credentials for the ports. Thread-safe."""

    http: ssl.SSLContext | None = None  # None: without TLS
    grpc: ssl.SSLContext | None = None
    has_certificate: bool = False  # gRPC requires one
    token: str = ""


PLAIN = Access()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that access_of() reads."""
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="the servers speak TLS; their CA; default: THALWEG_TLS_CA",
    )
    parser.add_argument(
        "--http-token-file",
        metavar="FILE",
        help="their HTTP token; default: THALWEG_HTTP_TOKEN_FILE",
    )


def access_of(args: argparse.Namespace) -> Access:
    """Returns the access that the arguments describe. ConfigError names a wrong file."""
    files = _config.SecurityFiles.from_env()
    ca = args.tls_ca or files.tls_ca
    token_file = args.http_token_file or files.http_token
    token = _read_token(token_file) if token_file else ""
    if not ca:
        return Access(token=token)
    grpc = _context(ca)
    grpc.set_alpn_protocols(["h2"])
    has_certificate = bool(files.tls_cert and files.tls_key)
    if has_certificate:
        try:
            grpc.load_cert_chain(files.tls_cert, files.tls_key)
        except OSError as error:
            raise ConfigError(
                f"THALWEG_TLS_CERT and THALWEG_TLS_KEY are '{files.tls_cert}' and "
                f"'{files.tls_key}': {error.strerror or error}"
            ) from None
    return Access(_context(ca), grpc, has_certificate, token)


def get_json(access: Access, address: str, path: str) -> Any:  # noqa: ANN401 - as JSON is
    """Returns the answer. Raises AccessError, OSError, HTTPException; ValueError if not JSON."""
    headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
    # Shards are inside the cluster, where a proxy for outside addresses cannot reach them.
    connection: http.client.HTTPConnection
    if access.http is None:
        connection = http.client.HTTPConnection(address, timeout=_ANSWER_SECONDS)
    else:
        connection = http.client.HTTPSConnection(
            address, timeout=_ANSWER_SECONDS, context=access.http
        )
    try:
        with contextlib.closing(connection), _limited(connection):
            connection.request("GET", path, headers=headers)
            reply = connection.getresponse()
            if reply.status != http.HTTPStatus.OK:
                raise _refusal(reply.status, path, access)
            text = reply.read(_MOST_BYTES + 1)
    except ssl.SSLError as error:
        raise AccessError(tls_error(error)) from None
    except (ConnectionResetError, http.client.BadStatusLine):
        if access.http is None:
            raise AccessError(
                "the answer is not HTTP; if the server uses TLS, give --tls-ca"
            ) from None
        raise
    if len(text) > _MOST_BYTES:
        raise ValueError(f"the answer has more than {_MOST_BYTES >> 20} MiB")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None


@contextlib.contextmanager
def _limited(connection: http.client.HTTPConnection) -> Iterator[None]:
    """Ends an answer that is still coming after _ANSWER_SECONDS, however steadily. Raises
    TimeoutError.
    """
    is_over = threading.Event()
    sock: socket.socket | None = None

    def give_up() -> None:
        is_over.set()
        # The connection forgets its socket when the answer has begun.
        if (one := sock or connection.sock) is not None:
            with contextlib.suppress(OSError):  # it may just have been closed
                one.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_ANSWER_SECONDS, give_up)
    timer.start()
    try:
        connection.connect()
        sock = connection.sock
        if is_over.is_set():  # perhaps before there was a socket, which nobody would shut down
            raise TimeoutError("timed out")
        yield
    except (OSError, http.client.HTTPException):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
    if is_over.is_set():
        raise TimeoutError("timed out")


def tls_error(error: ssl.SSLError) -> str:
    """Explains a failed handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "does not speak TLS, which --tls-ca or THALWEG_TLS_CA asks for"
    return f"TLS: {error.reason or error}"


def _refusal(code: int, path: str, access: Access) -> Exception:
    if code == http.HTTPStatus.UNAUTHORIZED:
        wants = "wants another token than that in" if access.token else "wants a token:"
        return AccessError(f"{wants} --http-token-file")
    return ValueError(
        f"{path} is answered with {code}; expected the HTTP address of an aggregator or "
        "sidecar of this release"
    )


def trusting(ca: str | None) -> ssl.SSLContext:
    """Returns a client's context that trusts a CA as the servers do; None: the system's CAs.

    Raises OSError.
    """
    context = ssl.create_default_context(cafile=ca)
    # From Python 3.13 on it is set, and refuses a CA without keyUsage, which gRPC accepts.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _context(ca: str) -> ssl.SSLContext:
    try:
        return trusting(ca)
    except OSError as error:  # SSLError is an OSError
        raise ConfigError(f"--tls-ca '{ca}': {error.strerror or error}") from None


def _read_token(path: str) -> str:
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--http-token-file '{path}': {error}") from None
    if not token:
        raise ConfigError(f"--http-token-file '{path}' is empty")
    return token
