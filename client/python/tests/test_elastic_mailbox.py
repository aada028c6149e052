"""Tests what a node's port answers to whoever asks, and to the node's further workers."""

import http.client
import json

import pytest

from thalweg._job._addresses import free_port
from thalweg.elastic import _gathering, _mailbox
from thalweg.elastic._gathering import FurtherWorker
from thalweg.elastic._mailbox import Mailbox, Plan
from thalweg.elastic._nodes import Address
from thalweg.elastic._quorum import Standing

SECONDS = 60.0
STANDING = Standing(0, workers=2, nodes="a:1")


@pytest.fixture
def address():
    """Returns where a node that stands there answers."""
    here = Address("127.0.0.1", free_port())
    mailbox = Mailbox(here, STANDING)
    yield here
    mailbox.close()


def ask(address, method, length=None):
    """Returns the status and what is answered to a request without a body."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=SECONDS)
    connection.putrequest(method, "/")
    if length is not None:
        connection.putheader("Content-Length", length)
    connection.endheaders()
    answer = connection.getresponse()
    status, text = answer.status, answer.read()
    connection.close()
    return status, json.loads(text) if status == http.HTTPStatus.OK else None


@pytest.mark.parametrize(
    ("method", "length"), [("GET", None), ("POST", None), ("POST", "0"), ("POST", "-5")]
)
def test_who_asks_nothing_is_shown_the_standing(address, method, length):
    status, answer = ask(address, method, length)
    assert status == http.HTTPStatus.OK
    assert _mailbox._standing_of(answer["standing"]) == STANDING
    assert answer["plan"] is None


def test_length_that_is_no_number_is_refused(address):
    assert ask(address, "POST", "many") == (http.HTTPStatus.BAD_REQUEST, None)
    assert _mailbox.look_at(address) == STANDING


@pytest.mark.parametrize(
    "last", [None, Plan(1, "old", (0,), (2,), ("a",), Address("a", 1), (), ())]
)
def test_further_worker_whose_first_one_has_no_plan_in_time_is_told(address, last, monkeypatch):
    monkeypatch.setattr(_gathering, "_GONE_SECONDS", 0.1)
    monkeypatch.setattr(_mailbox, "_ANSWER_SECONDS", SECONDS)
    with pytest.raises(TimeoutError, match=r"first worker has had no membership within 0\.3 s"):
        FurtherWorker(address).gather(STANDING, last, 0.3)
