"""Tests checkpoints of fused optimizers, and of torch's, loaded by the other."""

import copy
import pickle

import pytest
import torch
from optim_cases import bound, copy_of, distance, make_params, set_grads

from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD

pytestmark = pytest.mark.numeric

PAIRS = [
    (FusedAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (FusedAdamW, torch.optim.AdamW, {"lr": 1e-2}),
    (FusedAdamW, torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    (FusedSGD, torch.optim.SGD, {"lr": 1e-2}),
]


def run(optimizer, params, start, steps=10):
    for step in range(start, start + steps):
        set_grads(step, params)
        optimizer.step()


@pytest.mark.parametrize(("fused", "kind", "options"), PAIRS)
@pytest.mark.parametrize("ours_first", [True, False])
def test_the_other_goes_on_from_a_checkpoint(fused, kind, options, ours_first):
    kinds = (fused, kind) if ours_first else (kind, fused)
    params = make_params()
    reference = copy_of(params, torch.float64)
    first = kinds[0](params, **options)
    run(first, params, 0)
    taken = copy_of(params)
    second = kinds[1](taken, **{**options, "lr": 1.0})
    second.load_state_dict(first.state_dict())
    run(second, taken, 10)
    whole = kind(reference, **options)
    for step in range(20):
        set_grads(step, params, reference)
        whole.step()
    lr = 1e-2 * (15 if kind is torch.optim.SGD else 1)
    assert distance(taken, reference) <= bound(20, lr)
    assert second.state_dict()["state"].keys() == whole.state_dict()["state"].keys()
    for index, state in second.state_dict()["state"].items():
        assert state.keys() == whole.state_dict()["state"][index].keys()


@pytest.mark.parametrize(
    ("fused", "options"),
    [
        (FusedAdamW, {}),
        (FusedAdamW, {"amsgrad": True}),
        (FusedSGD, {"momentum": 0.9}),
        (FusedLAMB, {"weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_runs_are_the_same_bits(tmp_path, fused, options, dtype):
    params = make_params(dtype)
    optimizer = fused(params, lr=1e-2, **options)
    run(optimizer, params, 0)
    torch.save({"params": params, "state": optimizer.state_dict()}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    resumed = copy_of(saved["params"])
    other = fused(resumed, lr=1e-2, **options)
    other.load_state_dict(saved["state"])
    run(optimizer, params, 10)
    run(other, resumed, 10)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_loaded_moments_stay_float32_and_all_state_is_copied():
    params = make_params(torch.bfloat16)
    optimizer = FusedAdamW(params)
    run(optimizer, params, 0)
    state = optimizer.state_dict()
    other = FusedAdamW(copy_of(params))
    other.load_state_dict(state)
    for index, param in enumerate(other.param_groups[0]["params"]):
        for key in ("exp_avg", "exp_avg_sq"):
            assert other.state[param][key].dtype is torch.float32
            assert torch.equal(other.state[param][key], state["state"][index][key])
            assert other.state[param][key] is not state["state"][index][key]
        assert other.state[param]["step"] is not state["state"][index]["step"]


def test_moments_of_torchs_half_optimizer_are_widened():
    params = make_params(torch.bfloat16)
    theirs = torch.optim.AdamW(params)
    run(theirs, params, 0)
    ours = FusedAdamW(copy_of(params))
    ours.load_state_dict(theirs.state_dict())
    run(ours, ours.param_groups[0]["params"], 10)
    assert {s["exp_avg"].dtype for s in ours.state.values()} == {torch.float32}


def test_load_hooks_see_and_change_what_is_loaded():
    params = make_params()
    optimizer = FusedAdamW(params)
    run(optimizer, params, 0)
    other = FusedAdamW(copy_of(params))

    def halve(_, state):
        first = {**state["state"][0], "exp_avg": state["state"][0]["exp_avg"] / 2}
        return {**state, "state": {**state["state"], 0: first}}

    other.register_load_state_dict_pre_hook(halve)
    other.load_state_dict(optimizer.state_dict())
    loaded = other.state[other.param_groups[0]["params"][0]]["exp_avg"]
    assert torch.equal(loaded, optimizer.state[params[0]]["exp_avg"] / 2)


@pytest.mark.parametrize(("fused", "kind", "options"), PAIRS[:4])
def test_moments_loaded_in_another_order_in_memory_are_copied_once(fused, kind, options):
    shapes = ((4, 3, 5, 5), (6, 3, 1, 1))
    contiguous = make_params(shapes=shapes)
    first = kind(contiguous, **options)
    run(first, contiguous, 0, steps=3)
    params = [
        torch.nn.Parameter(param.detach().to(memory_format=torch.channels_last, copy=True))
        for param in contiguous
    ]
    optimizer = fused(params, **options)
    optimizer.load_state_dict(first.state_dict())
    run(optimizer, params, 3, steps=1)
    set_grads(4, params)
    for param in params:
        param.grad = torch.empty_like(param).copy_(param.grad)
    with torch.profiler.profile(acc_events=True) as profile:
        optimizer.step()
    assert "aten::copy_" not in {event.key for event in profile.key_averages()}
    for param in params:
        for key in optimizer.state[param].keys() - {"step"}:
            assert optimizer.state[param][key].stride() == param.stride()
    run(first, contiguous, 3, steps=2)
    lr = 1e-2 * (15 if kind is torch.optim.SGD else 1)
    assert distance(params, contiguous) <= bound(5, lr)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copy_of_sgd_saves_what_torchs_saves(copied):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([param], lr=0.5, momentum=0.5)
    param.grad = torch.ones(3)
    optimizer.step()
    assert [*copied(optimizer).state_dict()["state"][0]] == ["momentum_buffer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB])
def test_hook_after_loading_has_the_last_word_on_moments(kind, dtype):
    params = make_params(dtype)
    first, second = kind(params), kind(params)
    run(first, params, 0, 1)
    seen = []

    def hook(optimizer):
        for state in optimizer.state.values():
            seen.append(state["exp_avg"].dtype)
            state["exp_avg"] = torch.full_like(state["exp_avg"], 2.0)

    second.register_load_state_dict_post_hook(hook)
    second.load_state_dict(first.state_dict())
    assert set(seen) == {torch.float32}
    assert all((state["exp_avg"] == 2.0).all() for state in second.state.values())
