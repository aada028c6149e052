"""Tests that optimizers of many workers train where a script has another default device."""

from __future__ import annotations

from pathlib import Path

import on_nodes
import pytest

JOBS = Path(__file__).parent / "default_device_jobs.py"


@pytest.mark.parametrize("case", ["weighted", "int8", "sparse"])
def test_local_updates_have_the_same_bits_with_another_default_device(case, tmp_path):
    assert on_nodes.run(JOBS, "local", tmp_path, (1, 1), CASE=case) == [[True, True]] * 2


def test_steps_on_shards_have_the_same_bits_with_another_default_device(tmp_path):
    assert on_nodes.run(JOBS, "served", tmp_path, (1, 1)) == [[True, True]] * 2
