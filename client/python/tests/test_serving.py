"""Tests how the steps of an optimizer on shards end a job, without servers."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from thalweg.ps._parameters import Parameter
from thalweg.ps._serving import Serving
from thalweg.ps._shard_state import ShardState


@pytest.fixture
def closed():
    """Returns what has been closed."""
    return []


@pytest.fixture
def serving(closed):
    """Returns the first worker's side of a job of two parameters that travel together."""
    tensors = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters = [Parameter(f"layer.{n}", one, 0, 0) for n, one in enumerate(tensors)]
    bucket = SimpleNamespace(
        parameters=parameters, changed=list, write=None, is_empty=True, is_coming=False
    )
    made = object.__new__(Serving)
    made._session = SimpleNamespace(
        status=lambda: None,
        close=lambda: closed.append("session"),
        note_precision=lambda loss_scale, skipped_steps: None,
    )
    made._finalizer = weakref.finalize(made, closed.append, "side")
    made._buckets = [bucket]
    made._commits, made._apart, made._snapshots = True, None, None
    made.asked_by = "THALWEG_PS"
    made.state = ShardState(made._buckets, SimpleNamespace(counts_steps=True), is_first=True)
    return made


def test_state_that_shards_cannot_have_ends_the_job_for_all_workers(serving, closed):
    first, second = (each.tensor for each in serving._buckets[0].parameters)
    states = {first: {"step": torch.tensor(9.0)}, second: {"step": torch.tensor(4.0)}}
    with pytest.raises(RuntimeError, match=r"layer.0 has seen 9 steps.*THALWEG_PS asks for this"):
        serving._begin_step([], states)
    assert closed == ["session", "side"]
