"""Checks what lossy codecs do to tensors of many sizes, through real sidecars and aggregators."""

from __future__ import annotations

from pathlib import Path

import on_nodes
import pytest

pytestmark = pytest.mark.numeric

SCRIPT = Path(__file__).parent / "lossy_jobs.py"
SMALL = ("one", "scalar", "bias", "most")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return on_nodes.run(SCRIPT, "one_step", tmp_path_factory.mktemp("lossy"), (1, 1), shards=2)


@pytest.mark.parametrize("codec", ["int8:start=0", "onebit:start=0"])
def test_small_tensors_arrive_within_fp16s_rounding_whatever_their_neighbours(codec, results):
    for result in results:
        errors = result[codec]["plain"]
        assert max(errors[name]["fp16"] for name in SMALL) <= 1
        # They do not when a rule has them take the codec itself, and large tensors never do.
        assert max(result[codec]["with rule"][name]["fp16"] for name in SMALL) > 1
        assert min(errors[name]["fp16"] for name in errors if name not in SMALL) > 1


def test_scale_of_int8_is_the_tensors_own_whatever_its_neighbours_and_its_size(results):
    for result in results:
        for errors in result["int8:start=0"].values():
            assert max(error["int8"] for error in errors.values()) <= 1
