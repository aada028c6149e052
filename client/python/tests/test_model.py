"""Tests which parameters of a module are served, under which names, and on which devices."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from thalweg import _C
from thalweg._attach import _model


@pytest.fixture(autouse=True)
def given_reducer(monkeypatch):
    """A reducer is the list of its parameters here."""
    monkeypatch.setattr(_C, "reducer_parameters", lambda reducer: reducer)


def wrapped(module):
    """Returns the part of a DistributedDataParallel that is read, as if it were built now."""
    reducer = [p for p in module.parameters() if p.requires_grad]
    return SimpleNamespace(module=module, reducer=reducer)


def names_of(ddp_model):
    return [name for name, _ in _model.parameters(ddp_model)]


def test_parameters_that_are_frozen_after_wrapping_stay_served_and_frozen_before_are_not():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    ddp_model = wrapped(module)
    module[1].requires_grad_(False)
    module[0].requires_grad_(True)
    assert names_of(ddp_model) == ["1.weight", "1.bias", "2.weight", "2.bias"]


def test_parameter_that_was_replaced_after_wrapping_has_a_name_of_its_own():
    module = nn.Linear(2, 2)
    ddp_model = wrapped(module)
    module.weight = nn.Parameter(torch.zeros(3, 2))
    assert names_of(ddp_model) == ["(parameter 0, replaced)", "bias"]


def test_names_are_those_of_the_module_that_is_compiled_or_checkpointed():
    inner = nn.Linear(2, 2)
    compiled = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"head": inner})})
    checkpointed = nn.ModuleDict({"head": nn.ModuleDict({"_checkpoint_wrapped_module": inner})})
    for module in (compiled, checkpointed):
        assert names_of(wrapped(module)) == ["head.weight", "head.bias"]


def test_parameters_that_torch_averages_by_itself_are_known_by_name():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own = [module[1].bias]
    assert _model.delayed(SimpleNamespace(module=module, _delay_all_reduce_params=own)) == [
        "1.bias"
    ]


def module_that(**options):
    """Returns what is read of a module that can be served, but for these options."""
    usual = {
        "_delay_all_reduce_all_params": False,
        "_use_python_reducer": False,
        "mixed_precision": None,
        "_get_ddp_logging_data": dict,
        "find_unused_parameters": False,
        "static_graph": False,
    }
    return SimpleNamespace(**vars(wrapped(nn.Linear(2, 2))) | usual | options)


@pytest.mark.parametrize(
    ("min_nodes", "options"),
    [
        (0, {"find_unused_parameters": True}),
        (1, {}),
        (1, {"find_unused_parameters": True, "static_graph": True}),
    ],
)
def test_module_whose_backward_needs_no_process_group_may_lose_nodes(min_nodes, options):
    assert _model.why_not(module_that(**options), min_nodes) == ""


def test_module_that_shares_in_each_backward_what_it_used_cannot_lose_nodes():
    reason = _model.why_not(module_that(find_unused_parameters=True), 1)
    assert "(THALWEG_MIN_NODES), but with find_unused_parameters=True torch sums" in reason
    assert "build DistributedDataParallel without it" in reason


def module_on(*devices):
    named = [
        (f"p{index}", SimpleNamespace(device=torch.device(device)))
        for index, device in enumerate(devices)
    ]
    module = SimpleNamespace(named_parameters=lambda: iter(named))
    return SimpleNamespace(module=module, reducer=[parameter for _, parameter in named])


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
