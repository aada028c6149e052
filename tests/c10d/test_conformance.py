"""Tests the back end "thalweg" with a sample of torch's own tests of back ends.

`python tests/c10d/conformance.py --backend thalweg` runs them all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFORMANCE = Path(__file__).with_name("conformance.py")

# One of each collective; the complex, asynchronous and coalesced ones are other code.
COLLECTIVES = [
    "test_all_gather",
    "test_all_gather_complex",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_product",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_equal_split",
    "test_barrier_full_group",
    "test_broadcast",
    "test_gather",
    "test_reduce_min",
    "test_scatter_object_list",
]
GROUPS_AND_TRAINING = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_SyncBatchNorm_process_group",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_create_graph",
    "test_get_future",
    "test_get_rank_size_group",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
]


def run(tmp_path, backend, names):
    """Returns the exit code, and by name the outcome of each test and its reason or error."""
    out = tmp_path / "outcomes.json"
    argv = ["--backend", backend, "--only", f"^({'|'.join(names)})$", "--json", str(out)]
    code = subprocess.run([sys.executable, str(CONFORMANCE), *argv], timeout=100).returncode
    outcomes = json.loads(out.read_text())
    return code, {each["name"]: (each["outcome"], each["detail"]) for each in outcomes}


@pytest.mark.parametrize("names", [COLLECTIVES, GROUPS_AND_TRAINING], ids=["collectives", "rest"])
def test_sample_of_torchs_own_tests_passes(names, tmp_path):
    code, outcomes = run(tmp_path, "thalweg", names)
    assert outcomes == dict.fromkeys(names, ("passed", ""))
    assert code == 0


def test_back_end_that_does_not_work_fails_torchs_tests(tmp_path):
    code, outcomes = run(tmp_path, "nonesuch", ["test_barrier"])
    assert outcomes["test_barrier"][0] == "failed"
    assert "nonesuch" in outcomes["test_barrier"][1].lower()
    assert code == 1
