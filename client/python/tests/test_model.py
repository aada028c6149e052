"""Tests on which devices a module's parameters may be."""

from types import SimpleNamespace

import pytest
import torch

from thalweg import _C, _model


def module_on(*devices):
    """Returns the part of a DistributedDataParallel that is read."""
    named = [
        (f"p{index}", SimpleNamespace(device=torch.device(device), requires_grad=True))
        for index, device in enumerate(devices)
    ]
    module = SimpleNamespace(named_parameters=lambda: iter(named))
    return SimpleNamespace(parameters_to_ignore=set(), module=module)


@pytest.mark.parametrize(
    ("devices", "number"), [(["cpu", "cpu"], None), (["cuda:1", "cuda:1"], 1), ([], None)]
)
def test_one_device_is_served(devices, number, monkeypatch):
    monkeypatch.setattr(_C, "cuda_problem", lambda _: "")
    assert _model._why_not_there(module_on(*devices)) == ""
    assert _model.cuda_device(module_on(*devices)) == number


@pytest.mark.parametrize("devices", [["cpu", "cuda:0"], ["cuda:0", "cuda:1"]])
def test_parameters_on_two_devices_are_refused_naming_both(devices):
    reason = _model._why_not_there(module_on(*devices))
    assert f"{devices[0]} (p0) and {devices[1]} (p1), expected one device" in reason


def test_gpu_that_cannot_be_used_is_refused_naming_it():
    assert "cuda:99 cannot be used" in _model._why_not_there(module_on("cuda:99"))


def test_other_devices_are_refused():
    reason = _model._why_not_there(module_on("meta"))
    assert reason == "p0 is on meta, expected the CPU or a CUDA device"
