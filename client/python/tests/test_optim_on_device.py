"""The optimizers' way for GPUs, by kernels that the CPU emulates.

What is promised of the optimizers beyond their arithmetic is tested again on it: the tests are
those of the modules that are imported.
"""

import importlib.machinery
import importlib.util
from pathlib import Path

import optim_cases
import pytest
import test_amp_gradients
import test_lamb
import test_optim_clip
import test_optim_contract
import test_optim_first_steps
import test_optim_refusals
import test_optim_state
import torch
from test_amp_gradients import *  # noqa: F403
from test_lamb import *  # noqa: F403
from test_optim_clip import *  # noqa: F403
from test_optim_contract import *  # noqa: F403
from test_optim_first_steps import *  # noqa: F403
from test_optim_refusals import *  # noqa: F403
from test_optim_state import *  # noqa: F403

from thalweg import _C
from thalweg.optim import FusedSGD, _plan, _steps

pytestmark = pytest.mark.numeric

MODULES = (
    test_amp_gradients,
    test_lamb,
    test_optim_clip,
    test_optim_contract,
    test_optim_first_steps,
    test_optim_refusals,
    test_optim_state,
)
BUILD = Path(__file__).parents[3] / "build" / "release" / "client" / "torch"
NAME = "thalweg_emulated_optim"

REAL = {"on_device": _plan.on_device, "tensors_type": _plan.tensors_type}


@pytest.fixture(scope="module")
def emulated():
    path = BUILD / (NAME + importlib.machinery.EXTENSION_SUFFIXES[0])
    if not path.exists():
        pytest.skip(f"no {path.name}: this build has no tests")
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FusedDeviceTensors


@pytest.fixture(autouse=True)
def on_emulated_device(monkeypatch, emulated):
    """Makes every optimizer of a test take the way of those on a GPU."""
    for module in (_plan, _steps):
        monkeypatch.setattr(module, "on_device", lambda _: True)
    monkeypatch.setattr(_plan, "tensors_type", lambda _: emulated)


def test_no_test_hides_another_of_the_same_name():
    names = [name for m in MODULES for name in vars(m) if name.startswith("test_")]
    assert len(names) == len(set(names)) > 50


@pytest.mark.parametrize("dtype", optim_cases.DTYPES)
@pytest.mark.parametrize(("kind", "options"), optim_cases.CASES)
def test_device_and_cpu_have_the_same_bits(kind, options, dtype, monkeypatch):
    params = optim_cases.make_params(dtype)
    emulated_bits = optim_cases.train_with_skips(params, kind, options, "cpu")
    leave_the_device(monkeypatch)
    expected = optim_cases.train_with_skips(params, kind, options, "cpu")
    assert len(emulated_bits) == len(expected) >= len(params)
    for ours, theirs in zip(emulated_bits, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("kind", "options"), optim_cases.CASES)
def test_mixed_precision_has_the_bits_of_the_cpu(kind, options, monkeypatch):
    emulated_bits = optim_cases.train_mixed(kind, options, "cpu")
    leave_the_device(monkeypatch)
    expected = optim_cases.train_mixed(kind, options, "cpu")
    assert len(emulated_bits) == len(expected)
    for ours, theirs in zip(emulated_bits, expected, strict=True):
        assert torch.equal(ours, theirs)


def leave_the_device(monkeypatch):
    """Makes optimizers take the way of those on the CPU again."""
    for name, real in REAL.items():
        monkeypatch.setattr(_plan, name, real)
    monkeypatch.setattr(_steps, "on_device", _plan.on_device)


def test_clipping_without_the_norm_of_all_gradients_is_refused(emulated):
    from thalweg._C import LambSettings

    param, first, second = (torch.ones(3) for _ in range(3))
    param.grad = torch.ones(3)
    tensors = emulated([param], [[first], [second]], [torch.zeros(())], [])
    settings = LambSettings(
        lr=0.1,
        weight_decay=0.0,
        maximize=False,
        betas=(0.9, 0.999),
        eps=1e-8,
        decoupled=True,
        bias_correction=True,
        max_grad_norm=1.0,
        grad_averaging=True,
        trust_ratio=False,
    )
    with pytest.raises(ValueError, match="expected grad_squares as well"):
        tensors.lamb(settings)


@pytest.mark.skipif(not hasattr(_C, "FusedDeviceTensors"), reason="the build has no CUDA kernels")
def test_gpu_without_kernels_leaves_the_step_to_torch(monkeypatch):
    monkeypatch.setattr(_plan, "tensors_type", REAL["tensors_type"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    [param] = test_optim_refusals.ones(1)
    assert not test_optim_refusals.run_torchs(torch.optim.SGD([param], lr=1.0))
    assert torch.equal(param, torch.zeros(3))
    with pytest.raises(_C.NotFusable, match=r"capability 7\.5, and there are kernels for 8\.0"):
        FusedSGD([param], lr=1.0).step()
