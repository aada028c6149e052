"""Tests fused optimizers on parameters that lie in the same memory."""

import pytest
import torch
from torch import nn

from thalweg._activation import _fused_optimizers
from thalweg.compat._apex_optimizers import FusedAdam as ApexAdam
from thalweg.optim import FusedAdam, FusedSGD, fused_steps
from thalweg.optim._overlap import overlap

SAME = "same memory"


def give_ones(params):
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def both_in(memory):
    return give_ones([nn.Parameter(memory), nn.Parameter(memory)])


@pytest.mark.parametrize("kind", [FusedSGD, FusedAdam])
def test_two_parameters_in_the_same_memory_are_refused(kind):
    memory = torch.zeros(2_000_000)
    with pytest.raises(RuntimeError, match=SAME):
        kind(both_in(memory), lr=1.0).step()
    assert not memory.any()


def test_parts_of_the_same_memory_are_refused():
    memory = torch.zeros(100)
    params = give_ones([nn.Parameter(memory[:60]), nn.Parameter(memory[59:])])
    with pytest.raises(RuntimeError, match=SAME):
        FusedSGD(params, lr=1.0).step()


def test_parameter_that_is_moved_onto_another_is_refused_while_it_is_there():
    first, second = give_ones([nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(9))])
    optimizer = FusedSGD([first, second], lr=1.0)
    optimizer.step()
    own, second.data = second.data, first.data
    for _ in range(2):
        with pytest.raises(RuntimeError, match=SAME):
            optimizer.step()
    second.data = own
    optimizer.step()
    assert first.tolist() == second.tolist() == [-2.0] * 9


def test_torchs_step_updates_one_after_the_other():
    memory = torch.zeros(9)
    optimizer = torch.optim.SGD(both_in(memory), lr=1.0)
    before = fused_steps["SGD"]
    for _ in range(3):
        _fused_optimizers._step(torch.optim.SGD, "sgd_step", torch.optim.SGD.step, optimizer)
    assert memory.tolist() == [-6.0] * 9
    assert fused_steps["SGD"] == before


def test_multi_tensor_operations_update_one_after_the_other():
    memory = torch.zeros(9)
    ApexAdam(both_in(memory), lr=1.0).step()
    assert torch.allclose(memory, torch.full((9,), -2.0))


def test_groups_in_the_same_memory_are_updated_one_after_the_other():
    memory = torch.zeros(9)
    first, second = both_in(memory)
    FusedSGD([{"params": [first]}, {"params": [second]}], lr=1.0).step()
    assert memory.tolist() == [-2.0] * 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_and_columns_of_the_same_memory_are_fused(dtype):
    memory = torch.zeros(12, 6, dtype=dtype)
    views = (memory[:6, :2], memory[:6, 2:], memory[6:8], memory[8:], memory[0:0])
    FusedSGD(give_ones([*map(nn.Parameter, views)]), lr=1.0).step()
    assert torch.equal(memory, torch.full((12, 6), -1.0, dtype=dtype))


def test_columns_are_fused_wherever_torch_makes_tensors_by_default():
    memory = torch.zeros(8, 8)
    params = give_ones([nn.Parameter(memory[:, :3]), nn.Parameter(memory[:, 3:])])
    with torch.device("meta"):
        FusedSGD(params, lr=1.0).step()
    assert torch.equal(memory, torch.full((8, 8), -1.0))


def test_elements_decide_and_not_extents():
    memory = torch.zeros(8, 8)
    assert not overlap([memory[:, :3], memory[:, 3:5], memory[:, 5:]])
    assert not overlap([memory[::2], memory[1::2], torch.zeros(3)])
    assert overlap([memory[:, :3], memory[:, 2:]])
    assert overlap([memory, torch.zeros(3), memory[7, 7:]])
    assert overlap([memory[:, :4], memory[:, 4:].view(torch.bfloat16)])
    assert not overlap([memory[0, :1].expand(5), memory[0, 1:]])
    assert not overlap([])
