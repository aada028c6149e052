"""Tests how the programs take the memory that their shards' jobs may use."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from harness import metric, servers

from thalweg import _binaries

BUDGET = "thalweg_shard_memory_budget_bytes"


def test_variable_and_option_take_units():
    with servers(shards=1, env={"THALWEG_MEMORY_LIMIT": "3G"}) as running:
        assert metric(running.aggregators[0], BUDGET) == 3 << 30
        embedded = running.add_sidecar("--memory-limit", "512Mi", aggregators="")
        assert metric(embedded, BUDGET) == 512 << 20


def test_default_is_less_than_the_machine_has():
    info = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (kib,) = [int(line.split()[1]) for line in info if line.startswith("MemTotal:")]
    with servers(shards=1) as running:
        assert 0 < metric(running.aggregators[0], BUDGET) <= kib * 1024 / 2


@pytest.mark.parametrize("value", ["much", "-1", "3GB/s", "4"])
def test_what_is_no_size_is_refused(value):
    argv = [str(_binaries.find(_binaries.AGGREGATOR)), f"--memory-limit={value}"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode != 0
    assert "--memory-limit" in ended.stderr + ended.stdout
