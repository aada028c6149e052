"""Tests that 64 nodes, each with a sidecar that hosts a shard, join one job at once."""

from __future__ import annotations

import concurrent.futures
import secrets

import pytest
import torch
from harness import servers
from shard_nodes import ELEMENTS, offers, train

NODES = 64
# All of them, and the sockets between each two, share this machine's cores.
TIMEOUT = 60.0


@pytest.mark.alone  # it needs all cores for seconds
def test_64_nodes_join_at_once_and_get_the_exact_mean():
    with servers() as cluster, concurrent.futures.ThreadPoolExecutor(NODES) as pool:
        listen = ["--shard-listen", "127.0.0.1:0"]
        paths = [cluster.add_sidecar(*listen, aggregators="").address for _ in range(NODES)]
        secret = secrets.token_hex(32)
        with offers(paths, secret) as shards:
            trained = [
                pool.submit(
                    train,
                    path,
                    node,
                    shards,
                    list(range(NODES)),
                    secret,
                    nodes=NODES,
                    timeout=TIMEOUT,
                )
                for node, path in enumerate(paths)
            ]
            means = [future.result(TIMEOUT) for future in trained]
    expected = torch.full((ELEMENTS,), sum(2.0 ** (node % 8) for node in range(NODES)) / NODES)
    for mean in means:
        assert torch.equal(mean, expected)
