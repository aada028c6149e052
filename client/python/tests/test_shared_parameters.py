"""Tests which module goes on from what, where modules share parameters."""

import gc

import pytest
from test_resuming import RIDING, Stand, Wrapped
from torch import nn, optim

from thalweg._attach import _jobs, _loaded, _resuming


class Attached:
    """Is an attached module of these parts, whose codec has seen as many rounds as it says."""

    def __init__(self, *parts, rounds=0):
        self.wrapped = Wrapped(nn.ModuleList(parts))
        self.state = Stand(RIDING | {"shared": bytes([rounds])})
        _jobs.begin(self.wrapped, self.state)

    def take(self):
        """Returns how many rounds it goes on after, in its first step; None: it begins anew."""
        job = _jobs.job_of(self.wrapped, self.state)
        found = _loaded.take(job.parameters, _jobs.number_of(job))
        self.state.has_trained = True
        return None if found is None else found["shared"][0]


def layers(number):
    return [nn.Linear(2, 2) for _ in range(number)]


def optimizer_of(*parts):
    return optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)


def rounds_in(optimizer):
    return [one["shared"][0] for one in optimizer.state_dict()["thalweg"]]


@pytest.fixture(autouse=True)
def installed():
    _resuming.install()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_actor_and_critic_each_go_on_from_their_own(order):
    parts = encoder, actor, critic = layers(3)
    optimizer = optimizer_of(*parts)
    before = [Attached(encoder, actor, rounds=6), Attached(encoder, critic, rounds=2)]
    saved = optimizer.state_dict()
    assert [one["parameters"] for one in saved["thalweg"]] == [[0, 1, 2, 3], [0, 1, 4, 5]]
    del before
    after = [Attached(encoder, actor), Attached(encoder, critic)]
    optimizer.load_state_dict(saved)
    assert rounds_in(optimizer) == [6, 2]  # as they were loaded
    for one in order:
        assert after[one].take() == (6, 2)[one]
    assert rounds_in(optimizer) == [0, 0]


def test_modules_of_the_same_parameters_go_on_in_the_order_in_which_they_were_attached():
    [model] = layers(1)
    optimizer = optimizer_of(model)
    before = [Attached(model, rounds=rounds) for rounds in (1, 2, 3)]
    saved = optimizer.state_dict()
    del before
    after = [Attached(model) for _ in range(3)]
    optimizer.load_state_dict(saved)
    assert [after[one].take() for one in (1, 0, 2)] == [2, 1, 3]


def test_optimizers_of_a_module_s_parts_have_all_what_it_goes_on_from():
    encoder, actor, critic = layers(3)
    optimizers = [optimizer_of(encoder, actor), optimizer_of(critic)]
    before = [Attached(encoder, actor, rounds=6), Attached(encoder, critic, rounds=2)]
    saved = [optimizer.state_dict() for optimizer in optimizers]
    del before
    after = [Attached(encoder, actor), Attached(encoder, critic)]
    for optimizer, one in zip(optimizers, saved, strict=True):
        optimizer.load_state_dict(one)
    assert [one.take() for one in after] == [6, 2]
    assert not any(_loaded.loaded_for(p) for one in after for p in one.wrapped.parameters())


def test_module_goes_on_that_is_unfrozen_in_part_and_no_other_takes_what_is_its_own():
    encoder, actor, critic = parts = layers(3)
    optimizer = optimizer_of(*parts)
    before = [Attached(actor, rounds=6)]
    saved = optimizer.state_dict()
    del before
    after = [Attached(encoder, critic), Attached(encoder, actor)]
    optimizer.load_state_dict(saved)
    assert [one.take() for one in after] == [None, 6]


def test_later_checkpoint_replaces_what_was_loaded_before():
    [model] = layers(1)
    optimizer = optimizer_of(model)
    attached = Attached(model)
    for rounds in (3, 5):
        riding = RIDING | {"shared": bytes([rounds]), "parameters": [0, 1]}
        optimizer.load_state_dict(optimizer.state_dict() | {"thalweg": [riding]})
    assert attached.take() == 5
    assert not any(map(_loaded.loaded_for, model.parameters()))


@pytest.mark.parametrize("is_closed", [True, False])
def test_module_that_is_wrapped_anew_takes_the_place_of_the_earlier_one(is_closed, caplog):
    _resuming._say_that_it_has_ended.cache_clear()
    [model] = layers(1)
    optimizer = optimizer_of(model)
    earlier = Attached(model, rounds=6)
    earlier.state.closed = is_closed
    later, state = Wrapped(earlier.wrapped.module), Stand(None)
    state.rides = False  # its codec is fp16
    _jobs.begin(later, state)
    assert "thalweg" not in optimizer.state_dict()
    assert not caplog.text


def test_what_is_kept_for_parameters_that_are_gone_is_forgotten():
    before = len(_jobs._jobs), len(_loaded._loaded)
    [model] = layers(1)
    optimizer = optimizer_of(model)
    attached = Attached(model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(_loaded._loaded) == before[1] + 2
    del model, optimizer, attached
    gc.collect()
    assert (len(_jobs._jobs), len(_loaded._loaded)) <= before
