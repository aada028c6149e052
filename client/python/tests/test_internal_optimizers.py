"""Tests that switches for scripts pass by the optimizers that Thalweg makes for itself."""

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from thalweg._activation import _local_updates, _served
from thalweg.cli import _profile_update
from thalweg.ps._kept import KeptWeights
from thalweg.ps._plan import Outer


class Nobody:
    """A mean of nothing."""

    def begin(self, values):
        pass

    def wait(self):
        return torch.zeros(3)


@pytest.fixture
def looked_at(monkeypatch):
    """Returns the optimizers of a job of two workers that the switches have looked at."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setenv("THALWEG_PS_MODE", "local")
    monkeypatch.setenv("THALWEG_PS_EVERY", "10")
    seen = []
    monkeypatch.setattr(_local_updates, "_seen", Noted(seen))
    monkeypatch.setattr(_served, "_seen", Noted(seen))
    hook = register_optimizer_step_post_hook(_local_updates._look)
    yield seen
    hook.remove()


class Noted(list):
    def __init__(self, seen):
        super().__init__()
        self._seen = seen

    def add(self, optimizer):
        self._seen.append(type(optimizer).__name__)


def test_outer_optimizer_and_trials_of_a_profile_are_not_looked_at(looked_at):
    kept = KeptWeights(Nobody(), Outer.of({"name": "sgd", "lr": 1.0}, [torch.zeros(3)]), 3)
    kept.push(torch.zeros(3), 0, 0.0).wait()
    scripts = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    assert _profile_update.fused_seconds(scripts) > 0
    assert looked_at == []
    scripts.step()
    assert looked_at == ["SGD"]
