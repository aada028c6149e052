"""Tests what a worker is told when its node and an aggregator speak different wire versions."""

from __future__ import annotations

import contextlib
import re
import secrets
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import wire_messages
from harness import TIMEOUT, servers
from shard_nodes import session

OURS = wire_messages.wire_version()
THEIRS = OURS - 1


def refuse(request, context):
    """Answers as aggregators do to nodes of another version."""
    speaks = f"node speaks wire versions {request.min_wire_version} to {request.max_wire_version}"
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{speaks}, this aggregator speaks {THEIRS}")


def choose(_, context):
    """Answers as if the node spoke the aggregator's version."""
    return wire_messages.message("JoinResponse", wire_version=THEIRS, token=1, window_chunks=1)


@contextlib.contextmanager
def aggregator(join):
    """Serves the first calls of a node, as an aggregator of version THEIRS; gives the address."""

    def handler(name, answer):
        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=lambda data: wire_messages.parse(f"{name}Request", data),
            response_serializer=lambda message: message.SerializeToString(),
        )

    answers = {
        "Probe": lambda *_: wire_messages.message("ProbeResponse"),
        "Challenge": lambda *_: wire_messages.message("ChallengeResponse", nonce=b"n" * 32),
        "Join": join,
    }
    control = {name: handler(name, answer) for name, answer in answers.items()}
    # Probes of the link are longer than grpcio allows by itself.
    options = [("grpc.max_receive_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(4), options=options)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("thalweg.v1.Control", control)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(TIMEOUT)


@pytest.mark.parametrize(
    ("join", "words"),
    [
        (refuse, f"node speaks wire versions {OURS} to {OURS}, this aggregator speaks {THEIRS}"),
        (choose, f"the aggregator chose wire version {THEIRS}, this node speaks {OURS}: install"),
    ],
)
def test_worker_is_told_both_versions_and_the_address_of_an_aggregator_of_another(join, words):
    with servers() as cluster, aggregator(join) as address:
        sidecar = cluster.add_sidecar(aggregators="").address
        with pytest.raises((RuntimeError, ValueError)) as error:
            session(sidecar, 0, [address], [-1], secrets.token_hex(32))
    assert re.search(re.escape(address) + ".*" + re.escape(words), str(error.value))
