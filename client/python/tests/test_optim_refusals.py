"""Tests optimizers that the kernels cannot update and that step otherwise."""

import pytest
import torch
from optim_cases import copy_of, make_params, set_grads

from thalweg._activation import _fused_optimizers
from thalweg.compat._apex_optimizers import FusedAdam as ApexAdam
from thalweg.compat._apex_optimizers import FusedSGD as ApexSGD
from thalweg.optim import FusedAdam, FusedLAMB, _fused, _plan, fallbacks, fused_steps

pytestmark = pytest.mark.numeric

SPARSE = torch.tensor([1.0, 0.0, 0.0]).to_sparse()


@pytest.fixture
def planned(monkeypatch):
    """Notes each optimizer of which the kernels' way is looked for."""
    optimizers = []
    make = _plan.Plan.__init__

    def make_and_note(plan, optimizer, *args, **kwargs):
        optimizers.append(optimizer)
        make(plan, optimizer, *args, **kwargs)

    monkeypatch.setattr(_plan.Plan, "__init__", make_and_note)
    return optimizers


def run_torchs(optimizer):
    """Does a step of torch's SGD as AIAK_FUSED_OPTIMIZER=1 has it done; returns whether fused."""
    before = fused_steps["SGD"]
    _fused_optimizers._step(torch.optim.SGD, "sgd_step", torch.optim.SGD.step, optimizer)
    return fused_steps["SGD"] > before


def ones(count, dtype=torch.float32):
    """Returns parameters with gradients."""
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


@pytest.fixture
def in_cuda_graph(monkeypatch):
    """Lets steps find their parameters on a GPU, and a CUDA graph that is captured."""
    monkeypatch.setattr(_fused, "on_device", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FusedAdam, {}),
        (FusedLAMB, {}),
        (ApexAdam, {"capturable": True}),
        (ApexAdam, {"master_weights": True}),
        (ApexSGD, {"lr": 0.1, "wd_after_momentum": True}),
    ],
)
def test_step_that_a_cuda_graph_would_record_is_refused(kind, options, in_cuda_graph):
    params = ones(1, torch.float16)
    optimizer = kind(params, **options)
    with pytest.raises(RuntimeError, match=r"CUDA graph: .* call step\(\) after each") as caught:
        optimizer.step()
    assert type(caught.value) is RuntimeError
    assert params[0].tolist() == [1.0] * 3
    assert not optimizer.state


def test_step_of_torchs_that_runs_fused_is_refused_in_a_cuda_graph(in_cuda_graph):
    params = ones(1)
    with pytest.raises(RuntimeError, match="fused step of SGD cannot be captured"):
        run_torchs(torch.optim.SGD(params, lr=0.5))
    assert params[0].tolist() == [1.0] * 3


def test_refusal_is_found_once_and_counted_in_each_step(planned):
    first, second = ones(2)
    second.grad = SPARSE.clone()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.5)
    before = fallbacks.total()
    for _ in range(5):
        optimizer.zero_grad()
        first.grad, second.grad = torch.ones(3), SPARSE.clone()
        assert not run_torchs(optimizer)
    assert len(planned) == 1
    assert fallbacks.total() == before + 5
    assert first.tolist() == [-1.5] * 3


@pytest.mark.parametrize("kind", [FusedLAMB, ApexAdam])
def test_refusal_of_an_optimizer_of_ours_is_found_once(kind, planned):
    params = make_params(torch.float64)
    optimizer = kind(params, lr=0.1)
    before = fallbacks.total()
    for step in range(5):
        set_grads(step, params)
        optimizer.step()
    assert len(planned) == 1
    assert fallbacks.total() == before + 5
    assert {int(state["step"]) for state in optimizer.state.values()} == {5}


def test_gradient_that_turns_dense_is_fused(planned):
    first, second = ones(2)
    optimizer = torch.optim.SGD([first, second], lr=0.5)
    second.grad = SPARSE.clone()
    assert not run_torchs(optimizer)
    second.grad = torch.ones(3)
    assert run_torchs(optimizer)
    second.grad = SPARSE.clone()
    assert not run_torchs(optimizer)
    second.grad = None
    assert run_torchs(optimizer)
    assert [param.tolist() for param in (first, second)] == [[-1.0] * 3, [-0.5, 0.5, 0.5]]


def test_parameters_that_become_float32_are_fused(planned):
    (param,) = ones(1, torch.float64)
    optimizer = torch.optim.SGD([param], lr=0.5)
    assert not run_torchs(optimizer)
    param.data, param.grad = param.data.float(), None
    param.grad = torch.ones(3)
    assert run_torchs(optimizer)
    assert param.tolist() == [0.0] * 3


def test_groups_that_change_are_looked_at_again(planned):
    first, second, third = ones(3)
    second.grad = SPARSE.clone()
    optimizer = torch.optim.SGD([first, second], lr=0.5)
    assert not run_torchs(optimizer)
    optimizer.add_param_group({"params": [third]})
    assert not run_torchs(optimizer)
    assert len(planned) == 2
    optimizer.param_groups[0]["params"].pop()
    assert run_torchs(optimizer)


@pytest.mark.parametrize("kind", [FusedLAMB, ApexAdam])
@pytest.mark.parametrize("steps", [0, 2])
def test_step_refused_for_a_later_group_has_counted_in_none(kind, steps):
    params = make_params(torch.float64)
    reference = copy_of(params)
    groups = [[{"params": p[:3]}, {"params": p[3:]}] for p in (params, reference)]
    ours, plain = (kind(group, lr=0.1) for group in groups)
    for step in range(steps + 3):
        set_grads(step, params, reference)
        if step == steps:
            params[4].grad = params[4].grad.to_sparse()
            with pytest.raises(RuntimeError, match="has a sparse gradient, expected a dense one"):
                ours.step()
            assert len(ours.state) == (len(params) if steps else 0)
            assert all(map(torch.equal, params, reference))
            set_grads(step, params)
        ours.step()
        plain.step()
    assert {int(state["step"]) for state in ours.state.values()} == {steps + 3}
    assert all(map(torch.equal, params, reference))


@pytest.mark.parametrize("mode", ["foreach", "capturable", "differentiable"])
def test_way_to_step_that_a_group_asks_for_is_refused_as_the_arguments_are(mode):
    [first, second] = ones(2)
    with pytest.raises(RuntimeError, match=f"{mode} is True, expected False"):
        FusedAdam([{"params": [first], mode: True}])
    optimizer = FusedAdam([first])
    with pytest.raises(RuntimeError, match=f"{mode} is True, expected False"):
        optimizer.add_param_group({"params": [second], mode: True})
    assert len(optimizer.param_groups) == 1
