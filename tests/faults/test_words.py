"""Attacks by words of peers: the names and reasons that they give."""

from __future__ import annotations

import json
import re

import grpc
import pytest
import wire_messages
from harness import servers
from scene import scene, start_aggregator
from stranger import Stranger

pytestmark = pytest.mark.alone

FORGED = "00:00:00.000000 error thalweg-aggregator: forged"
MARKUP = """"><script>alert(1)</script>{}\\'"""
LOG = 256 << 10  # bytes that the attack may add to the log


def leave(stranger, token, reason):
    """Ends the job of the token for the reason; returns the code of a refusal, or None."""
    request = wire_messages.message("LeaveRequest", token=token, code=13, reason=reason)
    return stranger.refusal("Leave", request)


def fail_job(stranger, job, reason):
    """Joins a job of one node, and makes it fail with the reason."""
    token = stranger.call("Join", wire_messages.join_request(job)).token
    assert leave(stranger, token, reason) is None


@pytest.mark.parametrize("word", [f"x\n{FORGED}", "\x1b[2J\x1b[31m"], ids=["newline", "escape"])
def test_words_of_peers_cannot_forge_the_log(word, tmp_path):
    log = tmp_path / "log"
    with servers() as cluster:
        server = start_aggregator(cluster, log)
        with Stranger(server.address) as stranger:
            request = wire_messages.join_request(word, nodes=2, node_name=word)
            stranger.refusal("Join", request, timeout=1)
            fail_job(stranger, "reason", word)
    lines = log.read_bytes().decode(errors="replace").split("\n")
    assert any("reason" in line for line in lines)
    assert not [line for line in lines if line.startswith(FORGED)]
    assert not [line for line in lines if "\x1b" in line]


def test_log_grows_little_whatever_peers_say(tmp_path):
    before = "168 MB of log in 1.6 s"
    with scene(tmp_path, "reasons of 4 MiB, 1000 failures", before=before) as attacked:
        with attacked.stranger() as stranger:
            token = stranger.call("Join", wire_messages.join_request("long")).token
            for _ in range(10):
                assert leave(stranger, token, "x" * (4 << 20)) == grpc.StatusCode.RESOURCE_EXHAUSTED
            leave(stranger, token, "x" * 60_000)
            for i in range(1000):
                fail_job(stranger, f"many{i}", "x" * 1000)
        attacked.assert_unharmed()
        assert attacked.log.stat().st_size <= LOG


def test_page_metrics_and_api_withstand_hostile_names(tmp_path):
    with servers() as cluster:
        server = start_aggregator(cluster, tmp_path / "log")
        with Stranger(server.address) as stranger:
            request = wire_messages.join_request(MARKUP, node_name=MARKUP)
            token = stranger.call("Join", request).token
            [job] = json.loads(cluster.page(server, "/api/v1/jobs"))["jobs"]
            assert job["name"] == MARKUP
            assert MARKUP not in cluster.page(server, "/")
            sample = re.compile(r"(#.*|[a-z_]+(\{([a-z_]+=\"([^\"\\]|\\.)*\",?)*\})? \S+)")
            for line in cluster.page(server).splitlines():
                assert sample.fullmatch(line), line
            stranger.call("Leave", wire_messages.message("LeaveRequest", token=token))
