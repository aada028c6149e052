"""Tests what is called before the first gradients of a module are averaged."""

import copy
import io
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from thalweg._attach import _first_step

LOAD = """
import sys
sys.modules["thalweg"] = None  # it is not installed
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = torch.load(sys.argv[1], weights_only=False)
module(torch.ones(1, 2)).sum().backward()
"""

pytestmark = pytest.mark.usefixtures("lone_group")


@pytest.fixture
def module():
    return DistributedDataParallel(torch.nn.Linear(2, 2))


@pytest.fixture
def calls(module):
    """Is what the function is called with."""
    found = []
    _first_step.call(module, lambda module: found.append(type(module)))
    return found


def run(module):
    module(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("training", [True, False])
def test_first_gradient_that_is_averaged_makes_the_call(module, calls, training):
    module.train(training)
    before = set(vars(DistributedDataParallel(torch.nn.Linear(2, 2))))
    with torch.no_grad():
        module(torch.ones(1, 2))
    with module.no_sync():
        run(module)
    output = module(torch.ones(1, 2))
    assert calls == []
    output.sum().backward()
    assert calls == [DistributedDataParallel]
    run(module)
    assert len(calls) == 1
    assert not module._forward_pre_hooks
    assert not any(parameter._backward_hooks for parameter in module.parameters())
    assert set(vars(module)) == before


def test_worker_that_is_out_of_data_makes_the_call_in_place_of_a_backward_pass(module, calls):
    module._match_all_reduce_for_bwd_pass()  # as torch does inside join()
    assert calls == [DistributedDataParallel]
    run(module)
    assert len(calls) == 1


def test_parameter_that_is_unfrozen_after_a_forward_pass_makes_the_call(calls, module):
    module.module.weight.requires_grad_(False)
    module(torch.ones(1, 2))  # to look at the output, perhaps
    module.module.weight.requires_grad_(True)
    module.module.bias.requires_grad_(False)
    run(module)
    assert calls == [DistributedDataParallel]
    assert not any(parameter._backward_hooks for parameter in module.parameters())


def test_call_that_is_cancelled_leaves_nothing(module, calls):
    output = module(torch.ones(1, 2))
    for _ in range(2):
        _first_step.cancel(module)
    output.sum().backward()
    assert calls == []
    assert not module._forward_pre_hooks


def test_error_is_that_of_backward(module):
    def fail(_):
        raise ValueError("not all have loaded it")

    _first_step.call(module, fail)
    with pytest.raises(ValueError, match="not all have"):
        run(module)


def test_module_that_is_gone_leaves_no_hooks_on_its_parameters():
    module = DistributedDataParallel(torch.nn.Linear(2, 2))
    _first_step.call(module, lambda _: None)
    module(torch.ones(1, 2))
    inner, gone = module.module, weakref.ref(module)
    assert inner.weight._backward_hooks
    del module
    assert gone() is None
    assert not inner.weight._backward_hooks


def test_copy_makes_no_call_and_trains(module, calls):
    copied = copy.deepcopy(module)
    run(copied)
    with copied.join():
        run(copied)
    assert calls == []
    run(module)
    assert len(calls) == 1


def test_module_that_is_saved_whole_loads_without_thalweg(module, calls, tmp_path):
    module(torch.ones(1, 2))
    saved = io.BytesIO()
    torch.save(module, saved)
    assert b"thalweg" not in saved.getvalue()
    (tmp_path / "saved.pt").write_bytes(saved.getvalue())
    command = [sys.executable, "-c", LOAD, str(tmp_path / "saved.pt")]
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
