"""Tests thalweg.amp.initialize and scale_loss on CPU tensors."""

import copy
import io

import pytest
import torch
from amp_models import (
    ROUNDOFF,
    backward,
    batch,
    casts_off_afterwards,
    exact,
    loss_of,
    network,
    setup,
)
from torch import nn, optim
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from thalweg import amp

pytestmark = pytest.mark.numeric


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels_follow_least_squares_in_float64(level, half):
    """Gradient descent with a step below 2/L does not magnify errors: they add up.

    A gradient xᵀ(xw - y)/n sees five roundings of each element on its way (w, x, the product, its
    loss's gradient, the result), each relative to what the sums are made of, hence at most
    5·u·|x|ᵀ(|x||w| + |y|)/n. O3 also rounds the weight and the update itself, in each step.
    """
    torch.manual_seed(0)
    inputs, target, lr, steps = torch.randn(64, 6), torch.randn(64, 1), 0.05, 40
    model = nn.Linear(6, 1, bias=False)
    weight = model.weight.detach().double().T.clone()
    start, bound = weight.clone(), 0.0
    model, optimizer = setup(
        model, optim.SGD(model.parameters(), lr=lr), level, half_dtype=half, loss_scale=128.0
    )
    roundoff = 2.0**-22 if level == "O0" else ROUNDOFF[half]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - target).square().mean() / 2
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        x, y = inputs.double(), target.double()
        weight -= lr * x.T @ (x @ weight - y) / 64
        error = 5 * roundoff * (x.abs().T @ (x.abs() @ weight.abs() + y.abs())).norm() / 64
        bound += lr * error.item()
        if level == "O3":
            bound += 2 * roundoff * weight.norm().item()
    result = next(iter(amp.master_params(optimizer))).detach().double().T
    assert (result - weight).norm() <= bound
    assert (result - start).norm() > bound / 2  # the bound says something


@pytest.mark.parametrize(
    ("level", "linear", "norm"),
    [
        ("O0", torch.float32, torch.float32),
        ("O1", torch.float32, torch.float32),
        ("O2", torch.float16, torch.float32),
        ("O3", torch.float16, torch.float16),
    ],
)
def test_levels_cast_what_they_say(level, linear, norm):
    model = network()
    setup(model, optim.SGD(model.parameters(), lr=0.1), level)
    assert model[0].weight.dtype is linear
    assert {t.dtype for t in (model[1].weight, model[1].running_mean)} == {norm}
    assert model(torch.randn(4, 8)).dtype is (torch.float16 if level == "O1" else torch.float32)


def test_batch_norm_without_weights_keeps_float32_statistics():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False))
    setup(model, None, "O2")
    assert model[1].running_var.dtype is torch.float32
    assert model(torch.randn(4, 8)).dtype is torch.float32


def test_outputs_and_inputs_are_cast_in_containers():
    class Nested(nn.Linear):
        def forward(self, inputs, *, more):
            assert {inputs["x"].dtype, more[0].dtype} == {torch.bfloat16}
            assert more[1].dtype is torch.int64
            return {"y": (super().forward(inputs["x"]), more[1])}

    model = setup(Nested(2, 2), None, "O3", half_dtype=torch.bfloat16, cast_model_outputs=None)
    result = model({"x": torch.ones(1, 2)}, more=[torch.ones(1), torch.ones(1, dtype=torch.int64)])
    assert result["y"][0].dtype is torch.float32
    assert result["y"][1].dtype is torch.int64


def test_cast_model_outputs_is_honoured_at_every_level():
    for level in ("O0", "O1", "O2"):
        model = setup(nn.Linear(2, 2), None, level, cast_model_outputs=torch.float64)
        assert model(torch.ones(1, 2)).dtype is torch.float64


def test_models_may_be_copied_and_pickled():
    model = setup(nn.Linear(2, 2), None, "O2")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        result = copied(torch.ones(1, 2))
        assert result.dtype is torch.float32
        assert torch.equal(result, model(torch.ones(1, 2)))
        assert copied.state_dict()["weight"].dtype is torch.float32


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    setup(model, optimizer, "O2", loss_scale=8.0)
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model[0].weight is model[1].weight
    state = model.state_dict()
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_recomputed_activations_give_the_same_gradients(level, reentrant):
    gradients = []
    for recompute in (False, True):
        model = network()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        setup(model, optimizer, level, loss_scale=128.0)
        inputs, _ = batch(0)
        inputs.requires_grad_()
        result = checkpoint(model, inputs, use_reentrant=reentrant) if recompute else model(inputs)
        with amp.scale_loss(result.float().square().mean(), optimizer) as scaled:
            scaled.backward()
        gradients.append([param.grad for param in amp.master_params(optimizer)])
    for before, after in zip(*gradients, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weight_norm_trains(level):
    """Float16's roundings make far less than a tenth of what the weights move."""
    results = []
    for used in ("O0", level):
        torch.manual_seed(0)
        model = nn.Sequential(
            weight_norm(nn.Linear(8, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 4))
        )
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        start = torch.cat([p.detach().view(-1) for p in model.parameters()])
        setup(model, optimizer, used, loss_scale=128.0)
        for number in range(10):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, number), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        results.append(torch.cat([p.detach().view(-1) for p in amp.master_params(optimizer)]))
    assert (results[1] - results[0]).norm() < 0.1 * (results[0] - start).norm()
    assert not torch.equal(*results)


