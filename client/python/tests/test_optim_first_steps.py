"""Tests that a momentum begins as in torch, whatever came before its first step.

torch's SGD takes the first gradient whole and all others less the dampening.
"""

import copy

import pytest
import torch
from optim_cases import bound, copy_of, distance, make_params, set_grads

from thalweg._activation import _fused_optimizers
from thalweg.optim import FusedAdamW, FusedSGD

pytestmark = pytest.mark.numeric

OPTIONS = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
# Five steps of the rate times a momentum, which stays below 10 where gradients are up to 5.
CLOSE = bound(5, 0.1 * 10 / 4)


def sparse_and_dense():
    """Returns a parameter that will get dense gradients, and one that will get sparse ones."""
    return torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(2, 1))


def set_sparse_grads(*lists):
    for dense, sparse in lists:
        dense.grad = torch.ones(1)
        sparse.grad = torch.sparse_coo_tensor([[0]], [[1.0]], (2, 1))


def run_torchs(optimizer):
    """Does a step of torch's SGD as AIAK_FUSED_OPTIMIZER=1 has it done."""
    _fused_optimizers._step(torch.optim.SGD, "sgd_step", torch.optim.SGD.step, optimizer)


def skip(optimizer):
    """Does a step for which GradScaler has found an infinity."""
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def test_momentum_starts_as_in_torch_where_a_later_group_cannot_be_fused():
    ours, theirs = sparse_and_dense(), sparse_and_dense()
    groups = [[{"params": [dense]}, {"params": [sparse]}] for dense, sparse in (ours, theirs)]
    optimizers = [torch.optim.SGD(group, **OPTIONS) for group in groups]
    for _ in range(4):
        set_sparse_grads(ours, theirs)
        run_torchs(optimizers[0])
        optimizers[1].step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    for key, state in optimizers[1].state_dict()["state"].items():
        assert optimizers[0].state_dict()["state"][key].keys() == state.keys()


@pytest.mark.parametrize("kind", [FusedSGD, FusedAdamW])
def test_refused_step_leaves_no_state_in_any_group(kind):
    dense, sparse = sparse_and_dense()
    options = OPTIONS if kind is FusedSGD else {"lr": 0.1}
    optimizer = kind([{"params": [dense]}, {"params": [sparse]}], **options)
    set_sparse_grads((dense, sparse))
    with pytest.raises(RuntimeError, match="is sparse, expected a dense one"):
        optimizer.step()
    assert not optimizer.state
    sparse.grad = sparse.grad.to_dense()
    optimizer.step()
    # The first step moves by the rate: the momentum is the gradient, and Adam divides by its size,
    # with about ten roundings.
    torch.testing.assert_close(dense.detach(), torch.tensor([-0.1]), rtol=12 * 2.0**-24, atol=0)


def test_first_step_that_is_skipped_is_still_to_come():
    params = make_params()
    reference = copy_of(params)
    ours, theirs = FusedSGD(params, **OPTIONS), torch.optim.SGD(reference, **OPTIONS)
    set_grads(0, params)
    params[1].grad = None
    skip(ours)
    for step in range(1, 4):  # a parameter that has its first gradient
        set_grads(step, params, reference)
        ours.step()
        theirs.step()
    assert distance(params, reference) <= CLOSE


def test_skipped_first_step_is_not_in_a_checkpoint():
    params = make_params()
    reference = copy_of(params)
    ours, theirs = FusedSGD(params, **OPTIONS), torch.optim.SGD(reference, **OPTIONS)
    set_grads(0, params)
    skip(ours)
    saved = ours.state_dict()
    assert saved["state"] == {}
    theirs.load_state_dict(saved)
    again = copy_of(params)
    resumed = FusedSGD(again, **OPTIONS)
    resumed.load_state_dict(saved)
    for step in range(1, 4):
        set_grads(step, params, reference, again)
        for optimizer in (ours, theirs, resumed):
            optimizer.step()
    assert distance(params, reference) <= CLOSE
    assert all(map(torch.equal, params, again))


def test_copy_after_a_skipped_first_step_has_its_first_step_to_come():
    params = make_params()
    optimizer = FusedSGD(params, **OPTIONS)
    set_grads(0, params)
    skip(optimizer)
    others, other = copy.deepcopy((params, optimizer))
    for step in range(1, 4):
        set_grads(step, params, others)
        optimizer.step()
        other.step()
    assert all(map(torch.equal, params, others))


def test_torchs_step_takes_over_after_a_skipped_first_step():
    ours, theirs = sparse_and_dense(), sparse_and_dense()
    optimizers = [torch.optim.SGD(params, **OPTIONS) for params in (ours, theirs)]
    ours[0].grad = torch.ones(1)
    optimizers[0].found_inf = torch.tensor(1.0)
    run_torchs(optimizers[0])
    del optimizers[0].found_inf
    set_sparse_grads(ours, theirs)
    for _ in range(3):
        run_torchs(optimizers[0])
        optimizers[1].step()
    for optimizer, (_, sparse) in zip(optimizers, (ours, theirs), strict=True):
        optimizer.state.pop(sparse)
        sparse.grad = None
    for _ in range(2):  # fused again: the momentum goes on
        run_torchs(optimizers[0])
        optimizers[1].step()
    assert distance(ours, theirs) <= CLOSE


def test_checkpoint_has_the_keys_of_torchs():
    params = make_params()
    optimizer = FusedSGD(params, **OPTIONS)
    for step in range(3):
        set_grads(step, params)
        optimizer.step()
    saved = optimizer.state_dict()["state"]
    assert saved.keys() == set(range(len(params)))
    assert {key for state in saved.values() for key in state} == {"momentum_buffer"}
    for index, param in enumerate(params):
        assert saved[index]["momentum_buffer"] is optimizer.state[param]["momentum_buffer"]
