"""Tests the module `apex` that thalweg.compat.apex installs on request."""

import importlib.util
import logging
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from amp_models import script_environment
from torch import nn

import thalweg.compat.apex as shim
from thalweg import amp
from thalweg.compat import _apex_optimizers, _apex_parallel

SCRIPT = Path(__file__).parent / "scripts" / "apex_script.py"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    def remove():
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            del sys.modules[name]

    remove()
    yield
    remove()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_unchanged_script_trains_and_resumes(level, tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, level, tmp_path / "checkpoint"],
        env=script_environment() | {"THALWEG_COMPAT": "apex"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "trained" in result.stdout


@pytest.mark.parametrize("first", ["thalweg.amp", "thalweg.optim", "thalweg.compat.apex"])
def test_importing_a_part_before_torch_is_no_circle(first):
    result = subprocess.run(
        [sys.executable, "-c", f"import {first}, apex.amp, torch; torch.optim.LAMB"],
        env=script_environment() | {"THALWEG_COMPAT": "apex"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_apex_is_there_on_request_only():
    assert importlib.util.find_spec("apex") is None
    assert shim.install()
    assert shim.install()
    import apex
    from apex import fp16_utils, optimizers, parallel

    assert apex.amp.initialize is amp.initialize
    assert fp16_utils.FP16_Optimizer is amp.FP16_Optimizer
    assert optimizers.FusedLAMB is _apex_optimizers.FusedLAMB
    assert parallel.DistributedDataParallel is _apex_parallel.DistributedDataParallel


def test_other_apex_is_not_hidden_unless_asked(caplog):
    other = sys.modules["apex"] = types.ModuleType("apex")
    with caplog.at_level(logging.WARNING, "thalweg"):
        assert not shim.install()
    assert "apex is installed and stays what it is" in caplog.text
    assert sys.modules["apex"] is other
    assert shim.install(replace=True)
    assert sys.modules["apex"].amp.initialize is amp.initialize


def test_installed_apex_is_found_before_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "apex.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not shim.install()
    assert "apex" not in sys.modules


def test_state_is_where_scripts_of_apex_look_for_it():
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [2.0**16]


def test_fused_sgd_is_torchs():
    params = [nn.Parameter(torch.ones(2))]
    optimizer = _apex_optimizers.FusedSGD(params, 0.5, momentum=0.9, nesterov=True)
    params[0].grad = torch.ones(2)
    optimizer.step()
    # b = 1, and nesterov adds 0.9·b to the gradient.
    assert params[0].tolist() == pytest.approx([1 - 0.5 * 1.9] * 2)
    optimizer.zero_grad()
    assert params[0].grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gradient_average": False}, "gradient_average=False) is not supported: multiply"),
        ({"shared_param": True}, "shared_param) is not supported"),
        ({"retain_allreduce_buffers": True}, "retain_allreduce_buffers) is not supported"),
        ({"allreduce_communicators": []}, "allreduce_communicators) is not supported"),
        ({"gradient_average_split_factor": 2.0}, "gradient_average_split_factor) is not"),
    ],
)
def test_option_of_apexs_ddp_that_would_change_numbers_is_refused_by_name(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        _apex_parallel.DistributedDataParallel(nn.Linear(1, 1), **options)


def test_sums_in_float32_are_refused_only_where_gradients_are_shorter(lone_group):
    build = _apex_parallel.DistributedDataParallel
    with pytest.raises(ValueError, match="allreduce_always_fp32"):
        build(nn.Linear(1, 1).half(), allreduce_always_fp32=True)
    assert isinstance(build(nn.Linear(1, 1), allreduce_always_fp32=True), build)


def test_option_that_apexs_ddp_does_not_have_raises_type_error():
    with pytest.raises(TypeError, match="no_such_option"):
        _apex_parallel.DistributedDataParallel(nn.Linear(1, 1), no_such_option=1)


def test_delayed_allreduce_lets_parameters_be_unused_as_apex_does(lone_group):
    module = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    module.forward = module["used"].forward
    model = _apex_parallel.DistributedDataParallel(
        module, message_size=1, delay_allreduce=True, num_allreduce_streams=2, prof=True
    )
    for _ in range(3):  # without it torch refuses the second forward pass
        model(torch.ones(1, 1)).sum().backward()
