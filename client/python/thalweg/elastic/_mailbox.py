"""A node's port for the others: its standing, who has come to it, and the plan that they get.

Answers and questions are JSON over HTTP/1.0, a connection each: `curl HOST:PORT` shows a standing.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias

from thalweg._settings._config import ConfigError
from thalweg.elastic._membership import Membership
from thalweg.elastic._nodes import Address
from thalweg.elastic._quorum import Standing

# Who has come asks again several times within this time; a node that does not has gone.
FRESH_SECONDS = 2.0
_ANSWER_SECONDS = 1.0
_MAX_BYTES = 1 << 16
_BIND_SECONDS = 10.0  # a process that is ending may have the port for so long
_POLL_SECONDS = 0.1


class Plan(NamedTuple):
    """A membership that is to begin."""

    generation: int
    name: str  # no other plan has it
    nodes: tuple[int, ...]
    workers: tuple[int, ...]  # of each of these nodes
    questions: tuple[str, ...]  # of each of these nodes
    store: Address  # where its workers meet
    lost: tuple[int, ...]  # and the nodes that have come: see _quorum.changes()
    come: tuple[int, ...]

    def membership(self, rank: int) -> Membership:
        """Returns what a worker is told."""
        return Membership(self.generation, self.nodes, self.lost, self.come, rank, self.world_size)

    @property
    def world_size(self) -> int:
        return sum(self.workers)

    def holds(self, node: int, seen: Standing | None) -> bool:
        """Returns whether a node that says this of itself begins the membership, or has done so."""
        if seen is None:
            return False
        question = self.questions[self.nodes.index(node)]
        return seen.generation >= self.generation or seen.question == question

    def first_rank(self, node: int) -> int:
        """Returns the rank of a node's first worker."""
        return sum(self.workers[: self.nodes.index(node)])


class _After(NamedTuple):
    """A worker asks its node's first one for the plan after this."""

    after: str
    ended: int


_Asked: TypeAlias = Standing | _After | None  # a node that has come; None: who only looks


class Mailbox:
    """Serves a node's mailbox until close(). Thread-safe. Raises OSError when it has no port."""

    def __init__(
        self, address: Address, standing: Standing, on_left: Callable[[], None] = lambda: None
    ) -> None:
        """Calls `on_left` on a thread of its own, perhaps again, when a member of the membership
        in which this node trains waits for another one; it must call nothing here.
        """
        self._lock = threading.Lock()
        self._standing = standing
        self._on_left = on_left
        self._plan: Plan | None = None
        self._untaken: set[str] = set()  # questions of the plan whose nodes have not got it
        self._for_workers: Plan | None = None
        self._come: dict[int, tuple[float, Standing]] = {}
        self._server = _listen(address.port, self)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_SECONDS,),
            name="thw-elastic",
            daemon=True,
        )
        self._thread.start()

    def set_standing(self, standing: Standing) -> None:
        with self._lock:
            self._standing = standing

    def offer(self, plan: Plan, own_question: str) -> None:
        """Gives a plan to all whose question is in it."""
        with self._lock:
            self._plan, self._untaken = plan, {*plan.questions} - {own_question}

    def withdraw(self) -> None:
        """Gives nobody the plan that was offered any more."""
        with self._lock:
            self._plan = None

    def is_taken(self) -> bool:
        """Returns whether all nodes have got the plan that was offered."""
        with self._lock:
            return not self._untaken

    def set_plan(self, plan: Plan) -> None:
        """Gives it to this node's workers, too."""
        with self._lock:
            self._plan = self._for_workers = plan

    def come(self) -> dict[int, Standing]:
        """Returns those that wait for another plan than this node's."""
        oldest = time.monotonic() - FRESH_SECONDS
        with self._lock:
            known = () if self._for_workers is None else self._for_workers.questions
            return {
                node: one
                for node, (since, one) in self._come.items()
                if since > oldest and one.question not in known
            }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, asked: _Asked) -> dict[str, Any]:
        """Returns what a node or a worker of this node gets."""
        with self._lock:
            plan = self._plan
            if isinstance(asked, _After):  # a worker of this node
                plan = self._for_workers if asked.ended == self._standing.ended else None
                is_new = plan is not None and plan.name != asked.after
                return {"plan": _encode(plan) if is_new else None}
            if asked is not None:
                standing = asked
                if standing.nodes != self._standing.nodes:
                    return {"plan": None, "expected": self._standing.nodes}
                if standing.ended != self._standing.ended:  # who looks at this node sees why
                    return {"plan": None}
                if plan is not None and standing.question in plan.questions:
                    self._come.pop(standing.node, None)
                    self._untaken.discard(standing.question)
                    return {"plan": _encode(plan)}
                if self._has_left(standing):
                    self._on_left()
                self._come[standing.node] = (time.monotonic(), standing)
            return {"standing": self._standing._asdict(), "plan": None}

    def _has_left(self, standing: Standing) -> bool:
        """Returns whether a node whose question is new left the membership in which this trains."""
        ours = self._standing
        trains = self._plan is not None and not ours.question and not ours.has_finished
        return trains and standing.node in ours.members


