"""Tests activation without code as far as one process shows it; tests/e2e has the rest."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from thalweg._activation import _agreement
from thalweg._activation._agreement import Answer
from thalweg._settings._config import ConfigError

REPORT = """
import json, sys
from torch.nn.parallel import DistributedDataParallel as DDP
print(json.dumps({
    "modules": sorted(name for name in sys.modules if name.startswith("thalweg")),
    "init": DDP.__init__.__code__.co_filename, "lazy": DDP._lazy_init.__code__.co_filename,
}))
"""


def import_torch(before: str = "", **variables: str):
    """Imports torch in a new interpreter; returns the loaded modules and the output."""
    names = ("THALWEG_", "AIAK_", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    result = subprocess.run(
        [sys.executable, "-c", before + "\nimport torch" + REPORT],
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.mark.parametrize("variables", [{}, {"AIAK_FP16_COMPRESSION": "0"}, {"THALWEG_ENABLE": "0"}])
def test_nothing_set_leaves_torch_as_it_is(variables):
    loaded, said = import_torch(**variables)
    assert loaded["modules"] == [
        "thalweg",
        "thalweg._autoload",
        "thalweg._backend",
        "thalweg._settings",
        "thalweg._settings._variables",
    ]
    assert loaded["init"].endswith("torch/nn/parallel/distributed.py")
    assert loaded["lazy"].endswith("torch/nn/parallel/distributed.py")
    assert said == ""


def test_switch_prepares_distributed_data_parallel_and_loads_nothing_native():
    loaded, said = import_torch(AIAK_FP16_COMPRESSION="1")
    assert not loaded["init"].endswith("torch/nn/parallel/distributed.py")
    assert not loaded["lazy"].endswith("torch/nn/parallel/distributed.py")
    assert not {"thalweg.ddp", "thalweg._C"}.intersection(loaded["modules"])
    assert said == ""


def test_importing_thalweg_first_is_no_circle():
    loaded, _ = import_torch("import thalweg.ddp", AIAK_FP16_COMPRESSION="1")
    assert not loaded["init"].endswith("torch/nn/parallel/distributed.py")
    assert "thalweg.ddp" in loaded["modules"]


@pytest.mark.parametrize("local_rank", ["", "0", "1"])
def test_variables_that_activate_nothing_are_warned_about_once_per_node(local_rank):
    useless = {"AIAK_FP16_COMPRESION": "1", "THALWEG_PS_EVERY": "50", "THALWEG_PS_MODE": "0"}
    loaded, said = import_torch(**useless, LOCAL_RANK=local_rank)
    assert loaded["init"].endswith("torch/nn/parallel/distributed.py")
    if local_rank == "1":
        assert said == ""
    else:
        assert said.count("unknown environment variable AIAK_FP16_COMPRESION is ignored") == 1
        assert said.count("THALWEG_PS_EVERY=50 has no effect without THALWEG_PS_MODE=local") == 1


TORCHRUN = ["/venv/bin/python", "-u", "/venv/bin/torchrun", "--nproc-per-node=2", "train.py"]


@pytest.mark.parametrize(("rank", "times"), [("", 0), ("0", 2)])
def test_launcher_leaves_warnings_of_variables_to_its_workers(rank, times):
    useless = {"THALWEG_CODEK": "1", "THALWEG_PS_EVERY": "50"} | ({"RANK": rank} if rank else {})
    _, said = import_torch(f"import sys; sys.orig_argv = {TORCHRUN}", **useless)
    assert said.count("thalweg: ") == times


SUBPACKAGES = """
import sys, thalweg
assert "torch" not in sys.modules
assert {"amp", "compat", "ddp", "optim", "policy"} <= set(dir(thalweg))
thalweg.ddp.attach, thalweg.amp.initialize, thalweg.optim.LAMB, thalweg.policy.parse, thalweg.compat
assert not hasattr(thalweg, "nothing")
print("ok")
"""


def test_subpackages_are_there_after_importing_thalweg_alone():
    command = [sys.executable, "-c", SUBPACKAGES]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "ok\n", result.stderr


@pytest.mark.parametrize(
    "broken", ["thalweg._settings._variables", "thalweg._activation._zero_code"]
)
def test_broken_thalweg_leaves_torch_usable_and_warns_once(broken):
    breaking = f"import sys; sys.modules['{broken}'] = None"
    loaded, said = import_torch(breaking, AIAK_FP16_COMPRESSION="1")
    assert loaded["init"].endswith("torch/nn/parallel/distributed.py")
    assert len(said.splitlines()) == 1
    assert "cannot be activated" in said
    assert broken in said


def test_folders_are_those_from_where_torch_was_imported():
    before = "import atexit, os; atexit.register(lambda: print(os.environ, file=sys.stderr))"
    names = ("THALWEG_RESIDUALS", "THALWEG_TRACE")
    _, said = import_torch(before, **dict(zip(names, ("held/back", "/traces"), strict=True)))
    assert f"'THALWEG_RESIDUALS': '{Path.cwd()}/held/back'" in said
    assert "'THALWEG_TRACE': '/traces'" in said


def test_malformed_variable_does_not_break_the_import():
    loaded, said = import_torch(AIAK_FP16_COMPRESSION="yes")
    assert not loaded["init"].endswith("torch/nn/parallel/distributed.py")
    assert said == ""


def test_workers_that_agree_are_attached():
    assert _agreement.decide([Answer("fp16"), Answer("fp16")]) == ""


def test_obstacle_of_one_worker_holds_for_all():
    answers = [Answer("fp16"), Answer("fp16", obstacle="parameters on cuda:1")]
    assert _agreement.decide(answers) == "rank 1: parameters on cuda:1"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([Answer("fp16"), Answer(error="AIAK_X is 2")], "thalweg: rank 1: AIAK_X is 2"),
        ([Answer("fp16"), Answer("bf16")], "codec fp16 on rank 0 but bf16 on rank 1: set the same"),
        ([Answer(), Answer("bf16")], r"codec \(none\) on rank 0 but bf16 on rank 1"),
    ],
)
def test_workers_that_differ_are_refused(answers, message):
    with pytest.raises(ConfigError, match=message):
        _agreement.decide(answers)


def test_answers_are_exchanged_through_the_store():
    store = dist.HashStore()
    answers = [Answer("fp16"), Answer("fp16", obstacle="—"), Answer(error="x")]
    heard = [None] * 3

    def work(rank):
        heard[rank] = _agreement.exchange(
            store, answers[rank], name="k", rank=rank, world=3, timeout=10
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert heard == [answers] * 3


def test_worker_that_does_not_come_to_the_module_is_named():
    with pytest.raises(TimeoutError, match=r"rank 1 has not come to the same Distributed.* 0.1 s"):
        _agreement.exchange(dist.HashStore(), Answer(), name="k", rank=0, world=2, timeout=0.1)


def test_ranks_without_the_variables_are_named():
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(_agreement.announcement(rank), "1")
    _agreement.await_announcements(store, [0, 2], timeout=1)
    with pytest.raises(ConfigError, match="not on rank 1, 3: set the same variables"):
        _agreement.await_announcements(store, [0, 1, 2, 3], timeout=0.1)


def test_ranks_that_may_be_late_have_longer_and_are_warned_of(monkeypatch):
    store = dist.HashStore()
    store.set(_agreement.announcement(0), "1")
    warnings = []

    def warn(text, *values):
        warnings.append(text % values)
        store.set(_agreement.announcement(1), "1")

    monkeypatch.setattr(_agreement._log, "warning", warn)
    _agreement.await_announcements(store, [0, 1], timeout=0.1, longest=30)
    [warning] = warnings
    assert "waiting for rank 1 to come to the same DistributedDataParallel module" in warning
    said = r"not on rank 2, or it has not come within 0\.2 s \(THALWEG_STEP_TIMEOUT\): set the same"
    with pytest.raises(ConfigError, match=said):
        _agreement.await_announcements(store, [0, 1, 2], timeout=0.1, longest=0.2)
