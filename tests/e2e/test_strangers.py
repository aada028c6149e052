"""Tests that a stranger who knows a job's name can neither enter nor fail nor delay it."""

from __future__ import annotations

import concurrent.futures
import json
import secrets

import pytest
import torch
from harness import TIMEOUT, servers
from shard_nodes import ELEMENTS, JOB, offers, session, train
from waiting import until

NODES = 2
STRANGERS_PATIENCE = 20.0  # his deadline; the job must be done before


def intrude(sidecar, node, shards, secret):
    """Joins as a stranger; returns the error, or None if he has been let in."""
    try:
        stranger = session(
            sidecar, node, shards, [-1] * len(shards), secret, timeout=STRANGERS_PATIENCE
        )
    except (RuntimeError, OSError, ValueError) as error:
        return error
    stranger.close()
    return None


def await_job(cluster):
    """Returns when the aggregator has this job, and no other."""
    page = "/api/v1/jobs"
    jobs = until(
        "a job", lambda: json.loads(cluster.page(cluster.aggregators[0], page))["jobs"], TIMEOUT
    )
    assert [job["name"] for job in jobs] == [JOB]


@pytest.mark.parametrize("has_secret", [True, False], ids=["wrong secret", "no secret"])
def test_stranger_who_comes_first_neither_enters_nor_fails_nor_delays_a_job(has_secret):
    with servers(shards=1) as cluster, concurrent.futures.ThreadPoolExecutor(8) as pool:
        listen = ["--shard-listen", "127.0.0.1:0"]
        nodes = [cluster.add_sidecar(*listen, aggregators="").address for _ in range(NODES)]
        theirs = [cluster.add_sidecar(aggregators="").address for _ in range(NODES)]
        extra = cluster.aggregators[0].address
        secret = secrets.token_hex(32)
        other = secrets.token_hex(32) if has_secret else ""
        with offers(nodes, secret) as hosted:
            refused = intrude(theirs[0], 0, [hosted[1]], other)
            waiting = pool.submit(intrude, theirs[1], 0, [extra], other)
            await_job(cluster)
            shards, hosts = [*hosted, extra], [0, 1, -1]
            trained = [
                pool.submit(train, path, node, shards, hosts, secret)
                for node, path in enumerate(nodes)
            ]
            for mean in [future.result(TIMEOUT) for future in trained]:
                assert torch.equal(mean, torch.full((ELEMENTS,), 1.5))
        # The aggregator takes him for the first node of another job, the others of which are late.
        assert not waiting.done()
        error = waiting.result(2 * STRANGERS_PATIENCE)
        assert isinstance(error, TimeoutError)
        assert "node 1 of 2 did not join" in str(error)
    assert isinstance(refused, RuntimeError)
    assert f"{hosted[1]}: this sidecar does not host a shard for job '{JOB}'" in str(refused)
    assert "not for one with this secret" in str(refused)
