"""Tests names of AIAK-Training in torch: O2 under torch's own autocast and GradScaler."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.cuda.amp as cuda_amp
from amp_models import Exact, casts_off_afterwards, loss_of, network, script_environment
from torch import nn, optim

import thalweg.compat  # noqa: F401 - gives torch the names
from thalweg import amp
from thalweg._settings._variables import ConfigError, compat_is_wanted

SCRIPTS = Path(__file__).parent / "scripts"
ADAMS = [
    lambda params: optim.SGD(params, lr=0.05, momentum=0.9),
    # By default a weight whose gradient is mere rounding moves as far as any other.
    lambda params: optim.AdamW(params, lr=0.01, eps=1e-3),
    lambda params: optim.AdamW(params, lr=0.01, eps=1e-3, fused=True),
    lambda params: optim.LAMB(params, lr=0.01, weight_decay=0.01),
]


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def exact(lr=0.25, scale=128.0, **options):
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=lr)
    cuda_amp.aiak_amp_decorate(model, optimizer, loss_scale=scale, **options)
    return model, optimizer, torch.amp.GradScaler("cpu")


def backward(model, scaler, *inputs):
    scaler.scale(model(torch.tensor(inputs))).backward()


def test_names_are_in_torch():
    assert optim.LAMB.__module__ == "thalweg.optim.lamb"
    import inspect

    parameters = inspect.signature(cuda_amp.aiak_amp_decorate).parameters.values()
    assert [p.name for p in parameters][:7] == [
        "model", "optimizer", "keep_batchnorm_fp32", "loss_scale", "num_losses",
        "min_loss_scale", "max_loss_scale",
    ]  # fmt: skip
    assert [p.default for p in parameters][2:7] == [True, None, 1, None, 2.0**24]
    parameters = inspect.signature(optim.LAMB).parameters.values()
    named = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(named.items())[1:] == [
        ("lr", 1e-3), ("weight_decay", 0), ("betas", (0.9, 0.999)), ("eps", 1e-8),
        ("adam_w_mode", True), ("grad_averaging", True), ("set_grad_none", True),
        ("max_grad_norm", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("build", ADAMS)
@pytest.mark.parametrize("unscale", [False, True])
def test_native_flow_follows_float32(build, unscale):
    """Shows that gradients are unscaled, clipped and current: otherwise weights would be far off.

    float16's roundings, 2⁻¹¹ of a weight or activation, make far less than a tenth of that.
    """
    results = []
    for decorated in (False, True):
        model = network()
        optimizer = build(model.parameters())
        if decorated:
            model, optimizer = cuda_amp.aiak_amp_decorate(model, optimizer, loss_scale=256.0)
            assert model[0].weight.dtype is torch.float16
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for number in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=decorated):
                loss = loss_of(model, number)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(cuda_amp.aiak_amp_parameters(optimizer), 0.5)
            scaler.step(optimizer)
            scaler.update()
        results.append(torch.cat([p.detach().view(-1) for p in [
            *model.state_dict().values()] if p.is_floating_point()]))  # fmt: skip
    start = network().state_dict().values()
    start = torch.cat([p.view(-1) for p in start if p.is_floating_point()])
    moved = (results[0] - start).norm()
    assert (results[1] - results[0]).norm() < 0.1 * moved


def test_gradients_accumulate_and_are_clipped_on_masters():
    model, optimizer, scaler = exact(lr=1.0)
    backward(model, scaler, 1.0, 2.0)
    backward(model, scaler, 2.0, 2.0)
    assert model.weight.grad.tolist() == [384.0, 512.0]
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(cuda_amp.aiak_amp_parameters(optimizer), 2.5)
    assert norm == 5.0
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(
        model.state_dict()["weight"], torch.tensor([-0.5, 0.0]), rtol=0, atol=1e-6
    )
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_skips_the_step_and_halves_the_scale(fused):
    model = Exact()
    optimizer = optim.Adam(model.parameters(), lr=0.5, fused=fused)
    cuda_amp.aiak_amp_decorate(model, optimizer, max_loss_scale=128.0)
    scaler = torch.amp.GradScaler("cpu", backoff_factor=0.125, growth_interval=1)
    backward(model, scaler, float("inf"), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0  # not the scaler's own factor
    assert model.weight.tolist() == [1.0, 2.0]
    assert all(float(s["step"]) == 0.0 for s in optimizer.state.values())
    optimizer.zero_grad()
    backward(model, scaler, 1.0, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0  # nor its own interval
    # Adam's first step is lr·g/(|g| + eps).
    torch.testing.assert_close(model.weight.detach().float(), torch.tensor([0.5, 1.5]))


def test_scale_grows_after_2000_updates_within_its_bounds():
    model, optimizer, scaler = exact(scale=None, min_loss_scale=32.0, max_loss_scale=256.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 128.0})
    scaler._init_growth_tracker = 1998
    scales = []
    for number in range(3):
        optimizer.zero_grad()
        backward(model, scaler, 1.0, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if number == 1:
            scaler._growth_tracker.fill_(1999)
    assert scales == [128.0, 256.0, 256.0]
    for _ in range(5):
        backward(model, scaler, float("nan"), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0


def test_scale_is_never_zero():
    model, optimizer, scaler = exact(scale=None)
    backward(model, scaler, 1.0, 1.0)
    scaler._scale.fill_(2.0**-126)
    backward(model, scaler, float("nan"), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**-126


def test_constant_scale_stays_and_still_skips():
    model, optimizer, scaler = exact(scale=8.0)
    backward(model, scaler, float("inf"), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), model.weight.tolist()) == (8.0, [1.0, 2.0])


def test_several_losses_and_optimizers_share_a_scaler():
    models = [Exact(), Exact()]
    optimizers = [optim.SGD(model.parameters(), lr=0.25) for model in models]
    assert cuda_amp.aiak_amp_decorate(models, optimizers, loss_scale=64.0, num_losses=2) == (
        models,
        optimizers,
    )
    scaler = torch.amp.GradScaler("cpu")
    backward(models[0], scaler, 1.0, 2.0)
    backward(models[1], scaler, 2.0, 4.0)
    backward(models[1], scaler, 2.0, 4.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert models[0].weight.tolist() == [0.75, 1.5]
    assert models[1].weight.tolist() == [0.0, 0.0]


def test_flow_works_with_a_disabled_scaler_and_without_one():
    model, optimizer, _ = exact()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, scaler, 1.0, 2.0)
        scaler.unscale_(optimizer)
        (param,) = cuda_amp.aiak_amp_parameters(optimizer)
        assert param.grad.tolist() == [1.0, 2.0]
        scaler.step(optimizer)
        scaler.update()
    assert model.weight.tolist() == [0.5, 1.0]


def test_resumed_run_has_the_bits_of_one_that_never_stopped():
    def setup(seed):
        model = network(seed)
        optimizer = optim.LAMB(model.parameters(), lr=0.01, weight_decay=0.1)
        cuda_amp.aiak_amp_decorate(model, optimizer)
        return model, optimizer, torch.amp.GradScaler("cpu")

    def train(model, optimizer, scaler, steps):
        for number in steps:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            scaler.step(optimizer)
            scaler.update()

    run = setup(0)
    run[2]._init_scale = 2.0**20  # overflows at first, hence the scale is a part of the state
    train(*run, range(4))
    import copy

    saved = copy.deepcopy([part.state_dict() for part in run])
    train(*run, range(4, 8))
    resumed = setup(1)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    train(*resumed, range(4, 8))
    assert resumed[2].get_scale() == run[2].get_scale()
    for name, tensor in run[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], tensor), name


def test_optimizers_that_were_not_decorated_are_served_as_before():
    param = nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([param], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.5]
    assert list(cuda_amp.aiak_amp_parameters(optimizer)) == [param]


def test_two_scales_for_one_gradient_are_refused():
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    scaler = torch.amp.GradScaler("cpu")
    backward(model, scaler, 1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"given an optimizer of thalweg\.amp"):
        scaler.step(optimizer)
    decorated, other, _ = exact()
    with (
        pytest.raises(RuntimeError, match="SGD was not given to initialize"),
        amp.scale_loss(decorated(torch.ones(2)), other),
    ):
        pass


def test_malformed_arguments_are_refused():
    with pytest.raises(ValueError, match="num_losses is 0"):
        exact(num_losses=0)
    with pytest.raises(ValueError, match="loss_scale is -1"):
        exact(scale=-1)


@pytest.mark.parametrize(
    ("env", "names", "apex"),
    [
        ({}, False, False),
        ({"THALWEG_COMPAT": "1"}, True, False),
        ({"THALWEG_COMPAT": "apex"}, True, True),
        ({"AIAK_FP16_COMPRESSION": "1"}, True, False),
        ({"AIAK_FP16_COMPRESSION": "1", "THALWEG_COMPAT": "0"}, False, False),
        ({"THALWEG_COMPAT": "apex", "THALWEG_ENABLE": "0"}, False, False),
    ],
)
def test_environment_asks_for_names(env, names, apex):
    assert compat_is_wanted(env) == (names, apex)


def test_malformed_variable_is_refused_by_name():
    with pytest.raises(ConfigError, match="THALWEG_COMPAT is 'all', expected 0, 1 or apex"):
        compat_is_wanted({"THALWEG_COMPAT": "all"})
    with pytest.raises(ConfigError, match="THALWEG_ENABLE is 'off', expected 0 or 1"):
        compat_is_wanted({"THALWEG_COMPAT": "apex", "THALWEG_ENABLE": "off"})


@pytest.mark.parametrize("variables", [{"THALWEG_COMPAT": "1"}, {"AIAK_FUSED_OPTIMIZER": "1"}])
def test_unchanged_script_runs(variables):
    result = subprocess.run(
        [sys.executable, SCRIPTS / "aiak_script.py"],
        env=script_environment() | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "trained" in result.stdout


def norm_of(optimizer):
    grads = [param.grad for param in cuda_amp.aiak_amp_parameters(optimizer)]
    return torch.nn.utils.get_total_norm(grads).item()


def test_norm_may_be_read_after_each_backward():
    model, optimizer, _ = exact()
    for inputs, norm in (([3.0, 4.0], 5.0), ([0.0, 0.0], 5.0), ([9.0, 12.0], 20.0)):
        model(torch.tensor(inputs)).backward()
        assert norm_of(optimizer) == norm
    optimizer.step()
    assert model.weight.tolist() == [1 - 0.25 * 12, 2 - 0.25 * 16]


def test_gradient_of_a_batch_that_was_dropped_is_in_no_later_step():
    model, optimizer, _ = exact()
    model(torch.tensor([float("nan"), 1.0])).backward()
    assert norm_of(optimizer) != 0
    model.zero_grad()
    model(torch.tensor([1.0, 2.0])).backward()
    optimizer.step()
    assert model.weight.tolist() == [0.75, 1.5]
