"""Tests how `thalweg doctor SCRIPT` judges variables, in a process group of one worker."""

import collections

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thalweg._settings._variables import KNOWN
from thalweg.cli import _doctor_worker

NOTHING = "FAIL nothing asks for Thalweg: "
ALONE = "DistributedDataParallel(Linear) is not attached: its process group has one worker"
BY_GROUP = "ok DistributedDataParallel(Linear) leaves its gradients to its process group"


@pytest.fixture
def look(monkeypatch, tmp_path):
    """Returns the lines below the first about three steps of a script, given variables."""
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = torch.nn.Linear(2, 2)
    objects = [DistributedDataParallel(model), torch.optim.SGD(model.parameters())]

    def report(variables, back_end="gloo", modules=True, fused=(), rate=0.0):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        alive = objects[0 if modules else 1 :]
        monkeypatch.setattr(
            _doctor_worker, "_alive", lambda kind: [one for one in alive if isinstance(one, kind)]
        )
        monkeypatch.setattr(dist, "get_backend", lambda *_: back_end)
        monkeypatch.setattr(_doctor_worker, "fused_steps", collections.Counter(fused))
        lines = _doctor_worker._look(3, 3, rate)
        return [f"{level} {text}" for level, text in lines][1:]

    yield report
    objects.clear()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "set THALWEG_CODEC"),
        ({"THALWEG_PS": "0"}, "set THALWEG_CODEC"),
        ({"THALWEG_PS_MODE": "0"}, "set THALWEG_CODEC"),
        ({"THALWEG_BACKEND": "0", "THALWEG_FUSED_OPTIMIZER": "0"}, "set THALWEG_CODEC"),
        ({"THALWEG_PS": "auto", "THALWEG_ENABLE": "0"}, "THALWEG_ENABLE=0 switches all variables"),
        ({"THALWEG_CODEC": "fp16", "THALWEG_ENABLE": "0"}, "THALWEG_ENABLE=0 switches all"),
    ],
)
def test_variables_that_switch_off_ask_for_nothing(look, variables, said):
    first, second = look(variables)
    assert first.startswith(NOTHING + said)
    assert second.startswith(f"FAIL {ALONE}")


@pytest.mark.parametrize("modules", [True, False])
def test_fused_optimizer_alone_is_asked_for_and_leaves_averages_to_torch(look, modules):
    found = look({"THALWEG_FUSED_OPTIMIZER": "1"}, modules=modules, fused=["SGD", "SGD"])
    assert found[0] == "ok variables ask for Thalweg: THALWEG_FUSED_OPTIMIZER=1"
    assert found[1].startswith(f"note {ALONE}" if modules else "note there is no Distributed")
    assert found[2:] == ["ok torch's optimizers that run fused: SGD"]


def test_fused_optimizer_that_is_asked_for_and_runs_nowhere_fails(look):
    found = look({"THALWEG_FUSED_OPTIMIZER": "1", "THALWEG_CODEC": "fp16"})
    assert found[0].endswith(": THALWEG_CODEC=fp16, THALWEG_FUSED_OPTIMIZER=1")
    assert found[1].startswith(f"FAIL {ALONE}")
    assert found[2].startswith("FAIL no optimizer runs fused: ")


@pytest.mark.parametrize("modules", [True, False])
def test_process_group_that_a_variable_makes_ours_is_not_the_scripts_wish(look, modules):
    found = look({"THALWEG_BACKEND": "1"}, back_end="thalweg", modules=modules)
    assert found[0] == "ok variables ask for Thalweg: THALWEG_BACKEND=1"
    assert found[1].startswith(BY_GROUP if modules else "ok there is no DistributedDataParallel")


def test_process_group_of_the_script_itself_averages_its_modules(look):
    asked, found = look({}, back_end="thalweg")
    assert asked == "ok the script asks for Thalweg itself"
    assert found.startswith(BY_GROUP)


def test_codec_that_a_module_in_our_process_group_does_not_get_is_missed(look):
    _, found = look({"THALWEG_CODEC": "fp16"}, back_end="thalweg")
    assert found.startswith(f"FAIL {ALONE}")


def test_variables_that_torch_does_not_let_us_see_are_said_to_do_nothing(look):
    found = look({"THALWEG_CODEC": "fp16", "TORCH_DEVICE_BACKEND_AUTOLOAD": "false"})
    assert found[0] == "ok variables ask for Thalweg: THALWEG_CODEC=fp16"
    assert found[1].startswith("FAIL TORCH_DEVICE_BACKEND_AUTOLOAD is not 1")
