"""Provides shards' HTTP answers, and a server that gives them."""

import contextlib
import http.server
import threading

from thalweg import __version__


def node(number, **values):
    return {
        "node": number,
        "name": f"host{number}",
        "state": "active",
        "workers": 4,
        "silent_seconds": 0.25,
        "last_rounds": 0,
        "waited_seconds": 0.0,
    } | values


def job(**values):
    return {
        "name": "resnet",
        "state": "running",
        "failure": "",
        "codec": "fp16",
        "workers": 8,
        "shards": 2,
        "rounds": 100,
        "received": {"raw_bytes": 4000.0, "wire_bytes": 2000.0},
        "sent": {"raw_bytes": 4000.0, "wire_bytes": 2000.0},
        "waiting": None,
        "nodes": [
            node(0, last_rounds=60, waited_seconds=0.06),
            node(1, last_rounds=40, waited_seconds=0.04),
        ],
    } | values


def shard(uptime=50.0, started=1e9, **values):
    return {
        "version": __version__,
        "wire_version": 1,
        "started_unix_seconds": started,
        "uptime_seconds": uptime,
        "draining": False,
        "jobs": 1,
        "rounds": 100,
        "held_bytes": 0,
        "memory_budget_bytes": 4_000_000_000,
        "memory_reserved_bytes": 1_000_000_000,
        "received": {"raw_bytes": 4e6, "wire_bytes": 2e6},
        "sent": {"raw_bytes": 4e6, "wire_bytes": 2e6},
        "faults": [],
    } | values


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        """Ignores errors: some tests have clients that give up."""


@contextlib.contextmanager
def http_server(bodies, *, tls=None, token=""):
    """Serves `bodies` by path, else 404; yields its address.

    With the SSLContext `tls` it uses HTTPS; with `token` it answers only requests that carry the
    token.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = bodies.get(self.path)
            refused = token and self.headers["Authorization"] != f"Bearer {token}"
            self.send_response(401 if refused else 404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_):
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
