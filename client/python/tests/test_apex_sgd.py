"""Tests `apex.optimizers.FusedSGD` against its formulas in float64."""

import copy
import pickle

import pytest
import torch
from amp_models import casts_off_afterwards, setup
from apex_optim import LR, STEPS, exact, parameters, run
from optim_cases import bound, distance
from torch import nn

from thalweg import amp
from thalweg.compat._apex_optimizers import FusedSGD

pytestmark = pytest.mark.numeric


def sgd(momentum, dampening, decay, *, nesterov, after):
    def update(state, p, g, _):
        if not after:
            g = g + decay * p
        if momentum:
            b = state.get("b")
            state["b"] = b = g if b is None else momentum * b + (1 - dampening) * g
            g = g + momentum * b if nesterov else b
        return p - LR * (g + decay * p if after else g)

    return update


CASES = [  # momentum, dampening, decay, nesterov, wd_after_momentum
    (0.9, 0.3, 0.1, False, True),
    (0.9, 0.0, 0.1, True, True),
    (0.0, 0.0, 0.1, False, True),
    (0.9, 0.3, 0.1, False, False),
    (0.9, 0.0, 0.0, True, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_sgd_decays_before_or_after_momentum(case, dtype):
    *numbers, nesterov, after = case
    params = parameters(dtype)
    expected = exact(params, sgd(*numbers, nesterov=nesterov, after=after))
    run(FusedSGD(params, LR, *numbers, nesterov, after), params)
    assert distance(params, expected) <= bound(STEPS, LR)


@pytest.mark.parametrize("after", [False, True])
def test_sgd_of_half_parameters_keeps_a_float32_momentum_and_resumes_with_the_same_bits(after):
    whole, halves = parameters(torch.float16), parameters(torch.float16)

    def build(params):
        return FusedSGD(params, LR, 0.9, weight_decay=0.1, wd_after_momentum=after)

    optimizer, first, second = build(whole), build(halves), build(halves)
    run(optimizer, whole)
    run(first, halves, range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, halves, range(2, STEPS))
    assert all(map(torch.equal, whole, halves))
    assert {s["momentum_buffer"].dtype for s in second.state.values()} == {torch.float32}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_sgd_with_late_decay_trains_under_scale_loss_and_leaves_skipped_steps_out(level):
    with casts_off_afterwards():
        model = nn.Linear(4, 1)
        optimizer = FusedSGD(
            model.parameters(), 0.25, 0.5, weight_decay=0.5, wd_after_momentum=True
        )
        setup(model, optimizer, level, loss_scale="dynamic")
        for overflow in (False, True):
            before = [p.detach().clone() for p in amp.master_params(optimizer)]
            loss = model(torch.ones(2, 4)).sum() * (torch.inf if overflow else 2.0**-6)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            after = amp.master_params(optimizer)
            assert all(torch.equal(a, b) is overflow for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("after", [False, True])
def test_sgd_skips_steps_that_a_scaler_refuses(after):
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedSGD([param], 0.5, weight_decay=0.5, wd_after_momentum=after)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for grad in (torch.inf, 1.0):
        param.grad = scaler.scale(torch.tensor([grad, 1.0]))
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == [0.25, 0.25]  # 1 - 0.5·(1 + 0.5)


def test_sgd_refuses_sparse_gradients():
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        FusedSGD(table.parameters(), 0.1).step()


def test_sgd_needs_a_rate_only_where_no_group_has_one():
    first, second = parameters()[:2]
    optimizer = FusedSGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    with pytest.raises(ValueError, match="a group has no lr"):
        FusedSGD([first])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("after", [False, True])
def test_groups_that_ask_for_it_ascend_whatever_computes_the_step(after, dtype):
    numbers = (0.9, 0.0, 0.1)  # momentum, dampening, decay
    params = parameters(dtype)
    descend = sgd(*numbers, nesterov=False, after=after)
    expected = exact(params, lambda state, p, g, t: descend(state, p, -g, t))
    groups = [{"params": params, "maximize": True}]
    run(FusedSGD(groups, LR, *numbers, wd_after_momentum=after), params)
    assert distance(params, expected) <= bound(STEPS, LR)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copy_of_an_sgd_has_the_same_keys_in_its_checkpoint(duplicate):
    params = parameters()
    optimizer = FusedSGD(params, LR, 0.9)
    run(optimizer, params)
    assert {key for s in duplicate(optimizer).state_dict()["state"].values() for key in s} == {
        "momentum_buffer"
    }
