"""Tests fused optimizers under FullyShardedDataParallel (FSDP1): one process and two, Gloo, CPU."""

import pytest
import torch
from gloo_workers import run_workers

from thalweg.optim import FusedAdam


def run(tmp_path_factory, workers):
    """Returns the results of so many workers."""
    folder = tmp_path_factory.mktemp("store")
    return run_workers(
        "optim_fsdp1_worker.py",
        workers,
        folder,
        timeout=100,
        OMP_NUM_THREADS="1",
        WORKERS=str(workers),
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns the results of both of two workers."""
    return run(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns the results of the only worker."""
    return run(tmp_path_factory, 1)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "FusedAdamW", "FusedSGD"])
def test_infinity_in_one_shard_skips_the_step_on_all_ranks(results, kind, flat):
    for result in results:
        scales, changed, counts = result["overflow"][f"{kind} {flat}"]
        assert scales == [8.0, 8.0, 4.0, 4.0]
        assert changed == [False, True, False, True]
        assert counts == ([] if kind == "FusedSGD" else [2])


def test_steps_that_need_norms_refuse_shards(results):
    for result in results:
        for text, changed in result["norms"].values():
            assert "model.clip_grad_norm_()" in text
            assert "fully_shard()" in text
            assert not changed
        assert result["no norms"] == ["", True]


def test_steps_that_need_norms_are_those_of_a_plain_model_where_each_rank_has_all(results, alone):
    for result in (*results, *alone):
        assert set(result["whole"]) >= {"clipping", "clipping, flat", "LAMB", "LAMB, flat"}
        for text, is_same in result["whole"].values():
            assert not text
            assert is_same


def test_vectors_alone_are_refused_where_they_may_be_shards(results, alone):
    for result in results:
        assert "with NO_SHARD let each unit" in result["vectors"]
        assert "with NO_SHARD let each unit" in result["one element"]
    assert not alone[0]["vectors"]


def test_optimizer_made_with_fused_takes_scales_itself():
    param = torch.nn.Parameter(torch.zeros(1))
    assert FusedAdam([param], fused=True)._step_supports_amp_scaling
