"""Tests that switches for scripts pass by the optimizers that Thalweg makes for itself."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from thalweg._activation import _first_steps
from thalweg.cli import _profile_update
from thalweg.ps._kept import KeptWeights
from thalweg.ps._plan import Outer


class Nobody:
    """A mean of nothing."""

    def begin(self, values, *, factor, whole):
        pass

    def wait(self):
        return torch.zeros(3)


@pytest.fixture
def looked_at(monkeypatch):
    """Returns the optimizers of a job of two workers that a switch has looked at."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    seen = []
    hook = _first_steps.after_each(lambda optimizer: seen.append(type(optimizer).__name__))
    yield seen
    hook.remove()


def test_outer_optimizer_and_trials_of_a_profile_are_not_looked_at(looked_at):
    kept = KeptWeights(Nobody(), Outer.of({"name": "sgd", "lr": 1.0}, [torch.zeros(3)]), 3)
    kept.push(torch.zeros(3), 0, 0.0).wait()
    scripts = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    assert _profile_update.fused_seconds(scripts) > 0
    assert looked_at == []
    for _ in range(2):
        scripts.step()
    assert looked_at == ["SGD"]


def test_single_worker_has_nobody_to_exchange_with_and_is_not_looked_at(looked_at, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1).step()
    assert looked_at == []


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_step_that_only_makes_the_state_to_be_loaded_is_not_the_first(looked_at, rate):
    net = torch.nn.Linear(3, 2)
    scripts = torch.optim.AdamW(net.parameters(), lr=rate)
    get_optimizer_state_dict(net, scripts)
    assert scripts.state
    assert looked_at == []
    net(torch.ones(1, 3)).sum().backward()
    scripts.param_groups[0]["lr"] = 0.0  # as warming up begins
    scripts.step()
    assert looked_at == ["AdamW"]


def test_optimizer_that_cannot_be_judged_yet_is_looked_at_again(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    answers, left = [], [False, True]

    def look(optimizer):
        answers.append(left.pop(0))
        return answers[-1]

    hook = _first_steps.before_each(look)
    scripts = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    for _ in range(3):
        scripts.step()
    hook.remove()
    assert answers == [False, True]
