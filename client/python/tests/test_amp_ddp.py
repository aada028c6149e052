"""Tests mixed precision under DistributedDataParallel: two processes over Gloo."""

import pytest
from gloo_workers import run_workers

# Each of two steps subtracts lr 0.25 times the mean over workers of (1, 2) + (1, 1).
EXPECTED = [1.0 - 2 * 0.25 * 2.0, 2.0 - 2 * 0.25 * 3.0]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns the final values of both workers."""
    folder = tmp_path_factory.mktemp("store")
    return run_workers("amp_ddp_worker.py", 2, folder, timeout=90)


def test_all_workers_start_from_the_masters_of_the_first_and_stay_equal(results):
    first, second = (result["seeds"] for result in results)
    assert first["initial"] != second["initial"]
    assert first["shared"] == second["shared"] == first["initial"]  # all bits of float32
    assert first["end"] == second["end"] != first["shared"]


def test_overflow_of_one_worker_skips_the_step_of_all(results):
    for result in results:
        assert result["overflow"] == [[1.0, 2.0], 2.0**15]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("how", ["accumulation", "backwards"])
def test_accumulated_gradients_are_the_mean_over_workers(results, how, level, view):
    for result in results:
        assert result[f"{how} {level} {view}"] == EXPECTED


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipped_and_accumulated_steps_follow_float32(results, level):
    """Gradients of one part or rank only, of another scale or unclipped would be far off.

    float16's roundings are 2⁻¹¹ of what they round.
    """
    for result in results:
        found = result[f"float32 {level}"]
        assert found["apart"] < 0.01 * found["moved"]
        for ours, exact in found["norms"]:
            assert exact > 0.1  # so that all are clipped
            assert ours == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("hook", [False, True])
def test_native_scaler_meets_averaged_gradients(results, hook, view):
    for result in results:
        weights, norm = result[f"aiak {hook} {view}"]
        assert weights == EXPECTED
        assert norm == pytest.approx((2.0**2 + 3.0**2) ** 0.5)
