"""Which module an optimizer belongs to, where a script has wrapped its parameters several times."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg._activation import _served
from thalweg._torch import _patches

pytestmark = pytest.mark.usefixtures("lone_group")


@pytest.fixture
def noted(monkeypatch):
    """Modules that are built from now on are known."""
    monkeypatch.setattr(_served, "_modules", type(_served._modules)())
    _served.note_modules()
    yield
    _patches.uninstall("served")


def trained(*modules):
    for module in modules:
        module(torch.ones(1, 3))


def test_optimizer_belongs_to_the_latest_module_with_its_parameters_that_has_run(noted):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = [DistributedDataParallel(net) for _ in range(20)]
    assert _served.module_of(optimizer) is kept[-1]
    trained(*kept[:-5])
    assert _served.module_of(optimizer) is kept[-6]


def test_optimizer_belongs_to_a_module_with_all_that_it_trains_rather_than_to_a_later_one(noted):
    part = nn.Linear(3, 3)
    net = nn.Sequential(part, nn.Linear(3, 3))
    whole, later = DistributedDataParallel(net), DistributedDataParallel(part)
    trained(whole, later)
    assert _served.module_of(torch.optim.SGD(net.parameters(), lr=0.1)) is whole
    net[1].requires_grad_(False)
    assert _served.module_of(torch.optim.SGD(net.parameters(), lr=0.1)) is later
    assert _served.module_of(torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)) is None
