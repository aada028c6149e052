"""Tests all forms in which torch asks the back end "thalweg" for collectives."""

from __future__ import annotations

import functools
from pathlib import Path

import collective_forms
import group_forms  # noqa: F401 - adds checks
import on_nodes
import pytest
import sparse_collective_forms  # noqa: F401 - adds checks
import torch

run = functools.partial(on_nodes.run, Path(__file__).parent / "collective_form_jobs.py")

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = [
    pytest.param(((4,), "cpu"), id="one_node"),
    pytest.param(((1, 1), "cpu"), id="two_nodes"),
    pytest.param(((1, 1), "cuda:0"), id="gpu", marks=GPU),
]


@pytest.fixture(scope="module", params=PLACES)
def forms(request, tmp_path_factory):
    """Returns the outcomes of all checks, of each rank."""
    nodes, device = request.param
    return run("forms", tmp_path_factory.mktemp("forms"), nodes, DEVICE=device)


@pytest.mark.parametrize("name", collective_forms.CHECKS)
def test_form_gives_what_numpy_does_on_all_ranks(forms, name):
    assert [result[name] for result in forms] == [""] * len(forms)


@pytest.mark.parametrize(
    ("nodes", "backend"), [((1, 1), "cpu:thalweg"), ((1,), "thalweg"), ((1,), "cpu:thalweg")]
)
def test_device_may_be_named_and_a_rank_may_be_alone(nodes, backend, tmp_path):
    results = run("sums", tmp_path, nodes, BACKEND=backend)
    assert results == [[2.0 * len(nodes)] * 2] * len(nodes)


def test_back_end_may_be_ended_twice(tmp_path):
    assert run("ended_twice", tmp_path, (1, 1)) == [[""] * 5] * 2


def test_end_in_a_callback_is_refused_and_ends_nothing(tmp_path):
    _, (refusal, later) = run("ended_in_a_callback", tmp_path, (1, 1))
    assert "destroy_process_group() was called in a callback of a work" in refusal
    assert later == ""


def test_forked_child_cannot_wait_for_a_collective_of_its_parent(tmp_path):
    _, (error,) = run("awaited_in_a_child", tmp_path, (1, 1))
    assert "a forked child must not use it" in error


def test_abort_wakes_who_waits_for_a_collective(tmp_path):
    (waited, again), (other,) = run("aborted", tmp_path, (1, 1))
    assert "this worker has aborted it" in waited
    assert again == ""
    assert "rank 0 on" in other
    assert "it has aborted the job" in other


def test_abort_takes_no_memory_from_a_call_that_still_copies_from_it(tmp_path):
    ((failed,),) = run("aborted_while_copying", tmp_path, (1,))
    assert "this worker has aborted it" in failed


def test_elastic_training_that_goes_elsewhere_fails_its_job_for_all(tmp_path):
    (aborting, later), (other,) = run("aborted_as_by_elastic", tmp_path, (1, 1))
    assert aborting == ""
    assert "this worker has aborted it" in later
    assert "it has aborted the job" in other
