"""Tests what scripts written for apex reach into, beside the functions that it documents."""

import pytest
import torch
from amp_models import Exact, backward, casts_off_afterwards, setup
from torch import nn, optim

from thalweg import amp
from thalweg.amp import fp16_utils


@pytest.fixture(autouse=True)
def casts_are_off_afterwards():
    with casts_off_afterwards():
        yield
    amp._amp_state.allow_incoming_model_not_fp32 = False


class Mixed(nn.Module):
    """A model that has a parameter in float32 and one in float16, with exact gradients."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.narrow = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float16))

    def forward(self, inputs):
        return (inputs * self.wide * self.narrow.float()).sum()


def test_handle_of_the_latest_call_puts_functions_back():
    original = torch.nn.functional.linear
    setup(nn.Linear(1, 1), None, "O1")
    handle = amp._amp_state.handle
    assert handle.is_active()
    assert handle.has_cache
    handle._deactivate()
    assert torch.nn.functional.linear is original
    assert not handle.is_active()
    assert amp.init() is amp._amp_state.handle
    setup(nn.Linear(1, 1), None, "O2")
    assert not amp._amp_state.handle.is_active()
    with amp._amp_state.handle._disable_casts():
        amp._amp_state.handle._clear_cache()


def test_init_takes_the_name_enable_as_well():
    assert not amp.init(enable=False).is_active()
    assert amp.init(enable=True).is_active()


@pytest.mark.parametrize("scale", [4.0, 0.5])
def test_written_loss_scale_is_the_next_losss(scale):
    model = Exact()
    model, optimizer = setup(model, optim.SGD(model.parameters(), lr=1.0), "O2")
    amp._amp_state.loss_scalers[0]._loss_scale = scale
    with amp.scale_loss(model(torch.tensor([1.0, 2.0])), optimizer) as scaled:
        assert scaled.item() == scale * 5.0
        scaled.backward()
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [1.0, 2.0]
    assert amp._amp_state.loss_scalers[0].loss_scale() == scale


def test_options_may_be_read_as_attributes_and_as_a_dictionary():
    setup(nn.Linear(1, 1), None, "O2", loss_scale="128.0")
    found = amp._amp_state.opt_properties
    assert (found.enabled, found.opt_level, found.master_weights) == (True, "O2", True)
    assert found.options["loss_scale"] == 128.0
    assert found.options["cast_model_type"] is torch.float16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_models_in_half_are_taken_on_request_and_not_cast(level):
    model = Mixed()
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    with pytest.raises(RuntimeError, match=r"narrow is torch.float16, expected torch.float32"):
        setup(model, optimizer, level, cast_model_type=False)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    setup(model, optimizer, level, cast_model_type=False)
    assert (model.wide.dtype, model.narrow.dtype) == (torch.float32, torch.float16)
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    with amp.scale_loss(model(torch.tensor([1.0, 1.0])), optimizer) as scaled:
        scaled.backward()
    masters = list(amp.master_params(optimizer))
    assert masters[1].dtype is (torch.float32 if level == "O2" else torch.float16)
    # d(wide·narrow)/dwide = narrow, and the other way round
    assert masters[0].grad.tolist() == [3.0, 4.0]
    assert masters[1].grad.tolist() == [1.0, 2.0]
    optimizer.step()
    assert model.narrow.tolist() == [2.75, 3.5]


def test_stash_of_an_optimizer_has_parameters_and_masters_by_group():
    model = Mixed()
    other = Exact()
    optimizer = optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}], lr=1.0)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    setup([model, other], optimizer, "O2", cast_model_type=False)
    stash = optimizer._amp_stash
    optimizer._lazy_init_maybe_master_weights()
    assert stash.lazy_init_called
    assert [len(group) for group in stash.fp16_groups] == [1, 0]
    assert stash.all_fp16_params[0] is model.narrow
    assert stash.all_fp32_from_fp16_params[0] is optimizer.param_groups[0]["params"][1]
    assert list(map(id, stash.all_fp32_from_fp32_params)) == [id(model.wide), id(other.weight)]
    assert not stash.params_have_scaled_gradients
    backward(other, optimizer, [1.0, 2.0], delay_unscale=True)
    assert stash.params_have_scaled_gradients


def test_masters_of_a_checkpoint_may_be_written_by_hand():
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    setup(model, optimizer, "O2", loss_scale=8.0)
    optimizer._lazy_init_maybe_master_weights()
    (master,) = amp.master_params(optimizer)
    master.data.copy_(torch.tensor([1.0 + 2.0**-20, 5.0]))
    backward(model, optimizer, [0.5, 1.0])
    optimizer.step()
    assert master.tolist() == [0.5 + 2.0**-20, 4.0]
    assert model.weight.tolist() == [0.5, 4.0]


def test_state_dict_of_o3_is_in_float32():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    setup(model, None, "O3")
    saved = model.state_dict()
    kinds = {value.dtype for value in saved.values()}
    assert kinds == {torch.float32, torch.int64}
    saved["0.weight"] = torch.full((2, 2), 0.5)
    model.load_state_dict(saved)
    assert model[0].weight.dtype is torch.float16
    assert model[0].weight.unique().tolist() == [0.5]


class Batch:
    """Is what libraries make of a batch: tensors behind a method `to`."""

    def __init__(self, values):
        self.values = values

    def to(self, dtype):
        return Batch(self.values.to(dtype))


def test_batches_that_have_a_method_to_are_cast():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, batches, name):
            assert name == "a name"
            return Batch(self.layer(batches[0].values))

    model = Net()
    setup(model, None, "O2")
    assert model([Batch(torch.ones(1, 2))], "a name").values.dtype is torch.float32


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_networks_take_half_inputs_under_casts(kind):
    network = kind(3, 4)
    inputs = torch.randn(5, 2, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match="dtype"):
        network(inputs)
    setup(network, None, "O1")
    assert network(inputs)[0].dtype is torch.float16
    with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal to input_size"):
        network(torch.randn(5, 2, 4, dtype=torch.float16))


def test_batch_normalisation_without_weights_is_cast_by_hand():
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    model = fp16_utils.FP16Model(network)
    assert network[0].running_mean.dtype is torch.float32
    assert network[2].running_mean.dtype is torch.float16
    assert model(torch.randn(4, 2)).dtype is torch.float16


def with_initialize(model):
    amp.initialize(model, opt_level="O1", verbosity=2)


def with_init(model):
    amp.init(verbose=True)


@pytest.mark.parametrize("switch_on", [with_initialize, with_init])
def test_casts_of_a_network_for_digits_are_printed_as_apex_does(capsys, switch_on):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 4, kernel_size=5)
            self.conv2 = nn.Conv2d(4, 8, kernel_size=5)
            self.fc1 = nn.Linear(128, 16)
            self.fc2 = nn.Linear(16, 10)

        def forward(self, x):
            pooled = nn.functional.relu(nn.functional.max_pool2d(self.conv1(x), 2))
            pooled = nn.functional.relu(nn.functional.max_pool2d(self.conv2(pooled), 2))
            hidden = nn.functional.relu(self.fc1(pooled.view(-1, 128)))
            dropped = nn.functional.dropout(hidden, training=self.training)
            return nn.functional.log_softmax(self.fc2(dropped), dim=1)

    model = Net()
    switch_on(model)
    capsys.readouterr()
    model(torch.randn(2, 1, 28, 28))
    printed = capsys.readouterr().out.splitlines()
    # The images, and twice weight and bias of each layer.
    assert printed == [
        *["Float->Half (conv2d)"] * 5,
        *["Float->Half (linear)"] * 4,
        "Half->Float (log_softmax)",
    ]