def look_at(address: Address) -> Standing | None:
    """Returns what the node there says of itself; None: it does not answer."""
    answer = _ask(address, {})
    return None if answer is None else _standing_of(answer["standing"])


def come_to(address: Address, standing: Standing) -> Plan | None:
    """Says at a leader that this node waits for its plan; returns that, if it is there. Raises
    ConfigError when that one knows other nodes.
    """
    answer = _ask(address, standing._asdict())
    if answer is not None and "expected" in answer:
        raise ConfigError(
            f"thalweg: THALWEG_ELASTIC is {standing.nodes} at node {standing.node}, but "
            f"{answer['expected']} at {address}: it must be the same on all nodes"
        )
    return None if answer is None else _decode(answer["plan"])


def plan_after(address: Address, last: str, ended: int) -> Plan | None:
    """Returns the plan that this node's first worker has after another one, if it has ended as many
    trainings. Raises ConnectionError when that worker does not answer.
    """
    answer = _ask(address, _After(last, ended)._asdict())
    if answer is None:
        raise ConnectionError(f"thalweg: this node's first worker does not answer at {address}")
    return _decode(answer["plan"])


def _ask(address: Address, question: Mapping[str, Any]) -> dict[str, Any] | None:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("POST", "/", json.dumps(question))
        answer = json.loads(connection.getresponse().read(_MAX_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return answer if isinstance(answer, dict) and "plan" in answer else None


def _encode(plan: Plan | None) -> dict[str, Any] | None:
    return None if plan is None else plan._asdict()


def _decode(found: Mapping[str, Any] | None) -> Plan | None:
    if found is None:
        return None
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return Plan(**{**found, **lists, "store": Address(*found["store"])})


def _asked(found: Mapping[str, Any]) -> _Asked:
    """Raises KeyError, TypeError for what no node asks."""
    if "after" in found:
        return _After(found["after"], found["ended"])
    return _standing_of(found) if "question" in found else None


def _standing_of(found: Mapping[str, Any]) -> Standing:
    return Standing(**{**found, "members": tuple(found["members"])})


def _listen(port: int, mailbox: Mailbox) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = _ANSWER_SECONDS

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", 0))
                text = self.rfile.read(max(0, min(length, _MAX_BYTES)))
                asked = _asked(json.loads(text or b"{}"))
            except (KeyError, TypeError, ValueError):
                self.send_error(400, "not a question of a node")
                return
            self._answer(asked)

        def _answer(self, asked: _Asked) -> None:
            body = json.dumps(mailbox.answer(asked)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing: nodes look at each other many times a second while they gather."""

    server = _Server(("", port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = _bind(port)
    return server


def _bind(port: int) -> socket.socket:
    """Returns a socket that listens on all interfaces: a host may know itself by a loopback's."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            if time.monotonic() >= deadline:
                why = f"thalweg: cannot listen at port {port}: {error.strerror}"
                raise OSError(error.errno, why) from None
        time.sleep(_POLL_SECONDS)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of connections that break or are no node's."""
