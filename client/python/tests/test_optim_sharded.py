"""Tests fused optimizers on DTensors and under fully_shard(): two processes over Gloo, CPU."""

import pytest
from gloo_workers import run_workers
from optim_cases import bound

ELEMENTWISE = ("SGD", "Adam", "AdamW", "apex")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns the results of both workers."""
    folder = tmp_path_factory.mktemp("store")
    return run_workers("optim_sharded_worker.py", 2, folder, timeout=100, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_shards_become_the_bits_of_whole_parameters(results, kind):
    for result in results:
        assert result["by hand"][kind]["same bits"]
        # SGD moves furthest: by lr times gradients of up to 5, times 10 for its momentum.
        assert result["by hand"][kind]["from torch"] <= bound(10, 0.5 if kind == "SGD" else 0.01)
        assert result["half"]["same bits"]


@pytest.mark.parametrize("kind", ["LAMB", "nvlamb"])
def test_norms_of_lamb_go_over_all_shards(results, kind):
    """Norms of the shards alone would be off by a large part of what a step moves, 0.01·‖p‖."""
    for result in results:
        assert result["by hand"][kind]["distance"] <= bound(10, 0.1)
    first, second = (result["by hand"][kind]["values"] for result in results)
    assert first == second  # what is replicated included


def test_half_precision_shards_of_lamb_are_rounded_like_whole_ones(results):
    for result in results:
        # The bound is one rounding to the other neighbour: 2⁻⁸ of up to 4.
        assert result["half LAMB"]["distance"] <= 2.0**-8 * 4


@pytest.mark.parametrize("kind", [*ELEMENTWISE, "LAMB"])
def test_state_is_placed_as_its_parameter_in_float32(results, kind):
    for result in results:
        assert result["by hand"][kind]["moments"] == ["('DTensor', 'torch.float32')"]
        assert result["by hand"][kind]["placed"]
        assert result["half"]["moments"] == ["('DTensor', 'torch.float32')"]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "LAMB"])
def test_fully_sharded_model_trains_as_whole_parameters_do(results, kind):
    for result in results:
        training = result["training"][kind]
        assert training["learns"]
        if kind == "LAMB":
            assert training["distance"] <= bound(15, 0.1)
        else:
            assert training["same bits"]


def test_only_lamb_leaves_the_kernels(results):
    for result in results:
        (reason,) = result["fallbacks"]
        assert "a parameter is a DTensor" in reason
        assert "FusedLAMB" in reason


@pytest.mark.parametrize("full", [False, True])
def test_checkpoints_of_distributed_training_go_to_torch_and_back(results, full):
    for result in results:
        found = result["checkpoints"][full]
        assert found["unchanged"]
        assert found["same keys"]
        assert found["distance"] <= bound(9, 0.01)
        assert found["steps"] == found["steps of torch"] != []


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "LAMB"])
def test_resumed_run_has_the_bits_of_one_that_never_stopped(results, kind):
    for result in results:
        assert result["resumed"][kind]


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "LAMB"])
def test_overflow_in_one_shard_skips_the_step_of_all(results, kind):
    for result in results:
        same, scale, steps = result["overflow"][kind]
        assert same
        assert scale == 8.0
        assert steps == [3]


def test_gradient_is_placed_as_its_parameter_first(results):
    for result in results:
        assert result["otherwise"] == [0.0, -1.0, -2.0]


def test_memory_that_has_moved_is_the_one_that_is_updated(results):
    for result in results:
        assert result["moves"] == [-2.0] * 4


def test_gradients_are_freed_with_the_parameters(results):
    for result in results:
        assert result["freed"] == [True, True]


def test_autograd_notices_that_shards_have_changed(results):
    for result in results:
        for message in result["noticed"]:
            assert "modified by an inplace operation" in message


def test_what_has_no_shard_is_refused(results):
    for result in results:
        assert "expected shards or replicas" in result["partial"]
        assert result["partial"].endswith("[0.0, 0.0, 0.0, 0.0]")
        assert "state is a plain tensor, expected the same" in result["whole state"]


def test_torchs_own_run_fused_on_shards_without_code(results):
    for result in results:
        assert result["without code"] == [True, 3]
