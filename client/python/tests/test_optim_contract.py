"""Tests that the fused optimizers do what torch.optim promises of every optimizer."""

import copy
import pickle

import pytest
import torch
from optim_cases import bound, copy_of, distance, make_params, set_grads

from thalweg.compat._apex_optimizers import FusedAdam as ApexAdam
from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD, fallbacks

pytestmark = pytest.mark.numeric

PAIRS = [
    (FusedAdam, torch.optim.Adam, {"lr": 1e-2}),
    (FusedAdamW, torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
]
ALL = [
    (FusedAdam, {}),
    (FusedAdamW, {}),
    (FusedSGD, {"momentum": 0.9}),
    (FusedLAMB, {"weight_decay": 0.1}),
]
# SGD moves furthest: by lr times gradients of up to 5, times 10 for its momentum.
CLOSE = bound(30, 0.15)


def run(optimizers, lists, steps, start=0):
    for step in range(start, start + steps):
        set_grads(step, *lists)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(("fused", "kind", "options"), PAIRS)
def test_unused_late_and_added_parameters_take_part_from_their_first_gradient(fused, kind, options):
    params = make_params()
    reference = copy_of(params)
    late, theirs_late = make_params(seed=9), make_params(seed=9)
    ours, theirs = fused(params, **options), kind(reference, **options)
    for step in range(10):
        set_grads(step, params, reference)
        for lists in (params, reference):
            if step < 4:
                lists[1].grad = None  # frozen at first
            lists[3].grad = None  # never used
        ours.step()
        theirs.step()
    assert params[3] not in ours.state
    ours.add_param_group({"params": late, "lr": 3e-3})
    theirs.add_param_group({"params": theirs_late, "lr": 3e-3})
    for step in range(10, 20):
        set_grads(step, params, reference)
        set_grads(step + 7, late, theirs_late)
        ours.step()
        theirs.step()
    assert distance(params + late, reference + theirs_late) <= CLOSE
    if kind is not torch.optim.SGD:
        steps = [
            [o.state[p]["step"].item() for p in lists]
            for o, lists in ((ours, params), (theirs, reference))
        ]
        assert steps[0] == steps[1]


@pytest.mark.parametrize(("fused", "kind", "options"), PAIRS)
def test_parameters_whose_gradients_come_back_go_on_from_their_state(fused, kind, options):
    params = make_params()
    reference = copy_of(params)
    ours, theirs = fused(params, **options), kind(reference, **options)
    run((ours, theirs), (params, reference), 3)
    states = [optimizer.state_dict() for optimizer in (ours, theirs)]
    ours, theirs = fused(params, **options), kind(reference, **options)
    for optimizer, state in zip((ours, theirs), states, strict=True):
        optimizer.load_state_dict(state)
    for step in range(3, 6):  # most are frozen, with the state of a checkpoint
        set_grads(step, params, reference)
        for lists in (params, reference):
            for param in lists[1:]:
                param.grad = None
        ours.step()
        theirs.step()
    run((ours, theirs), (params, reference), 5, start=6)
    assert distance(params, reference) <= CLOSE


@pytest.mark.parametrize(("fused", "kind", "options"), PAIRS)
def test_scheduler_changes_the_rate(fused, kind, options):
    params = make_params()
    reference = copy_of(params)
    ours, theirs = fused(params, **options), kind(reference, **options)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5) for o in (ours, theirs)]
    for step in range(12):
        run((ours, theirs), (params, reference), 1, start=step)
        for schedule in schedules:
            schedule.step()
    assert ours.param_groups[0]["lr"] == pytest.approx(1e-2 / 16)
    assert distance(params, reference) <= CLOSE


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_closure_runs_with_gradients_and_its_loss_is_returned(fused, options):
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = fused([weight], lr=0.1, **options)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] == 5
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_gradients_are_written_to_only_to_divide_them_by_the_scale(fused, options):
    params = make_params()
    optimizer = fused(params, lr=0.1, **options)
    set_grads(0, params)
    before, counts = [p.grad.clone() for p in params], versions(params)
    optimizer.step()
    assert versions(params) == counts
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    assert all(torch.equal(4 * p.grad, g) for p, g in zip(params, before, strict=True))


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_overflow_skips_the_step_and_does_not_count_it(fused, options):
    params = make_params()
    optimizer = fused(params, lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
    unscaled = make_params()
    plain = fused(unscaled, lr=0.1, **options)
    scaler.scale(torch.ones(()))  # makes its state
    for step in range(6):
        set_grads(step, params, unscaled)
        overflow = step in (0, 3)
        for param in params:
            param.grad *= scaler.get_scale()
        if overflow:
            params[4].grad[4000] = torch.inf
        else:
            plain.step()
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True)) == overflow
    assert scaler.get_scale() == 4.0
    # The scales are powers of two, so not even roundings differ.
    assert all(torch.equal(a, b) for a, b in zip(params, unscaled, strict=True))
    if "step" in optimizer.state[params[0]]:
        assert {int(s["step"]) for s in optimizer.state.values()} == {4}


