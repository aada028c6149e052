"""Tests what sessions are told of loss scalers, that torch's scalers are unchanged, and no
waits.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from thalweg import amp
from thalweg._torch import _precision

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
# Each step's gradient is multiplied by one of these.
GRADIENTS = [1.0, float("inf"), float("nan"), 1.0, 1.0, 1.0, float("inf"), 1.0]


class Listener:
    """Replaces a session, and adds up as one does."""

    def __init__(self):
        self.heard = []

    def note_precision(self, loss_scale, skipped_steps):
        self.heard.append((loss_scale, skipped_steps))

    @property
    def scale(self):
        return self.heard[-1][0]

    @property
    def skipped(self):
        return sum(skipped for _, skipped in self.heard)


@pytest.fixture(autouse=True)
def no_sessions():
    _precision._sessions.clear()
    _precision._follow(None)
    yield
    left_over = (_precision._sessions, _precision._scales, _precision._at_work)
    for left in (*left_over, _precision._on_the_way):
        left.clear()


@pytest.fixture
def listener():
    result = Listener()
    _precision.watch(result)
    assert result.heard == [(1.0, 0)]  # gradients carry no scale that is known
    result.heard.clear()
    return result


class Training:
    """A linear model under a GradScaler, and the observed effect of each step."""

    def __init__(self, *, device="cpu", **settings):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1, device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = GradScaler(device, **{"init_scale": 64.0, "growth_interval": 3} | settings)
        self.steps = 0
        self.optimizer.register_step_post_hook(self.count)

    def count(self, *_):
        self.steps += 1

    def step(self, gradient):
        self.optimizer.zero_grad()
        x = torch.ones(2, 3, device=self.model.weight.device)
        self.scaler.scale(self.model(x).sum() * gradient).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def outcome(self):
        weights = {name: value.tolist() for name, value in self.model.state_dict().items()}
        return weights | self.scaler.state_dict()


def test_session_hears_what_gradscaler_decides(listener):
    training = Training()
    for number, gradient in enumerate(GRADIENTS, 1):
        training.step(gradient)
        assert listener.scale == training.scaler.get_scale()
        assert listener.skipped == number - training.steps
    assert listener.skipped == 3
    assert training.scaler.get_scale() == 64 / 4 * 2 / 2


def test_gradscaler_does_the_same_with_a_session_and_without():
    alone = Training()
    for gradient in GRADIENTS:
        alone.step(gradient)
    listener = Listener()
    _precision.watch(listener)
    watched = Training()
    for gradient in GRADIENTS:
        watched.step(gradient)
    assert type(watched.scaler) is GradScaler
    assert vars(watched.scaler).keys() == vars(alone.scaler).keys()
    assert watched.outcome() == alone.outcome()
    assert copy.deepcopy(watched.scaler).state_dict() == alone.scaler.state_dict()


def test_nothing_is_looked_at_without_a_session(monkeypatch, listener):
    _precision._sessions.clear()
    monkeypatch.setattr(_precision, "_look", None)
    monkeypatch.setattr(_precision, "_pass_on", None)
    Training().step(1.0)
    amp.LossScaler().update_scale()
    assert listener.heard == []


def test_session_that_is_gone_is_not_told(listener):
    _precision.watch(Listener())
    Training().step(1.0)
    assert len(_precision._sessions) == 1


def test_scale_that_the_script_sets_is_no_skipped_step(listener):
    training = Training()
    training.step(1.0)
    training.scaler.update(new_scale=4.0)
    assert (listener.scale, listener.skipped) == (4.0, 0)
    training.scaler.load_state_dict(training.scaler.state_dict() | {"scale": 2.0})
    training.step(1.0)
    assert (listener.scale, listener.skipped) == (2.0, 0)


def test_one_overflow_in_two_optimizers_is_one_skipped_step(listener):
    training = Training()
    other = nn.Linear(3, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    loss = training.model(torch.ones(1, 3)).sum() + other(torch.ones(1, 3)).sum() * float("inf")
    training.scaler.scale(loss).backward()
    training.scaler.step(training.optimizer)
    training.scaler.step(second)
    training.scaler.update()
    assert (listener.scale, listener.skipped, training.steps) == (32.0, 1, 1)


def test_update_that_fails_says_nothing_and_leaves_the_next_one_to_be_seen(listener):
    training = Training()
    training.scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match="No inf checks"):
        training.scaler.update()
    assert listener.heard == [(64.0, 0)]
    training.step(float("inf"))
    assert listener.heard == [(64.0, 0), (32.0, 1)]


def test_disabled_gradscaler_has_no_scale(listener):
    Training(enabled=False).step(1.0)
    assert listener.heard == []


def test_scale_of_the_scaler_at_work_is_told_and_the_smallest_is_shown(listener):
    large, small = Training(init_scale=1024.0), Training(init_scale=8.0)
    for training in (large, small, large):
        training.step(1.0)
    assert [scale for scale, _ in listener.heard] == [1024.0, 8.0, 1024.0]
    assert _precision.shown({"loss_scale": 1024.0}) == {"loss_scale": 8.0}
    del training, small
    gc.collect()  # optimizer and hook refer to each other
    large.step(1.0)
    assert listener.heard[3:] == [(2048.0, 0)]  # after its third clean step
    assert _precision.shown({"loss_scale": 1024.0}) == {"loss_scale": 2048.0}


def test_no_scale_is_shown_where_none_is_known(listener):
    assert _precision.shown({"loss_scale": 1.0}) == {"loss_scale": 0.0}


def test_every_session_hears_of_a_scaler(listener):
    second = Listener()
    _precision.watch(second)
    Training().step(float("inf"))
    assert [(1.0, 0), *listener.heard] == second.heard == [(1.0, 0), (64.0, 0), (32.0, 1)]


def test_scale_is_known_before_gradients_carry_it(listener):
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    assert listener.heard == [(64.0, 0)]
    scaler.scale(torch.ones(1))
    assert len(listener.heard) == 1
    scaler.load_state_dict(scaler.state_dict() | {"scale": 16.0})
    assert listener.scale == 16.0
    later = Listener()
    _precision.watch(later)
    assert later.heard == [(1.0, 0)]
    scaler.scale(torch.ones(1))
    assert later.heard[1:] == [(16.0, 0)]
    assert len(listener.heard) == 2


def test_gradients_carry_a_scale_from_a_loss_to_the_update_alone(listener):
    training = Training(init_scale=8.0)
    training.scaler.load_state_dict(training.scaler.state_dict())
    assert _precision.carried() == 1.0
    training.scaler.scale(training.model(torch.ones(1, 3)).sum())
    assert _precision.carried() == 8.0
    other = Training(init_scale=4.0)
    other.step(1.0)
    assert _precision.carried() == 8.0
    training.step(1.0)
    assert _precision.carried() == 1.0
    training.scaler.scale(torch.ones(1))
    del training
    gc.collect()
    assert _precision.carried() == 1.0


def test_gradients_carry_the_scale_of_amp_while_its_loss_is_in_use(listener):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    assert _precision.carried() == 1.0
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
        assert _precision.carried() == 128.0
        scaled.backward()
    assert _precision.carried() == 1.0


def test_scale_of_amp_is_known_before_gradients_carry_it(listener):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
        assert listener.heard == [(128.0, 0)]
        scaled.backward()
    first = amp.fp16_utils.DynamicLossScaler(init_scale=64.0)
    first.backward(torch.ones(1, requires_grad=True).sum())
    assert listener.scale == 64.0


@pytest.mark.parametrize("watched_first", [True, False])
def test_scale_is_the_clamped_one_of_a_decoration(watched_first):
    """Runs in its own process: the order of the two cannot be undone."""
    lines = [
        "_precision.watch(listener)",
        "torch.cuda.amp.aiak_amp_decorate(t.model, t.optimizer, min_loss_scale=60.0)",
    ]
    script = "\n".join(
        [
            "import torch, thalweg.compat",
            "from thalweg._torch import _precision",
            "from test_precision import Listener, Training",
            "listener, t = Listener(), Training()",
            *(lines if watched_first else reversed(lines)),
            "t.scaler.load_state_dict(t.scaler.state_dict())",
            "t.step(float('inf')); t.step(float('inf')); t.step(1.0)",
            "print(listener.heard, t.scaler.get_scale())",
        ]
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert ran.stdout == "[(1.0, 0), (64.0, 0), (60.0, 1), (60.0, 1)] 60.0\n", ran.stderr


def carry(scaler, scale):
    """Scales a loss in the scaler's name."""
    _precision.carry(torch.ones(1, requires_grad=True) * scale, scaler, scale)


