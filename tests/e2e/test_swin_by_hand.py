"""Tests gradients that a loop reduces itself, through real sidecars."""

from pathlib import Path

import pytest
import torch
from harness import Job, servers

import thalweg

JOBS = Path(__file__).with_name("swin_jobs.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns what two workers of one node said, whose first one has started their sidecar."""
    with servers() as cluster:
        folder = tmp_path_factory.mktemp("job")
        return Job("by_hand", cluster, folder, sidecar_of=[""] * 2, jobs=JOBS).results()


def test_gradients_become_their_mean_or_any_multiple_of_their_sum(results):
    for result in [result["scales"] for result in results]:
        assert result["mean"] == [[1.5], [2.5], [3.5]]
        assert result["sum"] == [[3], [5], [7]]
        assert result["tenth"] == [[0.3], [0.5], [0.7]]


def test_training_reduced_by_hand_is_that_of_ddp(results):
    first, second = results
    by_hand, by_ddp = first["weights"]
    assert by_hand == second["weights"][0]
    assert by_hand == pytest.approx(by_ddp, rel=1e-5)
    assert first["rounds"] >= 3


def test_gradients_that_differ_between_workers_are_an_error_on_all(results):
    for error in [result["differing"] for result in results]:
        assert "thalweg: " in error
        assert "float32[2]" in error
        assert "float32[3]" in error


def test_nothing_is_fetched_of_parameters_without_a_gradient():
    used, unused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    used.grad = torch.ones(1)
    optimizer = torch.optim.SGD([{"params": [unused]}, {"params": [used]}], lr=1)
    (gradient,) = thalweg.fetch_gradients(optimizer)
    assert gradient is used.grad


def test_calls_that_cannot_work_are_refused():
    with pytest.raises(RuntimeError, match=r"all_reduce\(\) needs .*init_process_group"):
        thalweg.all_reduce([torch.ones(1)])
