"""Tests what sessions take gradients to carry, by the loss whose backward pass computes them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from thalweg import amp
from thalweg._torch import _precision


class Session:
    """Replaces a session, and knows what it was told last."""

    scale = 0.0
    skipped = 0

    def note_precision(self, loss_scale, skipped_steps):
        self.scale = loss_scale
        self.skipped += skipped_steps


class Model(nn.Linear):
    """A model that takes down which scale its session knew when its gradient came."""

    def __init__(self, session):
        super().__init__(4, 1)
        self.known = []
        self.weight.register_hook(lambda _: self.known.append(session.scale))

    def loss(self):
        return self(torch.ones(2, 4)).square().mean()

    def heard(self):
        """Returns what it has taken down since the last call."""
        known, self.known = self.known, []
        return known


@pytest.fixture
def session():
    _precision._sessions.clear()
    _precision._follow(None)
    result = Session()
    _precision.watch(result)
    yield result
    for left in (_precision._sessions, _precision._scales, _precision._at_work):
        left.clear()


@pytest.fixture
def model(session):
    return Model(session)


@pytest.fixture
def other(session):
    return Model(session)


def scaler_of(model, scale, **settings):
    """Returns a scaler, and what its step does after a backward pass."""
    scaler = GradScaler("cpu", init_scale=scale, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def finish():
        scaler.step(optimizer)
        scaler.update()

    return scaler, finish


def test_session_that_is_new_takes_gradients_for_unscaled(session, model):
    assert session.scale == 1.0
    model.loss().backward()
    assert model.heard() == [1.0]


def test_scaler_may_come_late_and_go(session, model):
    model.loss().backward()
    scaler, finish = scaler_of(model, 65536.0)
    scaler.scale(model.loss()).backward()
    finish()
    model.loss().backward()
    scaler.scale(model.loss()).backward()
    finish()
    GradScaler("cpu", enabled=False).scale(model.loss()).backward()
    assert model.heard() == [1.0, 65536.0, 1.0, 65536.0, 1.0]


def test_model_without_a_scaler_is_not_scaled_by_that_of_another(session, model, other):
    scaler, finish = scaler_of(other, 1024.0)
    for _ in range(2):
        model.loss().backward()
        scaler.scale(other.loss()).backward()
        model.loss().backward()  # before the step of the other
        finish()
        scaler.update(65536.0)
    assert model.heard() == [1.0] * 4
    assert other.heard() == [1024.0, 65536.0]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_each_model_has_its_own_scalers_scale(session, model, other, one_by_one):
    scaler, finish = scaler_of(model, 65536.0)
    its, finish_its = scaler_of(other, 16.0)
    for _ in range(2):
        first = scaler.scale(model.loss())
        if one_by_one:
            first.backward()
            its.scale(other.loss()).backward()
        else:  # both losses are scaled before a backward pass
            second = its.scale(other.loss())
            first.backward()
            second.backward()
        finish()
        finish_its()
    assert model.heard() == [65536.0] * 2
    assert other.heard() == [16.0] * 2


def test_models_that_a_pass_reaches_have_the_scale_of_its_loss(session, model, other):
    scaler, _ = scaler_of(model, 65536.0)
    its, _ = scaler_of(other, 16.0)
    its.scale(other.loss())
    scaler.scale(model.loss() + other.loss()).backward()
    assert model.heard() == other.heard() == [65536.0]


def test_scaler_that_is_collected_changes_nothing_for_others(session, model, other):
    scaler, finish = scaler_of(model, 65536.0)
    its, finish_its = scaler_of(other, 16.0)
    its.scale(other.loss()).backward()
    finish_its()
    scaler.scale(model.loss()).backward()
    finish()
    del its, finish_its
    gc.collect()
    scaler.scale(model.loss()).backward()
    assert model.heard() == [65536.0] * 2


def test_session_of_another_module_in_mid_training_changes_nothing_for_others(
    session, model, other
):
    scaler, finish = scaler_of(model, 65536.0)
    its, finish_its = scaler_of(other, 16.0)
    third = Session()
    for added in (False, True):
        if added:
            _precision.watch(third)
            assert (third.scale, session.scale) == (1.0, 65536.0)
        its.scale(other.loss()).backward()
        finish_its()
        assert third.scale == (16.0 if added else 0.0)
        scaler.scale(model.loss()).backward()
        finish()
    assert model.heard() == [65536.0] * 2


def test_all_passes_of_an_accumulation_have_the_scale(session, model, other):
    scaler, finish = scaler_of(model, 64.0)
    for _ in range(3):
        (scaler.scale(model.loss()) / 3).backward()
        other.loss().backward()
    finish()
    assert model.heard() == [64.0] * 3
    assert other.heard() == [1.0] * 3


def test_scaled_losses_may_be_many_and_added(session, model):
    scaler, _ = scaler_of(model, 64.0)
    for kind in (list, tuple, iter):
        losses = scaler.scale(kind([model.loss(), model.loss()]))
        model.loss().backward()
        sum(losses).backward()
    torch.autograd.backward(scaler.scale([model.loss(), model.loss()]))
    torch.autograd.backward(tensors=scaler.scale(model.loss()))
    edge = torch.autograd.graph.get_gradient_edge(scaler.scale(model.loss()))
    model.loss().backward()
    torch.autograd.backward(edge)
    assert model.heard() == [1.0, 64.0] * 3 + [64.0] * 2 + [1.0, 64.0]


def test_skipped_step_halves_the_scale_of_the_next_pass_of_its_scaler(session, model, other):
    scaler, finish = scaler_of(model, 64.0)
    scaler.scale(model.loss() * torch.inf).backward()
    finish()
    assert (session.scale, session.skipped) == (32.0, 1)
    other.loss().backward()
    scaler.scale(model.loss()).backward()
    assert model.heard() == [64.0, 32.0]
    assert other.heard() == [1.0]


def test_update_after_another_models_pass_does_not_change_what_that_carried(session, model, other):
    scaler, finish = scaler_of(model, 64.0)
    scaler.scale(model.loss() * torch.inf).backward()
    other.loss().backward()
    finish()
    assert (session.scale, session.skipped) == (1.0, 1)


def test_scaler_that_is_older_than_the_session_is_known_at_its_next_loss(session, model):
    scaler, finish = scaler_of(model, 64.0)
    scaler.scale(model.loss()).backward()
    finish()
    for left in (_precision._sessions, _precision._scales):
        left.clear()
    _precision.watch(session)
    scaler.scale(model.loss()).backward()
    assert model.heard() == [64.0, 64.0]


def test_pass_within_a_pass_has_its_scale(session, model):
    scaler, _ = scaler_of(model, 64.0)
    x = torch.ones(2, 4, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=True).square().mean()
    scaler.scale(loss).backward()
    assert model.heard() == [64.0]


def test_pass_that_fails_leaves_nothing_to_the_next(session, model):
    scaler, _ = scaler_of(model, 64.0)

    def fail(_):
        raise ValueError("no gradient")

    out = model(torch.ones(2, 4))
    out.register_hook(fail)
    with pytest.raises(ValueError, match="no gradient"):
        scaler.scale(out.square().mean()).backward()
    model.loss().backward()
    assert model.heard() == [1.0]


def test_loss_that_a_script_multiplies_by_itself_counts_as_unscaled(session, model):
    (model.loss() * 128.0).backward()
    assert model.heard() == [1.0]


def test_scale_loss_of_amp_is_that_of_its_pass_alone(session, other):
    model = Model(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    try:
        with amp.scale_loss(model.loss(), optimizer) as scaled:
            other.loss().backward()
            scaled.backward()
        model.loss().backward()
    finally:
        amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert model.heard() == [128.0, 1.0]
    assert other.heard() == [1.0]


def test_patch_of_backward_stays_out_of_its_way_without_sessions(session, model, monkeypatch):
    _precision._sessions.clear()
    monkeypatch.setattr(_precision, "_follow", None)
    model.loss().backward()
    torch.autograd.backward(model.loss(), inputs=[model.weight])
    assert model.weight.grad is not None