def overflow(scaler):
    scaler.found_inf(torch.device("cpu")).fill_(1.0)
    return scaler.update_scale()


def test_session_hears_what_the_scalers_of_amp_decide(listener):
    scaler = amp.LossScaler(init_scale=64.0, scale_window=2)
    carry(scaler, 64.0)
    decisions = [scaler.update_scale(), overflow(scaler), scaler.update_scale()]
    decisions += [scaler.update_scale()]
    assert decisions == [False, True, False, False]
    assert listener.heard == [(64.0, 0), (32.0, 1), (64.0, 0)]


def test_session_hears_of_static_scales_but_not_of_none(listener):
    amp.LossScaler(1.0).update_scale()
    amp.fp16_utils.LossScaler(1.0).update_scale(False)
    assert listener.heard == []
    static = amp.LossScaler(128.0)
    carry(static, 128.0)
    static.update_scale()
    assert listener.heard == [(128.0, 0)]
    first = amp.fp16_utils.LossScaler(64.0)
    first.backward(torch.ones(1, requires_grad=True).sum())
    first.update_scale(True)  # it does not look at this one
    assert listener.heard[1:] == [(64.0, 0)]


def test_session_hears_what_the_dynamic_scaler_of_fp16_utils_decides(listener):
    scaler = amp.fp16_utils.DynamicLossScaler(init_scale=64.0)
    scaler.update_scale(True)  # by itself it says nothing of gradients to come
    scaler.backward(torch.ones(1, requires_grad=True).sum())
    scaler.update_scale(True)
    assert listener.heard == [(1.0, 1), (32.0, 0), (16.0, 1)]