def test_masters_keep_what_half_precision_would_lose():
    """Each step is 2⁻¹³, a quarter of the distance between 1 and the float16 below it."""
    model, optimizer = exact(lr=2.0**-13)
    for _ in range(8):
        optimizer.zero_grad()
        backward(model, optimizer, [1.0, 1.0])
        optimizer.step()
    (master,) = amp.master_params(optimizer)
    assert master.tolist() == [1 - 2.0**-10, 2 - 2.0**-10]
    assert model.weight.tolist() == torch.tensor([1 - 2.0**-10, 2 - 2.0**-10]).half().tolist()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("scale", [None, 64.0, "dynamic"])
def test_gradients_of_several_backwards_add_up_unscaled(level, scale):
    model, optimizer = exact(level, loss_scale=scale)
    backward(model, optimizer, [1.0, 2.0])
    backward(model, optimizer, [4.0, 8.0])
    (param,) = amp.master_params(optimizer)
    assert param.grad.tolist() == [5.0, 10.0]
    optimizer.step()
    assert model.weight.tolist() == [1 - 1.25, 2 - 2.5]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_gradients_stay_scaled_and_accumulate_in_the_model(level):
    model, optimizer = exact(level, loss_scale=16.0)
    backward(model, optimizer, [1.0, 2.0], delay_unscale=True)
    assert model.weight.grad.tolist() == [16.0, 32.0]
    with pytest.raises(RuntimeError, match="still multiplied by the loss scale"):
        optimizer.step()
    backward(model, optimizer, [4.0, 8.0])
    (param,) = amp.master_params(optimizer)
    assert param.grad.tolist() == [5.0, 10.0]


def test_delayed_gradients_of_another_scale_are_brought_to_it():
    model, optimizer = exact("O2", loss_scale="dynamic", num_losses=2)
    backward(model, optimizer, [1.0, 2.0], loss_id=1)
    amp._amp_state.loss_scalers[1].load_state_dict({"loss_scale": 4.0, "unskipped": 0})
    optimizer.zero_grad()
    backward(model, optimizer, [1.0, 2.0], loss_id=1, delay_unscale=True)
    backward(model, optimizer, [0.5, 0.25], loss_id=0)
    (param,) = amp.master_params(optimizer)
    assert param.grad.tolist() == [1.5, 2.25]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_skips_one_step_and_halves_its_scale_only(level):
    model, optimizer = exact(level, loss_scale="dynamic", num_losses=2)
    backward(model, optimizer, [1.0, 2.0], loss_id=0)
    backward(model, optimizer, [float("inf"), 1.0], loss_id=1)
    optimizer.step()
    assert model.weight.tolist() == [1.0, 2.0]
    scales = [scaler["loss_scale"] for scaler in amp.state_dict().values()]
    assert scales == [128.0, 64.0]
    optimizer.zero_grad()
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_overflow_noticed_late_still_skips():
    model, optimizer = exact("O2", loss_scale="dynamic")
    backward(model, optimizer, [float("nan"), 1.0], delay_overflow_check=True)
    backward(model, optimizer, [1.0, 1.0])
    optimizer.step()
    assert model.weight.tolist() == [1.0, 2.0]
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 64.0


def test_clearing_gradients_clears_the_skip():
    model, optimizer = exact("O2", loss_scale="dynamic")
    backward(model, optimizer, [float("inf"), 1.0])
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad.tolist() == [0.0, 0.0]
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]


def test_disabled_changes_nothing():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    loss = loss_of(model, 0)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert model[0].weight.dtype is torch.float32


def test_casts_end_when_mixed_precision_is_switched_off():
    setup(network(), None, "O1")
    assert amp.state_dict()
    model = network()
    assert amp.initialize(model, enabled=False) is model
    assert model(torch.ones(2, 8)).dtype is torch.float32
    assert amp.state_dict() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "02"}, "opt_level is '02', expected one of 'O0'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32 is given with"),
        ({"opt_level": "O1", "master_weights": True}, "master_weights is given with O1"),
        ({"opt_level": "O1", "cast_model_type": torch.half}, "cast_model_type is torch.float16"),
        ({"opt_level": "O0", "master_weights": True}, "masters are only for half-precision"),
        ({"opt_level": "O2", "loss_scale": "big"}, "loss_scale is 'big', expected 'dynamic'"),
        ({"opt_level": "O2", "loss_scale": 0}, "loss_scale is 0, expected"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "is 'yes', expected True or False"),
        ({"opt_level": "O2", "cast_model_type": "half"}, "cast_model_type is 'half', expected"),
        ({"opt_level": "O2", "half_dtype": torch.float64}, "half_dtype is torch.float64"),
        ({"opt_level": "O2", "num_losses": 0}, "num_losses is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        amp.initialize(nn.Linear(2, 2), **options)


def test_options_may_be_text():
    model = setup(network(), None, "O2", keep_batchnorm_fp32="False", loss_scale="128.0")
    assert model[1].weight.dtype is torch.float16
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}


def test_what_cannot_be_initialized_is_refused():
    with pytest.raises(RuntimeError, match=r"parameter weight is torch\.float16"):
        setup(nn.Linear(2, 2).half(), None, "O2")
    with pytest.raises(RuntimeError, match="given a DataParallel"):
        setup(nn.DataParallel(nn.Linear(2, 2)), None, "O2")
    with pytest.raises(TypeError, match="models contains a int"):
        setup(1, None, "O2")
    model, optimizer = exact()
    other = optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    with (
        pytest.raises(RuntimeError, match="SGD was not given to initialize"),
        amp.scale_loss(torch.ones(()), other),
    ):
        pass
    with pytest.raises(ValueError, match="loss_id is 3, expected one below 1"):
        backward(model, optimizer, [1.0, 1.0], loss_id=3)
