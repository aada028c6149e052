"""Modules that leave their gradients to others, whatever their scripts do."""

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg._activation import _left_alone

pytestmark = pytest.mark.usefixtures("lone_group")


@pytest.fixture
def left():
    """A module that has been left alone, and what its listener has heard."""
    module, heard = DistributedDataParallel(nn.Linear(3, 2)), []
    _left_alone.leave(module, heard.append)
    return module, heard


def test_script_cannot_switch_averaging_on_again_and_listeners_hear_of_it(left):
    module, heard = left
    for wanted in (False, True):
        module.require_backward_grad_sync = wanted
        assert not module.require_backward_grad_sync
        assert heard[-1] is wanted
        assert isinstance(module, DistributedDataParallel)


def test_switch_that_is_put_back_is_what_the_script_had_set(left):
    module, heard = left
    with module.no_sync(), contextlib.suppress(RuntimeError):
        before = module.require_backward_grad_sync
        module.require_backward_grad_sync = True
        module.require_backward_grad_sync = before
        raise RuntimeError
    assert heard == [False, True, False, True]
    assert not module.require_backward_grad_sync


@pytest.mark.parametrize("wanted", [False, True])
def test_copies_and_loaded_modules_average_as_the_script_has_set_it(left, wanted):
    module, _ = left
    module.require_backward_grad_sync = wanted
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for one in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert type(one) is DistributedDataParallel
        assert one.require_backward_grad_sync is wanted
        assert vars(one).keys() == vars(DistributedDataParallel(nn.Linear(3, 2))).keys()


def test_compiled_functions_use_the_module(left):
    module, _ = left
    compiled = torch.compile(lambda x: module(x).sum(), backend="eager")
    for wanted in (True, False, True):
        module.require_backward_grad_sync = wanted
        compiled(torch.ones(1, 3)).backward()
    torch.testing.assert_close(module.module.weight.grad, torch.full((2, 3), 3.0))