class Copies:
    """A device whose copies arrive when the test lets them."""

    def __init__(self, monkeypatch):
        self.arrived = 0
        self.made = 0
        monkeypatch.setattr(_precision, "_look", self.look)

    def look(self, scaler, values):
        self.made += 1
        number = self.made
        decision = _precision._Decision(scaler, torch.stack(values), lambda: number <= self.arrived)
        _precision._on_the_way.append(decision)
        _precision.settle()


def test_what_has_not_arrived_is_told_later_and_together(monkeypatch, listener):
    copies = Copies(monkeypatch)
    training = Training()
    for gradient in GRADIENTS[:3]:
        training.step(gradient)
    assert listener.heard == [(64.0, 0)]  # which the host has chosen
    copies.arrived = 3
    training.step(1.0)  # its own copy is still in flight
    assert listener.heard[1:] == [(16.0, 2)]
    _precision.settle()
    assert len(listener.heard) == 2
    training.step(float("inf"))
    copies.arrived = 5
    _precision.settle()
    assert listener.heard[2:] == [(8.0, 1)]


@needs_gpu
def test_no_step_waits_for_the_gpu(listener):
    training = Training(device="cuda")
    training.step(1.0)
    torch.cuda.synchronize()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=True)  # does not wait
    training.optimizer = optimizer
    torch.cuda.set_sync_debug_mode("error")
    try:
        for gradient in GRADIENTS:
            training.step(gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    _precision.settle()
    assert listener.scale == training.scaler.get_scale()
    assert listener.skipped == 3


def test_no_event_is_asked_while_a_cuda_graph_is_made(listener, monkeypatch):
    class Event:
        def query(self):
            assert not capturing, "operation not permitted when stream is capturing"
            return True

    scaler = GradScaler("cpu", init_scale=4.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    values = torch.tensor([2.0, 1.0])
    arrived = lambda: _precision._has_arrived(Event())  # noqa: E731
    _precision._on_the_way.append(_precision._Decision(scaler, values, arrived))
    capturing = True
    _precision.settle()
    assert listener.heard == []
    capturing = False
    _precision.settle()
    assert listener.skipped == 1
