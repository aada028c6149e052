"""Masters of mixed precision under the fused optimizers, which store their roundings themselves."""

import pytest
import torch
from amp_models import Exact, casts_off_afterwards, loss_of, network, setup, train

from thalweg import amp
from thalweg._C import NotFusable
from thalweg.amp import FP16_Optimizer
from thalweg.amp._optimizer import mixed_optimizer_of
from thalweg.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD

pytestmark = pytest.mark.numeric

KINDS = [
    (FusedAdam, torch.optim.Adam, {"lr": 0.01}),
    (FusedAdamW, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (FusedSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    (FusedLAMB, None, {"lr": 0.01, "weight_decay": 0.1}),
]


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


@pytest.fixture
def published(monkeypatch):
    """Counts the masters that were rounded in passes of their own."""
    copied = []
    copy = torch._foreach_copy_

    def copy_and_count(targets, sources):
        copied.extend(t for t in targets if t.dtype is not torch.float32)
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_count)
    return copied


def rounded(model, optimizer):
    """Returns whether all half-precision parameters are the roundings of the masters."""
    pairs = zip(model.parameters(), amp.master_params(optimizer), strict=True)
    return all(torch.equal(param, master.to(param.dtype)) for param, master in pairs)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "peer", "options"), KINDS)
def test_step_stores_the_roundings_of_masters(kind, peer, options, half, published):
    model = network()
    optimizer = kind(model.parameters(), **options)
    setup(model, optimizer, "O2", half_dtype=half)
    train(model, optimizer, range(5))
    assert not published
    assert {p.dtype for p in model.parameters()} == {half, torch.float32}
    assert rounded(model, optimizer)
    if peer is not None and half is torch.float16:
        other = network()
        theirs = peer(other.parameters(), **options)
        setup(other, theirs, "O2")
        train(other, theirs, range(5))
        for ours, reference in zip(
            amp.master_params(optimizer), amp.master_params(theirs), strict=True
        ):
            # A parameter that is rounded to the other neighbour changes gradients by some 2⁻¹¹ of
            # themselves; five steps of 0.01 move by that much less than 1e-4.
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "options"), [(k, o) for k, _, o in KINDS[:3]])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_step_clips_gradients_of_masters_as_clip_grad_norm_does(kind, options, half, published):
    model, other = network(), network()
    optimizer = kind(model.parameters(), max_grad_norm=0.1, **options)
    plain = kind(other.parameters(), **options)
    setup(model, optimizer, "O2", half_dtype=half, loss_scale=128.0)
    setup(other, plain, "O2", half_dtype=half, loss_scale=128.0)
    for step in range(5):
        for clipped, (net, stepper) in enumerate(((other, plain), (model, optimizer))):
            stepper.zero_grad()
            with amp.scale_loss(loss_of(net, step), stepper) as scaled:
                scaled.backward()
            if not clipped:
                norm = torch.nn.utils.clip_grad_norm_(amp.master_params(stepper), 0.1)
            stepper.step()
        assert norm > 0.1
        # Torch sums in float32; models that differ by a rounding have other gradients by 2⁻⁸.
        torch.testing.assert_close(optimizer.grad_norm.float(), norm, rtol=2.0**-8, atol=0)
    assert not published
    masters = [list(amp.master_params(o)) for o in (optimizer, plain)]
    for ours, reference in zip(*masters, strict=True):
        # As above, where half precision is coarser: five steps of 0.01, by 2⁻⁸ of themselves.
        torch.testing.assert_close(ours, reference, rtol=0, atol=2e-4)


def test_masters_without_gradient_are_still_rounded_into_the_model(published):
    model = torch.nn.ModuleList([Exact(), Exact()])
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    _, idle = amp.master_params(optimizer)
    with torch.no_grad():
        idle.fill_(0.1)
    with amp.scale_loss(model[0](torch.tensor([1.0, 2.0])), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert len(published) == 1
    assert model[0].weight.tolist() == [0.75, 1.5]
    assert torch.equal(model[1].weight, torch.full((2,), 0.1, dtype=torch.float16))


def test_step_that_is_skipped_leaves_the_next_to_store_its_own(published):
    model = Exact()
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale="dynamic")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})
    for inputs in ([float("inf"), 1.0], [1.0, 2.0]):
        with amp.scale_loss(model(torch.tensor(inputs)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert not published
    assert model.weight.tolist() == [0.75, 1.5]


def test_parameters_that_come_late_have_their_roundings_stored(published):
    model, late = Exact(), torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    for step in range(2):
        if step == 1:
            optimizer.add_param_group({"params": [late], "lr": 0.5})
        optimizer.zero_grad()
        loss = model(torch.tensor([1.0, 2.0])) + late.float().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert not published
    assert model.weight.tolist() == [0.5, 1.0]
    assert late.tolist() == [0.5, 0.5]


def test_autograd_notices_that_the_step_has_written_into_the_model():
    model = Exact()
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    loss = (model.weight * model.weight).sum().float()
    with amp.scale_loss(model(torch.tensor([1.0, 2.0])), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fp16_optimizer_has_roundings_stored(published):
    model = Exact().half()
    optimizer = FP16_Optimizer(FusedAdamW(model.parameters(), lr=0.25), static_loss_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(model(torch.tensor([1.0, 2.0], dtype=torch.float16)))
        optimizer.step()
    assert not published
    (master,) = optimizer.param_groups[0]["params"]
    assert torch.equal(model.weight, master.half())


def test_optimizer_that_is_given_back_updates_what_it_was_given_only():
    model = Exact()
    optimizer = FusedSGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=8.0)
    (master,) = amp.master_params(optimizer)
    master.grad = torch.ones(2)
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.75]
    mixed_optimizer_of(optimizer).retire()
    model.weight.grad = torch.ones(2).half()
    optimizer.step()
    assert model.weight.tolist() == [0.5, 1.5]
    assert master.tolist() == [0.75, 1.75]


def test_step_that_stores_nothing_after_one_that_was_skipped_is_noticed(published, monkeypatch):
    model = Exact()
    optimizer = FusedLAMB(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale="dynamic")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}})

    def step(inputs):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.tensor(inputs)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    def refuse(*_, **__):
        raise NotFusable("not today")

    step([1.0, 2.0])
    step([float("inf"), 2.0])
    monkeypatch.setattr(FusedLAMB, "_fused_step", staticmethod(refuse))
    step([1.0, 2.0])
    assert len(published) == 1
    assert rounded(model, optimizer)
