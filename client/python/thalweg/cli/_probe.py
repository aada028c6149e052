"""Asks a port whether it is that of an aggregator: a gRPC server, with the TLS that is configured.

Both ends of HTTP/2 begin with a SETTINGS frame (RFC 9113, section 3.4), and nothing else of gRPC is
needed to tell its port from others.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

from thalweg._settings._config import SecurityFiles
from thalweg.cli import _http

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = 9  # bytes: 3 of length, type, flags, 4 of the stream's number
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"

_QUESTION = "is it an aggregator's port?"
_HTTP_PORT = "it speaks HTTP/1: is this its HTTP port? Jobs need the one that --listen names (7070)"


def probe(address: str, files: SecurityFiles, seconds: float) -> str:
    """Returns what answers at `address`, "host:port", as a sidecar with `files` would find it.

    Each of at most three connections may take `seconds`. Raises RuntimeError, which says what else
    answers there, or that nothing does.
    """
    try:
        with _connect(address, seconds):
            pass
    except OSError as error:
        raise RuntimeError(f"{address} cannot be reached: {error}") from error
    if files.tls_cert:
        return _probe_with_tls(address, files, seconds)
    answer = _greet_plainly(address, seconds)
    if _is_settings(answer):
        return f"{address} answers as a gRPC server"
    if _is_http(answer):
        raise RuntimeError(f"{address}: {_HTTP_PORT}")
    raise RuntimeError(f"{address} {_why_no_answer(address, seconds)}")


def _probe_with_tls(address: str, files: SecurityFiles, seconds: float) -> str:
    try:
        context = _http.trusting(files.tls_ca or None)
        context.load_cert_chain(files.tls_cert, files.tls_key or None)
    except OSError as error:
        raise RuntimeError(
            f"THALWEG_TLS_CERT, THALWEG_TLS_KEY or THALWEG_TLS_CA: {error}"
        ) from None
    context.set_alpn_protocols(["h2"])
    try:
        answer = _greet(address, seconds, context)
    except ssl.SSLCertVerificationError as error:
        raise RuntimeError(
            f"{address}: its certificate is not one of THALWEG_TLS_CA for this name: "
            f"{error.verify_message}"
        ) from None
    except OSError as error:
        raise RuntimeError(f"{address}: {_why_no_tls(address, error, seconds)}") from None
    if _is_settings(answer):
        return f"{address} answers as a gRPC server, with TLS"
    if _is_http(answer):
        raise RuntimeError(f"{address}: {_HTTP_PORT}")
    raise RuntimeError(f"{address} does not answer a gRPC client: {_QUESTION}")


def _why_no_tls(address: str, error: OSError, seconds: float) -> str:
    """Returns what answers where a TLS handshake has failed."""
    plain = _greet_plainly(address, seconds)
    if _is_settings(plain):
        return (
            "it does not use TLS, and THALWEG_TLS_CERT is set here: set the THALWEG_TLS_… "
            "variables of both, or of neither"
        )
    if _is_http(plain):
        return _HTTP_PORT
    return f"the TLS handshake fails: {error}: does each end trust the other's certificate?"


def _why_no_answer(address: str, seconds: float) -> str:
    """Returns what answers where a gRPC client without TLS gets no answer."""
    anything = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anything.check_hostname = False
    anything.verify_mode = ssl.CERT_NONE
    anything.set_alpn_protocols(["h2"])
    try:
        with _connect(address, seconds, anything) as connection:
            is_http2 = connection.selected_alpn_protocol() == "h2"  # type: ignore[attr-defined]
    except OSError:
        return f"accepts connections, but does not answer a gRPC client: {_QUESTION}"
    text = "expects TLS: set THALWEG_TLS_CERT, THALWEG_TLS_KEY and THALWEG_TLS_CA"
    return text if is_http2 else f"{text}. Or is this its HTTP port?"


@contextlib.contextmanager
def _connect(
    address: str, seconds: float, context: ssl.SSLContext | None = None
) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        if context is None:
            yield connection
            return
        with context.wrap_socket(connection, server_hostname=host) as secured:
            yield secured


def _greet(address: str, seconds: float, context: ssl.SSLContext | None = None) -> bytes:
    """Returns the first bytes with which a server answers a client's preface; none: it hangs up.

    Raises OSError, also where it says nothing.
    """
    with _connect(address, seconds, context) as connection:
        connection.sendall(_PREFACE + _SETTINGS)
        answer = b""
        while len(answer) < _FRAME_HEADER and (more := connection.recv(64)):
            answer += more
        return answer


def _greet_plainly(address: str, seconds: float) -> bytes:
    """Does the same without TLS; returns nothing where that fails."""
    with contextlib.suppress(OSError):
        return _greet(address, seconds)
    return b""


def _is_settings(answer: bytes) -> bool:
    """Returns whether it begins with a SETTINGS frame of stream 0 that acknowledges nothing."""
    length = int.from_bytes(answer[:3], "big")
    rest = answer[3:_FRAME_HEADER]
    return len(answer) >= _FRAME_HEADER and length % 6 == 0 and rest == _SETTINGS[3:]


def _is_http(answer: bytes) -> bool:
    return answer.startswith(b"HTTP/")
