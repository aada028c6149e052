"""What comes between backward and a step that is to read gradients where they are."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, setup
from deferred_cases import deferred, do_nothing, note_calls
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from thalweg import amp
from thalweg.amp import _gradients
from thalweg.optim import FusedAdamW, FusedLAMB, FusedSGD
from thalweg.optim._copies import raw_grad


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


@pytest.fixture
def calls(monkeypatch):
    return note_calls(monkeypatch)


def test_who_looks_at_a_master_finds_the_gradient_divided(calls):
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    calls.clear()
    (master,) = optimizer.param_groups[0]["params"]
    assert master.grad.tolist() == [1.0, 2.0]
    assert master.grad.dtype is torch.float32
    assert len(calls) == 1
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0**0.5 / 2)
    optimizer.step()
    # 0.25 times half the gradient; torch's norm and its 1e-6 are off by less than 1e-6.
    expected = torch.tensor([0.875, 1.75])
    torch.testing.assert_close(master.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(model.weight, master.half())
    assert len(calls) == 1


def test_who_writes_into_gradients_of_the_model_changes_nothing_of_the_masters():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    model.weight.grad.data.zero_()  # which torch does not count
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_model_without_gradients_before_the_step_is_stepped_all_the_same():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    model.zero_grad()
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_gradient_changed_by_a_reference_from_before_is_refused():
    model, optimizer = deferred()
    kept = []
    model.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    backward(model, optimizer, [1.0, 2.0])
    kept[0].zero_()
    for use in (optimizer.step, lambda: model.weight.grad):
        with pytest.raises(RuntimeError, match="references from before"):
            use()
    optimizer.zero_grad()
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_step_that_is_skipped_does_not_mind_what_has_changed():
    model, optimizer = deferred(loss_scale="dynamic")
    kept = []
    model.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    backward(model, optimizer, [float("inf"), 2.0])
    kept[0].zero_()
    optimizer.step()
    assert model.weight.tolist() == [1.0, 2.0]


def test_second_backward_adds_to_what_the_first_left():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    backward(model, optimizer, [2.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.25, 1.0]


def test_gradient_that_is_assigned_to_a_master_is_the_one_that_counts():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    (master,) = optimizer.param_groups[0]["params"]
    master.grad = torch.tensor([4.0, 4.0])
    optimizer.step()
    assert model.weight.tolist() == [0.0, 1.0]


def test_gradients_that_are_cleared_instead_of_used_are_forgotten():
    model, optimizer = deferred()
    backward(model, optimizer, [8.0, 8.0])
    optimizer.zero_grad()
    assert [p.grad for p in (model.weight, *amp.master_params(optimizer))] == [None, None]
    optimizer.step()
    assert model.weight.tolist() == [1.0, 2.0]
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_gradients_that_are_cleared_to_zeros_are_zeros_of_masters():
    model, optimizer = deferred(FusedAdamW)
    backward(model, optimizer, [8.0, 8.0])
    optimizer.zero_grad(set_to_none=False)
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [0.0, 0.0]
    optimizer.step()
    assert optimizer.state[master]["step"] == 2


def adversaries(kind, before_step):
    """Four steps of two networks, of which one's loss gives gradients to the other as well."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(8, 8), nn.Linear(8, 1)
    makes, judges = (kind(m.parameters(), lr=0.01) for m in (maker, judge))
    setup([maker, judge], [makes, judges], "O2", loss_scale=128.0, num_losses=2)
    for _ in range(4):
        makes.zero_grad()
        judges.zero_grad()
        fake = maker(torch.randn(4, 8))
        with amp.scale_loss(judge(fake.detach()).square().mean(), judges) as scaled:
            scaled.backward()
        with amp.scale_loss((judge(fake) - 1).square().mean(), makes, loss_id=1) as scaled:
            scaled.backward()
        before_step(None, judges)
        judges.step()
        makes.step()
    return [p.detach().clone() for model in (maker, judge) for p in model.parameters()]


