"""Tests gradients that a loop reduces itself, through real sidecars."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Job, servers
from torch.testing._internal.distributed.fake_pg import FakeStore

import thalweg
from thalweg import _reduce_by_hand

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


def test_sums_that_float16_cannot_hold_are_counted_once_and_infinities_too(results):
    for result in results:
        assert result["overflows"] == [1, 1 + 1 + 2]


def test_training_reduced_by_hand_is_that_of_ddp(results):
    first, second = results
    by_hand, by_ddp = first["weights"]
    assert by_hand == second["weights"][0]
    assert by_hand == pytest.approx(by_ddp, rel=1e-5)
    assert first["rounds"] >= 3


@pytest.mark.parametrize(
    ("what", "of_ranks"),
    [
        ("first call", ("gradient 0 is float32[2]", "gradient 0 is float32[4]")),
        ("shape", ("gradient 1 is float32[5]", "gradient 1 is float32[6]")),
        ("type", ("gradient 1 is float32[5]", "gradient 1 is float16[5]")),
        ("number", ("there are no more gradients", "gradient 1 is float32[5]")),
        ("nothing", ("there are no more gradients", "gradient 0 is float32[3]")),
        ("sparse", ("gradient 1 is float32[5]", "gradient 1 is sparse_coo float32[5]")),
        ("unused", ("parameters without a gradient are 1", "parameters without a gradient are 0")),
        ("codec", ("the codec is that of the environment", "the codec is int8")),
    ],
)
def test_gradients_that_differ_between_workers_are_an_error_on_all(results, what, of_ranks):
    expected = "{} on rank 0, but {} on rank 1: pass".format(*of_ranks)
    for result in results:
        error = result["differing"][what]
        assert error.startswith("ValueError: thalweg: gradients differ between workers: ")
        assert expected in error


@pytest.mark.parametrize(("min_nodes", "sent"), [("0", [16]), ("1", [])])
def test_gradients_are_compared_unless_the_group_may_lack_processes(min_nodes, sent, monkeypatch):
    found = []
    monkeypatch.setenv("THALWEG_MIN_NODES", min_nodes)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_, **__: found.append(tensor.nbytes))
    monkeypatch.setattr(_reduce_by_hand, "_job_for", lambda *_: None)
    monkeypatch.setattr(_reduce_by_hand, "_mean", lambda *_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        thalweg.all_reduce([torch.ones(3)])
    finally:
        dist.destroy_process_group()
    assert found == sent


def test_calls_go_on_after_gradients_that_differed(results):
    assert [result["differing"]["afterwards"] for result in results] == ["none"] * 2


def test_nothing_is_fetched_of_parameters_without_a_gradient():
    used, unused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    used.grad = torch.ones(1)
    optimizer = torch.optim.SGD([{"params": [unused]}, {"params": [used]}], lr=1)
    gradients = thalweg.fetch_gradients(optimizer)
    (gradient,) = gradients
    assert gradient is used.grad
    assert gradients.left_out == (0,)


def test_calls_that_cannot_work_are_refused():
    with pytest.raises(RuntimeError, match=r"all_reduce\(\) needs .*init_process_group"):
        thalweg.all_reduce([torch.ones(1)])
