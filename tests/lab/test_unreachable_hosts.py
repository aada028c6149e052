"""Tests what jobs say, and when, whose hosts cannot reach each other's shards."""

import os
import re

import pytest
import torchrun

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

PORT = 7000
TIMEOUT = 5
# Half a second of the time is kept for finding out why; a busy machine may have used more before.
MOST_SECONDS = r"([1-3](\.\d)?|4(\.[0-5])?)"


def assert_refused(ended, *words):
    """Fails unless all hosts have failed with an error that has all words, some of which may be
    patterns, and are gone.
    """
    for host in ended["hosts"]:
        assert host["code"] == 1, host["output"]
        errors = [line for line in host["output"].splitlines() if "Error: thalweg: " in line]
        assert errors, host["output"]
        for word in words:
            assert re.search(word if isinstance(word, re.Pattern) else re.escape(word), errors[-1])
    assert ended["left"] == []


def test_firewall_that_drops_ends_the_job_in_time_with_both_addresses_and_what_to_set(tmp_path):
    env = {
        "THALWEG_ENABLE": "1",
        "THALWEG_TIMEOUT": str(TIMEOUT),
        "THALWEG_SHARD_PORTS": str(PORT),
    }
    ended = torchrun.run(tmp_path, env, hosts=2, dropped={"node1": PORT})
    assert_refused(
        ended,
        re.compile(rf"10\.77\.0\.2:{PORT} cannot be reached within {MOST_SECONDS} s"),
        f"node 0 (node0), at 10.77.0.1:{PORT}, must reach node 1 (node1) at 10.77.0.2:{PORT}",
        "THALWEG_INTERFACE",
        "THALWEG_SHARD_PORTS in firewalls",
    )


def test_loopback_addresses_set_by_mistake_are_refused_on_all_hosts(tmp_path):
    env = {"THALWEG_ENABLE": "1", "THALWEG_INTERFACE": "lo"}
    ended = torchrun.run(tmp_path, env, hosts=2)
    assert_refused(ended, "node0 would publish 127.0.0.1", "set THALWEG_INTERFACE")
