"""Tests the contents of a checkpoint in mixed precision, and that a resumed run is the same."""

import io

import pytest
import torch
from amp_models import Exact, casts_off_afterwards, network, train
from torch import nn, optim

from thalweg import amp
from thalweg.amp._masters import master_of


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def setup(level, half, seed):
    model = network(seed)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=half, verbosity=0)
    return model, optimizer


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("load_first", [False, True])
def test_resumed_run_has_the_bits_of_one_that_never_stopped(level, half, load_first):
    model, optimizer = setup(level, half, seed=0)
    train(model, optimizer, range(4))
    saved = through_a_file(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    )
    expected = train(model, optimizer, range(4, 8))

    resumed = network(seed=1)
    other = optim.Adam(resumed.parameters(), lr=0.01)
    if load_first and level != "O3":  # O3's state is in half precision, and its model is not yet
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
    amp.initialize(resumed, other, opt_level=level, half_dtype=half, verbosity=0)
    if not load_first or level == "O3":
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    losses = train(resumed, other, range(4, 8))
    assert losses == expected or torch.isnan(torch.tensor(losses + expected)).any()
    for name, tensor in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name].nan_to_num(), tensor.nan_to_num()), name


def test_state_has_the_masters_in_float32():
    model = Exact((1 + 2.0**-20, 2.0))
    amp.initialize(model, optim.SGD(model.parameters(), lr=1.0), opt_level="O2", verbosity=0)
    assert model.weight.tolist() == [1.0, 2.0]
    assert model.state_dict()["weight"].tolist() == [1 + 2.0**-20, 2.0]
    wrapped = nn.Sequential(model)
    assert wrapped.state_dict()["0.weight"].dtype is torch.float32


def test_loading_sets_master_and_parameter_alike():
    model = Exact()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model.load_state_dict({"weight": torch.tensor([3 + 2.0**-20, 5.0])})
    assert model.weight.tolist() == [3.0, 5.0]
    (master,) = amp.master_params(optimizer)
    assert master.tolist() == [3 + 2.0**-20, 5.0]
    model.load_state_dict({"weight": torch.tensor([7.0, 9.0], dtype=torch.float16)})
    assert master.tolist() == [7.0, 9.0]


def test_what_cannot_be_loaded_is_reported_and_changes_nothing():
    model = Exact()
    amp.initialize(model, optim.SGD(model.parameters(), lr=1.0), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        model.load_state_dict({"weight": torch.ones(1)})
    with pytest.raises(RuntimeError, match="weight has a float32 master, which assign=True"):
        model.load_state_dict({"weight": torch.ones(2)}, assign=True)
    assert model.state_dict()["weight"].tolist() == [1.0, 2.0]


def test_masters_follow_whoever_writes_into_the_model():
    """An average of weights, for example, may be put in and taken out again for an evaluation."""
    model = Exact((1 + 2.0**-20, 2.0))
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([1.0, 8.0]))
    assert model.state_dict()["weight"].tolist() == [1 + 2.0**-20, 8.0]
    loss = model(torch.tensor([1.0, 1.0]))
    with amp.scale_loss(loss / 2.0**12, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert master_of(model.weight).weight.tolist()[1] == 8 - 2.0**-12


def test_loss_scales_are_checked_against_num_losses():
    amp.initialize(Exact(), opt_level="O2", num_losses=2, verbosity=0)
    state = amp.state_dict()
    assert state == {
        "loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 2.0**16, "unskipped": 0},
    }
    del state["loss_scaler1"]
    with pytest.raises(RuntimeError, match="expected loss_scaler0, loss_scaler1"):
        amp.load_state_dict(state)
