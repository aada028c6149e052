"""PowerSGD through real sidecars and aggregators, compared with torch's communication hook."""

from __future__ import annotations

import math
from pathlib import Path

import on_nodes
import pytest

HERE = Path(__file__).parent


def run(
    name: str,
    tmp_path: Path,
    *,
    nodes: int,
    workers: int = 1,
    shards: int = 2,
    script: str = "powersgd_jobs.py",
) -> list[dict]:
    places = (workers,) * nodes
    return on_nodes.run(HERE / script, name, tmp_path, places, shards=shards, seconds=150)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.numeric), 4])
def test_each_iteration_is_torchs_from_the_same_state(world, tmp_path):
    # torch's hook in float64 begins every iteration with Thalweg's state, so that what is compared
    # is one iteration's rounding, for which Matrix.bound derives a limit. Two trajectories of their
    # own would drift apart exponentially: error feedback makes singular values cross each other.
    for result in run("step_by_step", tmp_path, nodes=world, script="powersgd_parity_jobs.py"):
        for distances in result.values():
            assert max(distances["ours"]) < 1
            # The limit is tight enough to notice that the residual is not added. The first
            # compressed iteration has none.
            assert min(distances["no residual"][1:]) > 1
            # A mean of float32 has world - 1 additions and one division.
            assert max(distances["others"]) <= world
            assert distances["sent"] < distances["raw"] / 2


def test_training_by_itself_learns_as_with_torchs_hook(tmp_path):
    for result in run("free_running", tmp_path, nodes=2):
        for losses in result.values():
            assert losses[-1] < losses[0] / 10


def test_gradients_of_low_rank_are_exact_where_a_matrix_lies_by_columns(tmp_path):
    for errors in run("by_columns", tmp_path, nodes=2):
        # Sums of 160 products are rounded. Of other rows the rank would be higher, and errors are
        # about 1 then.
        assert max(errors) < 160 * 2**-24


def test_what_one_half_type_holds_arrives_where_factors_travel_in_the_other(tmp_path):
    for result in run("other_half_type", tmp_path, nodes=2):
        assert result == {"float16": [65408.0], "bfloat16": [2.0**100]}


def test_sixty_layers_in_many_buckets_finish_bit_identical(tmp_path):
    results = run("many_buckets", tmp_path, nodes=2, workers=2)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert result["stats"]["rounds"] > 200 * 10
        assert result["stats"]["compression"] > 10
        assert result["stats"]["nonfinite_elems"] == 0


def test_buckets_that_fp16_cannot_hold_are_sent_whole_in_one_order_by_all_nodes(tmp_path):
    assert run("given_up_in_many_buckets", tmp_path, nodes=2) == [[3072.0], [3072.0]]


@pytest.mark.numeric
def test_nonfinite_gradients_reach_the_optimizer_and_leave_no_trace(tmp_path):
    results = run("nonfinite", tmp_path, nodes=2)
    for result in results:
        assert result == results[0]
        for number, iteration in enumerate(result["iterations"]):
            # As with allreduce, one column is not finite, in these iterations only.
            assert iteration["nan"] == (64 if number == 4 else 0)
            assert iteration["inf"] == (64 if number == 6 else 0)
            # The gradient has rank 1, so compressing it with rank 2 loses nothing.
            mean = 1.5 + number
            assert all(math.isclose(v, mean, rel_tol=1e-5) for v in iteration["column"])
        assert result["counted"] == 2 * 64


def test_run_resumed_from_a_distributed_checkpoint_goes_on_bit_for_bit(tmp_path):
    results = run("resume", tmp_path, nodes=2, workers=2)
    for result in results:
        assert result["resumed"] == result["straight"] == results[0]["straight"]
        assert "saved with codec 'fp16'" in result["refused"]
