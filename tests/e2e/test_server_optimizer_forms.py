"""Tests scripts with the optimizer on the shards that do not write their steps as most do."""

from __future__ import annotations

import functools
from pathlib import Path

import on_nodes
import pytest

run = functools.partial(on_nodes.run, Path(__file__).parent / "server_optimizer_forms_jobs.py")

FORMS = (
    "by_hand",
    "uneven_accumulation",
    "channels_last",
    "looked_at",
    "clipped_twice",
    "published_by_one",
    "published_data",
    "restored_from_a_vector",
    "differentiated_again",
    "scaled_at_first",
    "idle_without_a_rate",
    "overlapped_attention",
    "overlapped_return",
)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_a_single_process_however_steps_are_written(form, tmp_path):
    for difference, moved in run(form, tmp_path, (1, 1), 0):
        # Rounding of seven steps: of sums of gradients, and of weights below 0.4.
        assert difference <= 7 * (10 * moved + 0.4) * 2**-24
        assert moved > 1e-3