def scaled(optimizer, steps=1):
    """Returns a GradScaler of scale 1, and an optimizer that has done some steps with it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(steps):
        set_grads(step, optimizer.param_groups[0]["params"])
        scaler.step(optimizer)
        scaler.update()
    return scaler


def versions(params):
    return [p.grad._version for p in params]


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_gradscaler_looks_at_gradients_without_writing_to_them(fused, options):
    params = make_params()
    optimizer = fused(params, lr=0.1, **options)
    scaler = scaled(optimizer)
    set_grads(1, params)
    before, seen = versions(params), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(versions(params)))
    scaler.step(optimizer)
    assert seen == [before]


def test_gradscaler_itself_looks_before_the_first_step():
    params = make_params()
    optimizer = FusedAdamW(params, lr=0.1)
    scaler = scaled(optimizer, steps=0)
    set_grads(0, params)
    params[0].grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5
    assert torch.equal(params[0], make_params()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", [0, 4])
def test_every_value_that_is_not_finite_is_seen(dtype, value, where):
    params = make_params(dtype)
    optimizer = FusedSGD(params, lr=0.1)
    scaler = scaled(optimizer)
    set_grads(1, params)
    params[where].grad[-1] = value
    before = [p.detach().clone() for p in params]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_gradients_are_no_infinities(dtype):
    params = make_params(dtype)
    optimizer = FusedSGD(params, lr=0.1)
    scaler = scaled(optimizer)
    for param in params:
        param.grad = torch.full_like(param, torch.finfo(dtype).max)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0


def test_gradscaler_complains_of_missing_gradients_as_with_any_optimizer():
    params = make_params()
    optimizer = FusedAdamW(params, lr=0.1)
    scaler = scaled(optimizer)
    optimizer.zero_grad()
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.update()


def test_gradient_that_appears_later_is_looked_at():
    params = make_params()
    late = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([*params, late], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    for found in (False, True):
        set_grads(0, params)
        late.grad = torch.full((3,), torch.nan) if found else None
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() == 0.5) == found


def test_gradients_unscaled_beforehand_are_not_unscaled_again():
    params, reference = make_params(), make_params()
    optimizer, plain = FusedAdamW(params, lr=0.1), FusedAdamW(reference, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    set_grads(0, params, reference)
    for param in params:
        param.grad *= 16
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    torch.nn.utils.clip_grad_norm_(reference, 1.0)
    scaler.step(optimizer)
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(params, reference, strict=True))


@pytest.mark.parametrize(("fused", "options"), ALL[:3])
def test_what_cannot_be_fused_is_refused_before_anything_changes(fused, options):
    for make, expected in (
        (lambda: torch.ones(3).to_sparse(), "gradient of 1 dimensions is sparse, expected a dense"),
        (lambda: torch.ones(3, device="meta"), "on cpu, meta, expected all of an optimizer on one"),
        (lambda: torch.ones(3, dtype=torch.float64), "is Double, expected Float, Half or BFloat16"),
    ):
        grad = make()
        dtype, device = grad.dtype, grad.device
        good = torch.nn.Parameter(torch.ones(3))
        bad = torch.nn.Parameter(torch.ones(3, dtype=dtype, device=device))
        optimizer = fused([good, bad], lr=0.1, **options)
        good.grad, bad.grad = torch.ones(3), grad
        with pytest.raises(RuntimeError, match=expected):
            optimizer.step()
        assert torch.equal(good, torch.ones(3))
        assert not optimizer.state


def test_gradient_that_turns_sparse_is_refused_before_another_group_changes():
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([{"params": [first]}, {"params": [second]}], lr=0.5)
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    second.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="is sparse, expected a dense one"):
        optimizer.step()
    assert torch.equal(first, torch.full((3,), 0.5))


@pytest.mark.parametrize("kind", [FusedLAMB, ApexAdam])
def test_lamb_and_adam_of_apex_update_what_cannot_be_fused_and_count_it(kind):
    """Each type differs by float32 roundings; a wrong formula would be off by lr, 0.1."""
    params = make_params()
    wide = copy_of(params, torch.float64)
    ours, theirs = (kind(p, lr=0.1, weight_decay=0.1) for p in (params, wide))
    before = sum(fallbacks.values())
    for step in range(10):
        set_grads(step, params, wide)
        for optimizer in (ours, theirs):
            optimizer.grad_scale = torch.tensor(4.0)
            optimizer.found_inf = torch.tensor(float(step == 5))
            optimizer.step()
    assert sum(fallbacks.values()) == before + 9
    assert any("is Double, expected Float" in reason for reason in fallbacks)
    assert distance(params, wide) <= bound(10, 1.0)
    assert {int(s["step"]) for s in theirs.state.values()} == {9}


def test_parameter_that_is_there_twice_is_refused():
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = FusedAdamW([weight, weight])
    weight.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="has a parameter twice"):
        optimizer.step()


@pytest.mark.parametrize("fused", [FusedAdam, FusedAdamW, FusedSGD])
@pytest.mark.parametrize("mode", ["foreach", "differentiable"])
def test_other_ways_of_a_step_are_refused(fused, mode):
    with pytest.raises(RuntimeError, match=f"`fused` does not support `{mode}`"):
        fused(make_params(), **{mode: True})


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_hooks_run_around_the_step(fused, options):
    params = make_params()
    optimizer = fused(params, lr=0.1, **options)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run([optimizer], [params], 2)
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_copies_go_on_alike(fused, options):
    params = make_params()
    optimizer = fused(params, lr=0.1, **options)
    run([optimizer], [params], 3)
    pair = copy.deepcopy((params, optimizer))
    pickled = pickle.loads(pickle.dumps((params, optimizer)))
    run([optimizer], [params], 3, start=3)
    for other_params, other in (pair, pickled):
        run([other], [other_params], 3, start=3)
        assert all(torch.equal(a, b) for a, b in zip(params, other_params, strict=True))


def test_state_that_is_replaced_or_cleared_is_noticed():
    params, reference = make_params(), make_params()
    ours, theirs = FusedAdamW(params, lr=0.1), torch.optim.AdamW(reference, lr=0.1)
    run((ours, theirs), (params, reference), 3)
    for optimizer, lists in ((ours, params), (theirs, reference)):
        optimizer.state[lists[4]]["exp_avg"] = torch.zeros(4099)
        optimizer.state.pop(lists[0])
        lists[2].data = torch.ones_like(lists[2])
    run((ours, theirs), (params, reference), 3, start=3)
    for optimizer in (ours, theirs):
        optimizer.state.clear()
    run((ours, theirs), (params, reference), 3, start=6)
    assert distance(params, reference) <= bound(9, 0.1)
    assert {int(s["step"]) for s in ours.state.values()} == {3}


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_autograd_notices_that_parameters_have_changed(fused, options):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = fused([weight], lr=0.1, **options)
    loss = (weight**2).sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"lr": -1}, "lr is -1"), ({"betas": (0.9, 1.0)}, "betas"), ({"eps": -1}, "eps is -1")],
)
def test_lamb_refuses_wrong_arguments(argument, message):
    with pytest.raises(ValueError, match=message):
        FusedLAMB(make_params(), **argument)


def test_compiled_training_steps_call_it_as_it_is():
    weight, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer, plain = FusedAdamW([weight], lr=0.1), FusedAdamW([other], lr=0.1)

    @torch.compile(backend="eager")
    def train():
        optimizer.step()

    for param in (weight, other):
        param.grad = torch.ones(3)
    train()
    plain.step()
    assert torch.equal(weight, other)


def grow(param):
    """Makes a parameter larger in place, as scripts do whose vocabulary grows."""
    more = torch.ones(1000, *param.shape[1:])
    with torch.no_grad():
        param.data = torch.cat([param.data, more])


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_parameter_that_has_grown_is_refused_or_updated_as_torch_would(fused, options):
    params = make_params()
    optimizer = fused(params, lr=1e-2, **options)
    run([optimizer], [params], 2)
    grow(params[0])
    optimizer.zero_grad()
    before = [param.detach().clone() for param in params]
    set_grads(5, params)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    optimizer.state.clear()
    optimizer.step()
    assert not torch.equal(params[0], before[0])


@pytest.mark.parametrize(("fused", "options"), ALL)
def test_gradient_from_before_its_parameter_has_grown_is_not_read(fused, options):
    params = make_params()
    optimizer = fused(params, lr=1e-2, **options)
    run([optimizer], [params], 2)
    grow(params[0])
    with pytest.raises(RuntimeError, match=r"size|shape"):
        optimizer.step()


def test_parameter_that_has_become_wider_is_not_read_as_float32():
    params = make_params()
    optimizer = FusedSGD(params, lr=1e-2)
    run([optimizer], [params], 2)
    params[0].grad = None
    params[0].data = params[0].data.double()
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match="Double"):
        optimizer.step()
