"""Compares fp16 and bf16 through real sidecars and aggregators with torch's hooks over Gloo."""

from __future__ import annotations

import math
from pathlib import Path

import on_nodes
import pytest

pytestmark = pytest.mark.numeric

SCRIPT = Path(__file__).parent / "cast_jobs.py"


def run(name: str, tmp_path: Path, *, nodes: int, workers: int) -> list[dict]:
    return on_nodes.run(SCRIPT, name, tmp_path, (workers,) * nodes, shards=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_are_those_of_torchs_hooks_but_for_rounding(workers, tmp_path):
    for result in run("parity_with_torch", tmp_path, nodes=2, workers=workers):
        for codec in ("fp16", "bf16"):
            largest = result[codec]
            assert largest["ours"] <= 1, codec
            assert largest["torch"] <= 1, codec
            assert largest["each other"] <= 1, codec
            # A shift shows that it was rounded: something crossed the network in the narrow type.
            assert largest["shift"] > 0.1, codec
            assert largest["sent"] == 0.5, codec


def test_what_overflows_and_underflows_in_torchs_fp16_hook_does_not_in_ours(tmp_path):
    # Both nodes have a worker with a gradient of 7e4, beyond the 65504 that fp16 reaches, and one
    # with 1e4. torch casts each worker's gradient before it divides. Thalweg casts the node's mean,
    # 4e4. 9e-8 is a subnormal fp16, 2^-23; divided by 4 workers it is half the smallest, rounded to
    # 0.
    for result in run("range_of_fp16", tmp_path, nodes=2, workers=2):
        overflown, exact, underflown = result["torch"]
        assert (overflown, exact, underflown) == (math.inf, 2.0, 0.0)
        large, exact, small = result["ours"]
        assert math.isclose(large, 4e4, rel_tol=2 * 2.0**-11)
        assert exact == 2.0
        assert math.isclose(small, 9e-8, rel_tol=0, abs_tol=2 * 2.0**-25)
        assert small > 0
        assert result["counted"] == 0
