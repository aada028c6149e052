"""Tests what is said of sharded parameters that the environment asks to compress."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from thalweg._activation import _sharded
from thalweg._attach import _left_behind
from thalweg._settings._config import Activation


def asked(**variables: str) -> Activation:
    return Activation.from_env(variables)


@pytest.fixture
def mesh(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    torch.distributed.destroy_process_group()


def test_codec_of_sharded_parameters_is_said_to_do_nothing_by_its_name():
    text = _sharded.remark(asked(THALWEG_CODEC="int8"), ["fully_shard()"], "thalweg")
    assert "THALWEG_CODEC=int8 does nothing for parameters that torch shards" in text
    assert "does not compress" in text
    assert "back end 'thalweg'" in text


def test_switch_is_said_to_do_nothing_where_another_back_end_reduces():
    text = _sharded.remark(asked(THALWEG_ENABLE="1"), ["fully_shard()"], "gloo")
    assert "THALWEG_ENABLE=1 does nothing" in text
    assert "does not average" in text


@pytest.mark.parametrize("variables", [{}, {"THALWEG_CODEC": "fp32"}])
def test_nothing_is_said_where_all_that_is_asked_for_is_done(variables):
    assert _sharded.remark(asked(**variables), ["fully_shard()"], "thalweg") == ""


def test_sharded_parameters_are_recognised_and_others_are_not(mesh):
    sharded = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    copied = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    plain = nn.Parameter(torch.ones(4))
    flat = nn.Parameter(torch.ones(4))
    flat._fsdp_flattened = True
    assert _sharded.kinds([copied, plain]) == []
    assert "fully_shard()" in _sharded.kinds([plain, sharded])[0]
    assert _sharded.kinds([flat]) == ["FullyShardedDataParallel"]
    _left_behind.own([("weight", sharded)], _left_behind.Owner("job", "fp16", True), None)
    assert _sharded.kinds([sharded]) == []
