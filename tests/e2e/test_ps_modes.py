"""Tests the example that compares the ways to keep weights on shards."""

from __future__ import annotations

import itertools
import json

from example_runs import run_example

SMALL = "--task gpt --steps 40 --width 64 --batch 4 --look 5 --work 0.01 --slow 4"
MODES = ["sync", "stale:2", "async", "local:10"]


def test_modes_train_from_the_same_weights_and_are_drawn_over_time_and_bytes(tmp_path):
    run_example("ps_modes", ["--modes", *MODES, *SMALL.split()], tmp_path)
    curves = json.loads((tmp_path / "gpt.json").read_text())["curves"]
    assert sorted(curves) == sorted(MODES)
    for curve in curves.values():
        losses = [point["loss"] for point in curve]
        assert len(losses) >= 5
        assert losses[-1] < losses[0] < 5.7  # log 256 is 5.55
        assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(curve))
    last = {mode: curve[-1] for mode, curve in curves.items()}
    # The exchanges of ten steps in one.
    assert last["local:10"]["sent"] < last["sync"]["sent"] / 9
    assert (tmp_path / "gpt.png").stat().st_size > 10_000
