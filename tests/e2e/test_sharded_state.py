"""Tests sharded optimizer state and checkpoints on the back end "thalweg"."""

from __future__ import annotations

import functools
from pathlib import Path

import on_nodes
import pytest

run = functools.partial(on_nodes.run, Path(__file__).parent / "sharded_state_jobs.py")


@pytest.mark.parametrize("nodes", [(1, 1), pytest.param((2, 2), marks=pytest.mark.long)])
def test_fused_optimizers_with_sharded_state_take_the_steps_of_whole_ones(nodes, tmp_path):
    results = run("zero_redundancy", tmp_path, nodes)
    for name, first in results[0].items():
        outcomes = [result[name] for result in results]
        assert {outcome["ours"] for outcome in outcomes} == {first["whole"]}
        if nodes == (1, 1):  # otherwise Gloo's sums have another order
            assert first["theirs"] == first["ours"]
        assert first["consolidated"] == first["whole state"]
        assert sum(outcome["kept"] for outcome in outcomes) == first["of"]
        assert max(outcome["kept"] for outcome in outcomes) < first["of"]


def chain(tmp_path: Path, *places: tuple[tuple[int, ...], str]) -> None:
    """Checks that each job begins with what the one before has saved, model and optimizer."""
    saved = ""
    for index, (nodes, kind) in enumerate(places):
        folder = tmp_path / str(index)
        folder.mkdir()
        env = {"FOLDER": str(tmp_path / "saved"), "KIND": kind}
        results = run("resharded", folder, nodes, **env)
        assert {result["loaded"] for result in results} == {saved}
        assert len({result["shard"] for result in results}) == len(results)
        saved = results[0]["saved"]
        assert saved not in (results[0]["loaded"], results[0]["untrained"])


def test_checkpoint_of_four_workers_goes_on_with_two_of_the_other_kind(tmp_path):
    chain(tmp_path, ((2, 2), "fsdp2"), ((1, 1), "fsdp1"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_checkpoint_goes_from_four_workers_to_two_and_to_three_bit_for_bit(kind, tmp_path):
    chain(tmp_path, ((2, 2), kind), ((1, 1), kind), ((2, 1), kind))
