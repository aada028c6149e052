"""Tests what becomes of parameters that scripts change by hand while shards keep weights."""

from __future__ import annotations

import functools
from pathlib import Path

import on_nodes
import pytest

run = functools.partial(on_nodes.run, Path(__file__).parent / "hand_changes_jobs.py")


@pytest.mark.parametrize("pull", ["fp32", "bf16", "int8", "onebit"])
def test_change_that_torch_does_not_count_is_published_and_other_weights_lose_nothing(
    pull, tmp_path
):
    first, _ = run("published_data", tmp_path, (1, 1), 0, PULL=pull)
    assert first == {"published": True, "others stay": True}
