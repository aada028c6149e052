"""Tests that an optimizer on the shards trains with the bits of the same one on the workers."""

from __future__ import annotations

import functools
from pathlib import Path

import on_nodes
import pytest
from server_optimizer_every_way import WAYS

run = functools.partial(on_nodes.run, Path(__file__).parent / "server_optimizer_jobs.py")

# How many workers the nodes have, and how many aggregators there are; 0: the sidecars host shards.
PLACES = [
    (nodes, shards) for nodes in ((1,), (2, 1), (1, 1, 1), (1, 1, 1, 1)) for shards in (0, 1, 2, 3)
]
OPTIMIZERS = ["nesterov", "adam", "adamw", "lamb"]


def assert_equal(tmp_path, nodes: tuple[int, ...], shards: int, optimizer: str, steps: int) -> None:
    """Trains everywhere, with clipping and scalers and without, and from checkpoints half-way."""
    env = {"OPTIMIZER": optimizer, "STEPS": str(steps), "CHUNK_BYTES": str(4 * 4096)}
    results = run("trained_every_way", tmp_path, nodes, shards, seconds=900, **env)
    for way in WAYS:
        expected = results[0][way]["workers"]
        assert expected["weights"] != results[0][way]["before"]["weights"]
        if "scaled" in way:
            assert expected["skipped"] > 0
        for result in results:
            for how in ("workers", "servers", "servers then workers", "workers then servers"):
                assert result[way][how] == expected, (way, how)


@pytest.mark.parametrize(("nodes", "shards"), [((2, 1), 2), ((1, 1, 1), 0)])
@pytest.mark.parametrize("optimizer", ["nesterov", "adamw", "lamb"])
def test_few_steps_have_the_same_bits_with_clipping_and_scalers(nodes, shards, optimizer, tmp_path):
    assert_equal(tmp_path, nodes, shards, optimizer, 14)


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("nodes", "shards"), PLACES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hundred_steps_have_the_same_bits_everywhere(nodes, shards, optimizer, tmp_path):
    assert_equal(tmp_path, nodes, shards, optimizer, 100)
