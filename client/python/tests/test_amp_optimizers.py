"""Tests what thalweg.amp changes in optimizers, and what it leaves unchanged."""

import warnings
from collections import OrderedDict

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, exact, loss_of, network, setup, train
from torch import nn, optim

import thalweg.compat  # noqa: F401 - optim.LAMB
from thalweg import amp
from thalweg.optim import FusedAdamW

pytestmark = pytest.mark.numeric


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


OPTIMIZERS = [
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.Adam, {}),
    (optim.Adam, {"foreach": True}),
    (optim.AdamW, {"fused": True}),
    (optim.RMSprop, {}),
    (optim.Adagrad, {}),
    (optim.Adadelta, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
    (optim.Adamax, {}),
    (optim.Adafactor, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_optimizer_of_torch_takes_a_skip_as_if_it_had_not_been_called(kind, options, level):
    results = []
    for overflow in (False, True):
        model = network()
        optimizer = kind(model.parameters(), lr=0.01, **options)
        setup(model, optimizer, level, loss_scale="dynamic")
        train(model, optimizer, range(2))
        statistics = {n: b.clone() for n, b in model.named_buffers()}
        if overflow:
            with amp.scale_loss(loss_of(model, 7), optimizer) as scaled:
                (scaled * float("inf")).backward()
            optimizer.step()
            for name, buffer in model.named_buffers():
                buffer.copy_(statistics[name])
        train(model, optimizer, range(2, 4))
        results.append((model.state_dict(), optimizer.state_dict()))
    for name, tensor in results[0][0].items():
        # A scale of half the size changes no bit as long as nothing underflows; biases are tiny.
        torch.testing.assert_close(results[1][0][name], tensor, rtol=2.0**-10, atol=2.0**-12)
    steps = [[s.get("step") for s in r[1]["state"].values()] for r in results]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("given", [(), (False,), (True,)])
def test_clearing_gradients_does_what_the_optimizer_does_by_default(given):
    param = nn.Parameter(torch.ones(1))
    optimizer = optim.LAMB([param], set_grad_none=False)
    setup([], optimizer, "O1")
    param.grad = torch.ones(1)
    optimizer.zero_grad(*given)
    assert (param.grad is None) == (given == (True,))


@pytest.mark.parametrize(("level", "scale"), [("O2", 1.0), ("O1", "dynamic"), ("O0", 2.0)])
def test_closures_are_refused_where_gradients_are_not_the_optimizers(level, scale):
    _, optimizer = exact(level, loss_scale=scale)
    with pytest.raises(RuntimeError, match="was given a closure"):
        optimizer.step(lambda: 0)


def test_closures_run_where_nothing_is_scaled():
    model = Exact()
    optimizer = optim.LBFGS(model.parameters(), max_iter=20)
    setup(model, optimizer, "O0")

    def closure():
        optimizer.zero_grad()
        loss = (model.weight - 3.0).square().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    optimizer.step(closure)
    # LBFGS stops where the gradient 2·(w - 3) is below 1e-7, or rounds to it.
    torch.testing.assert_close(model.weight.detach(), torch.full((2,), 3.0), rtol=0, atol=1e-5)


class Wrapper(optim.Optimizer):
    """Leaves out Optimizer.__init__, as timm.optim.Lookahead does."""

    def __init__(self, inner, kind):
        if kind == "own hooks":
            self._optimizer_step_pre_hooks = OrderedDict()
            self._optimizer_step_post_hooks = OrderedDict()
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def step(self, closure=None):
        self.inner.step(closure)


@pytest.fixture
def unhooked(monkeypatch):
    """Leaves the step of Wrapper as it is before an optimizer has been built from the class."""
    monkeypatch.setattr(Wrapper, "step", Wrapper.step)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["own hooks", "hooks of the inner"])
def test_wrappers_that_torch_has_not_hooked_train_and_skip(level, kind, unhooked):
    model = Exact()
    optimizer = Wrapper(optim.SGD(model.parameters(), lr=0.25, weight_decay=0.5), kind)
    setup(model, optimizer, level, num_losses=2)
    scales = {f"loss_scaler{i}": {"loss_scale": 128.0, "unskipped": 0} for i in range(2)}
    amp.load_state_dict(scales)
    for inputs in ([1.0, 2.0], [float("inf"), 1.0]):
        optimizer.zero_grad()
        backward(model, optimizer, inputs, loss_id=int(inputs[0] != 1.0))
        optimizer.step()
    # w - 0.25 * (x + 0.5 * w), once
    assert model.weight.tolist() == [1.0 - 0.375, 2.0 - 0.75]


def test_wrapper_whose_step_cannot_be_hooked_is_refused(unhooked):
    model = Exact()
    optimizer = Wrapper(optim.SGD(model.parameters(), lr=0.25), "own hooks")
    optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(RuntimeError, match="step of a Wrapper has been replaced"):
        setup(model, optimizer, "O2")


@pytest.mark.parametrize("by_name", [False, True])
def test_closures_compute_with_casts_and_steps_without(by_name):
    seen = []

    def multiply():
        seen.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)

    class Multiplying(optim.SGD):
        def step(self, closure):
            multiply()
            closure()
            multiply()

    optimizer = Multiplying(Exact().parameters(), lr=0.25)
    setup([], optimizer, "O1", half_dtype=torch.bfloat16)
    if by_name:
        optimizer.step(closure=multiply)
    else:
        optimizer.step(multiply)
    multiply()
    assert seen == [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("before", [False, True])
def test_schedulers_do_not_warn_and_see_every_step(before):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    schedulers = [optim.lr_scheduler.StepLR(optimizer, 1, 0.5)] if before else []
    setup(model, optimizer, "O2")
    schedulers = schedulers or [optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(1))
        schedulers[0].step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_clipping_masters_clips_the_step():
    model, optimizer = exact("O2", lr=1.0, loss_scale=1024.0)
    backward(model, optimizer, [3.0, 4.0])
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.5, error_if_nonfinite=True)
    optimizer.step()
    assert norm == 5.0
    (master,) = amp.master_params(optimizer)
    # clip_grad_norm_ divides by the norm plus 1e-6.
    torch.testing.assert_close(master.detach(), torch.tensor([-0.5, 0.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_parameters_that_come_late_are_updated(level):
    model, late = Exact(), nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    setup(model, optimizer, level, loss_scale=8.0)
    late.data = late.data.to(model.weight.dtype)
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    loss = model(torch.tensor([1.0, 2.0])) + (late.float() * torch.tensor([1.0, 1.0])).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
    assert late.tolist() == [0.5, 0.5]


def test_several_models_and_optimizers_share_a_loss():
    models = [Exact(), Exact()]
    optimizers = [optim.SGD(model.parameters(), lr=0.25) for model in models]
    assert setup(models, optimizers, "O2", loss_scale=128.0) == (models, optimizers)
    loss = models[0](torch.tensor([1.0, 2.0])) + models[1](torch.tensor([2.0, 4.0]))
    with amp.scale_loss(loss, optimizers) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert models[0].weight.tolist() == [0.75, 1.5]
    assert models[1].weight.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_of_a_parameter_in_two_optimizers_are_divided_and_added_once(level):
    model = Exact()
    optimizers = [optim.SGD(model.parameters(), lr=0.25) for _ in range(2)]
    setup(model, optimizers, level, loss_scale=8.0)
    for _ in range(2):
        backward(model, optimizers, [1.0, 2.0])
    for optimizer in optimizers:
        (param,) = amp.master_params(optimizer)
        assert param.grad.tolist() == [2.0, 4.0]


def test_sparse_gradients_are_unscaled():
    model = nn.Embedding(4, 2, sparse=True)
    weight = model.weight.detach().clone()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    setup(model, optimizer, "O1")
    for _ in range(2):
        with amp.scale_loss(model(torch.tensor([1, 1])).sum(), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    weight[1] -= 2.0
    torch.testing.assert_close(model.weight.detach(), weight, rtol=2.0**-22, atol=2.0**-22)


def test_failed_backward_leaves_gradients_as_they_were():
    model, optimizer = exact("O1", loss_scale=8.0)
    backward(model, optimizer, [1.0, 2.0])
    with pytest.raises(ZeroDivisionError), amp.scale_loss(model.weight.sum(), optimizer) as scaled:
        scaled.backward()
        raise ZeroDivisionError
    assert model.weight.grad.tolist() == [1.0, 2.0]


def test_state_that_an_optimizer_brings_along_moves_to_the_masters():
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    model(torch.tensor([4.0, 4.0])).backward()
    optimizer.step()
    setup(model, optimizer, "O2", loss_scale=128.0)
    optimizer.zero_grad()
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    assert model.weight.tolist() == [0.0 - 0.75, 1.0 - 1.0]  # momentum 2 + 1 and 2 + 2


@pytest.mark.parametrize("kind", [optim.AdamW, FusedAdamW])
def test_training_that_is_initialized_again_has_the_bits_of_one_that_was_once(kind):
    results = []
    for again in (False, True):
        model = network()
        optimizer = kind(model.parameters(), lr=0.01)
        setup(model, optimizer, "O2", loss_scale=8.0)
        train(model, optimizer, range(2))
        if again:
            setup(model, optimizer, "O2", loss_scale=8.0)
        train(model, optimizer, range(2, 4))
        state = optimizer.state_dict()["state"]
        moments = [state[i]["exp_avg"] for i in range(len(state))]
        results.append([*model.parameters(), *model.state_dict().values(), *moments])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_level_after_another_goes_on_with_the_weights_of_the_masters(half):
    model = Exact((1.0, 1.0 + 2.0**-20))
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    setup(model, optimizer, "O2", loss_scale=8.0)
    backward(model, optimizer, [1.0, 2.0])
    optimizer.step()
    (master,) = amp.master_params(optimizer)
    weight = master.detach().clone()
    setup(model, optimizer, "O2", loss_scale=8.0, half_dtype=half)
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master, weight)
    assert torch.equal(model.weight, weight.to(half))
    setup(model, optimizer, "O0")
    assert torch.equal(model.weight, weight)
    assert optimizer.param_groups[0]["params"] == [model.weight]
    assert torch.equal(optimizer.state_dict()["state"][0]["step"], torch.tensor(1.0))


def test_weight_that_somebody_has_written_is_kept_by_the_next_level():
    model, optimizer = exact("O2")
    with torch.no_grad():
        model.weight[0] = 3.0
    setup(model, optimizer, "O0")
    assert model.weight.tolist() == [3.0, 2.0]


@pytest.mark.parametrize(("first", "second"), [("O2", "O1"), ("O3", "O2")])
def test_half_model_is_refused_where_no_master_can_go_on(first, second):
    model, optimizer = exact(first)
    with pytest.raises(RuntimeError, match=r"expected torch\.float32"):
        setup(model, optimizer, second)