def clip(model, optimizer):
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)


@pytest.mark.parametrize("before_step", [do_nothing, clip])
@pytest.mark.parametrize("kind", [FusedAdamW, FusedLAMB])
def test_backward_of_another_loss_changes_nothing(kind, before_step, monkeypatch):
    results = []
    for defers in (True, False):
        if not defers:
            monkeypatch.setattr(_gradients, "can_defer", lambda *_: False)
        results.append(adversaries(kind, before_step))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_backward_into_a_parameter_without_gradient_changes_nothing():
    model = nn.ModuleList([Exact(), Exact()])
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(model[0](torch.tensor([1.0, 1.0])), optimizer) as scaled:
            scaled.backward()
        model[1](torch.tensor([1.0, 1.0])).backward()
        optimizer.step()
    assert model[0].weight.tolist() == [0.25, 1.25]
    assert model[1].weight.tolist() == [1.0, 2.0]


def test_look_in_inference_mode_leaves_ordinary_gradients():
    model, optimizer = deferred()
    backward(model, optimizer, [3.0, 4.0])
    (master,) = amp.master_params(optimizer)
    with torch.inference_mode():
        assert master.grad.norm() == 5.0
    nn.utils.clip_grad_norm_([master], 2.5)
    optimizer.step()
    expected = torch.tensor([1.0 - 0.375, 2.0 - 0.5])
    torch.testing.assert_close(master.detach(), expected, rtol=0, atol=1e-6)


def test_gradients_made_in_inference_mode_are_stepped():
    model, optimizer = deferred()
    with amp.scale_loss(torch.zeros(()), optimizer), torch.inference_mode():
        grad = torch.tensor([128.0, 256.0], dtype=torch.float16)
        model.weight.grad = grad
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_parameter_that_comes_before_the_step_waits_for_the_next_backward():
    model, optimizer = deferred()
    late = Parameter(torch.ones(2, dtype=torch.float16))
    backward(model, optimizer, [1.0, 2.0])
    late.grad = torch.full((2,), 128.0, dtype=torch.float16)
    optimizer.add_param_group({"params": [late]})
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
    assert late.tolist() == [1.0, 1.0]


def test_gradients_that_are_cleared_are_not_kept_for_a_norm():
    model, optimizer = deferred(FusedLAMB, loss_scale="dynamic")
    backward(model, optimizer, [3.0, 4.0])
    storage = StorageWeakRef(raw_grad.__get__(model.weight).untyped_storage())
    assert not storage.expired()
    optimizer.zero_grad()
    assert storage.expired()


def test_another_fused_optimizer_of_the_masters_finds_their_gradients():
    model, optimizer = deferred()
    (master,) = optimizer.param_groups[0]["params"]
    other = FusedSGD([master], lr=0.5)
    master.grad = torch.zeros(2)
    other.step()  # has a plan from now on
    master.grad = None
    backward(model, optimizer, [1.0, 2.0])
    other.step()
    assert master.tolist() == [0.5, 1.0]


def test_parameters_have_another_class_only_while_gradients_are_deferred():
    model, optimizer = deferred()
    (master,) = optimizer.param_groups[0]["params"]
    backward(model, optimizer, [1.0, 2.0])
    assert isinstance(master, Parameter)
    assert Parameter not in {type(master), type(model.weight)}
    optimizer.step()
    assert type(master) is type(model.weight) is Parameter


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_are_ordinary_and_take_nothing_from_it(duplicate):
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    copied = duplicate(model)
    assert type(copied.weight) is Parameter
    assert torch.equal(copied.weight, model.weight)
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
    assert copied.weight.tolist() == [1.0, 2.0]


def test_optimizer_that_is_dropped_before_its_step_is_freed():
    model, optimizer = deferred()
    backward(model, optimizer, [1.0, 2.0])
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    assert model.weight.grad.tolist() == [128.0, 256.0]
    assert type(model.weight) is Parameter
