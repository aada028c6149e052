"""Clients that a shard's port may get: an ordinary gRPC client, and hand-made HTTP/2."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import struct
import time
from typing import Any

import grpc
import wire_messages

PATIENCE = 30.0  # for answers that must come

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # every Stranger has a connection of its own
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
)


def _bytes(request: Any) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


class Stranger:
    """A gRPC client that knows the protocol and no secret."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is in progress, and disconnects."""
        self._channel.close()

    def begin(
        self,
        method: str,
        request: Any,
        *,
        timeout: float = PATIENCE,
        compression: grpc.Compression | None = None,
    ) -> grpc.Future:
        """Starts a call of Control; `request` is a message, or bytes that need not be one."""
        call = self._channel.unary_unary(
            f"/thalweg.v1.Control/{method}",
            request_serializer=_bytes,
            response_deserializer=lambda data: wire_messages.parse(f"{method}Response", data),
        )
        return call.future(request, timeout=timeout, compression=compression)

    def call(self, method: str, request: Any, **settings: Any) -> Any:
        """Returns the answer; raises grpc.RpcError when it is an error."""
        return self.begin(method, request, **settings).result()

    def refusal(self, method: str, request: Any, **settings: Any) -> grpc.StatusCode | None:
        """Returns the code with which the call is refused, or None."""
        error = self.begin(method, request, **settings).exception()
        return None if error is None else error.code()

    def stream(self) -> Stream:
        return Stream(self._channel)


class Stream:
    """An Exchange stream; what the shard sends is not read before the end."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._frames: queue.Queue[bytes | None] = queue.Queue(maxsize=1)
        call = channel.stream_stream("/thalweg.v1.Exchange/Stream")
        self._call = call(iter(self._frames.get, None))

    def send(self, frame: Any) -> bool:
        """Hands a frame to gRPC when that has taken the one before; returns False once the stream
        has ended.
        """
        while self._call.is_active():
            try:
                self._frames.put(_bytes(frame), timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def receive(self) -> bool:
        """Waits for a frame and drops it; returns False once the stream has ended."""
        try:
            return next(self._call, None) is not None
        except grpc.RpcError:
            return False

    def finish(self) -> None:
        """Returns when the shard has read all frames and ended the stream."""
        with contextlib.suppress(queue.Full):
            self._frames.put(None, timeout=PATIENCE)
        with contextlib.suppress(grpc.RpcError):
            for _ in self._call:
                pass


_DATA, _HEADERS, _RESET, _SETTINGS, _PING = 0, 1, 3, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_CANCEL = 8
_EMPTY_MESSAGE = bytes(5)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header_block(path: str) -> bytes:
    """Returns headers of a gRPC request, each as a literal that needs no table (RFC 7541 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "stranger",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b""
    for name, value in fields.items():
        block += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


def seconds_until_closed(client: socket.socket) -> float:
    """Returns after how many seconds the peer closes the connection."""
    begin = time.monotonic()
    client.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return time.monotonic() - begin


class RawHttp2:
    """An HTTP/2 connection on which streams are opened and reset, and pings are sent, as fast as
    the peer reads. What it sends is thrown away.
    """

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        self._next = 1
        self._received = b""
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b""))

    def __enter__(self) -> RawHttp2:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def open_and_reset(self, path: str, count: int) -> bool:
        """Opens `count` calls with an empty request and resets each at once; returns False when the
        peer has disconnected.
        """
        headers = _header_block(path)
        reset = struct.pack(">I", _CANCEL)
        batch = bytearray()
        for stream in range(self._next, self._next + 2 * count, 2):
            batch += _frame(_HEADERS, _END_HEADERS, stream, headers)
            batch += _frame(_DATA, _END_STREAM, stream, _EMPTY_MESSAGE)
            batch += _frame(_RESET, 0, stream, reset)
        self._next += 2 * count
        return self._send(bytes(batch))

    def open(self, path: str, count: int) -> bool:
        """Opens `count` calls that send nothing else, and acknowledges none of the peer's settings,
        which therefore limit nothing; returns False when the peer has disconnected.
        """
        headers = _header_block(path)
        streams = range(self._next, self._next + 2 * count, 2)
        self._next += 2 * count
        return self._send(b"".join(_frame(_HEADERS, _END_HEADERS, s, headers) for s in streams))

    def ping(self, count: int) -> bool:
        return self._send(_frame(_PING, 0, 0, bytes(8)) * count)

    def await_handled(self) -> bool:
        """Returns when the peer has handled what was sent; False when it has disconnected."""
        self._received = b""  # it may have an earlier answer
        mark = b"to here!"
        answer = _frame(_PING, _ACK, 0, mark)
        if not self._send(_frame(_PING, 0, 0, mark)):
            return False
        while answer not in self._received:
            if not self._receive():
                return False
        return True

    def seconds_until_closed(self) -> float:
        return seconds_until_closed(self._socket)

    def _send(self, data: bytes) -> bool:
        rest = memoryview(data)
        while rest:
            readable, writable, _ = select.select([self._socket], [self._socket], [], PATIENCE)
            assert readable or writable, "the server neither reads nor writes"
            if readable and not self._receive():
                return False
            try:
                if writable:
                    rest = rest[self._socket.send(rest[: 1 << 16], socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def _receive(self) -> bool:
        """Keeps the end of what comes; a long answer cannot be split in it."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            return False
        self._received = self._received[-64:] + data
        return bool(data)
