"""Tests the messages between the workers of a node."""

from __future__ import annotations

import json
import socket
import threading

import hypothesis
import pytest
from hypothesis import strategies

from thalweg.node import _words
from thalweg.node._words import Address, Line

WAIT = 60.0  # for what comes


def test_followers_are_known_by_their_rank_and_hear_what_is_said():
    listener, address = _words.listen()
    with listener:
        ends = {rank: _words.connect(address, rank, WAIT) for rank in (7, 5)}
        lines = _words.accept(listener, address.token, {5, 7}, WAIT)
    for rank, line in lines.items():
        line.send({"kind": "welcome", "rank": rank})
        line.send({"kind": "result"})
    for rank, end in ends.items():
        assert end.receive(WAIT) == {"kind": "welcome", "rank": rank}
        assert end.receive(WAIT) == {"kind": "result"}
        assert end.receive(0.01) is None


def test_strangers_are_not_taken_for_followers_and_the_missing_are_named():
    listener, address = _words.listen()
    with listener:
        for guess in ("guessed", "ΔΨ"):
            _words.connect(Address(address.name, guess), 1, WAIT)
        _words.connect(address, 2, WAIT)
        with pytest.raises(TimeoutError, match="rank 1, 3 of this node did not connect"):
            _words.accept(listener, address.token, {1, 2, 3}, 0.2)


@pytest.mark.parametrize(
    "said", [b"", b"\xff\n", b"{\n", b"7\n", b"[" * 60_000 + b"\n", b"x" * (200 << 10)]
)
def test_what_is_no_message_ends_the_connection(said):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: (theirs.sendall(said), theirs.close()))
        writer.start()
        with pytest.raises(OSError):
            Line(ours).receive(WAIT)
        ours.close()
        writer.join()


_VALUES = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
    max_leaves=8,
)
_SAID = (
    strategies.binary(max_size=40)
    | _VALUES.map(lambda value: json.dumps(value).encode())
    | strategies.integers(1, 30_000).map(lambda depth: b'{"a":' * depth)
)


def _messages(said: bytes) -> list[object]:
    """Returns the objects at the beginning of what was said."""
    messages = []
    for line in said.split(b"\n")[:-1]:
        try:
            words = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(words, dict):
            break
        messages.append(words)
    return messages


@hypothesis.settings(deadline=None)
@hypothesis.given(strategies.lists(_SAID).map(b"\n".join))
def test_made_up_words_are_messages_or_end_the_connection(said):
    said = said[: 60 << 10]  # a socket takes that much at once
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(said)
        line, heard = Line(ours), []
        with pytest.raises(OSError):
            while True:
                heard.append(line.receive(WAIT))
    assert heard == _messages(said)


def test_hanging_up_ends_a_wait_of_either_side():
    ours, theirs = (Line(end) for end in socket.socketpair())
    ended = []

    def wait(line: Line) -> None:
        with pytest.raises(OSError):
            line.receive()
        ended.append(line)

    threads = [threading.Thread(target=wait, args=(line,)) for line in (ours, theirs)]
    for thread in threads:
        thread.start()
    ours.hang_up()
    for thread in threads:
        thread.join(WAIT)
    assert len(ended) == 2


def test_end_that_reads_nothing_holds_up_nobody_for_long(monkeypatch):
    monkeypatch.setattr(_words, "_SEND_SECONDS", 1)
    one, other = socket.socketpair()
    with one, other:
        line = Line(one)
        with pytest.raises(OSError, match="temporarily unavailable"):
            while True:
                line.send({"kind": "working", "text": "x" * 10_000})
