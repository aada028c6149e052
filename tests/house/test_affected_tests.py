"""Which tests `make check` chooses for changed files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "affected_tests.py"
SPEC = importlib.util.spec_from_file_location("affected_tests", SCRIPT)
affected = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(affected)

FOLDERS = {"kernels": ["lossy_test", "optim_test"], "server/sidecar": ["sidecar_test"]}
TESTS = {
    "client/python/tests/test_left_out.py": "from thalweg._attach import _left_out",
    "client/python/tests/test_amp_levels.py": "from thalweg import amp",
    "client/python/tests/test_config.py": "from thalweg._settings._config import Config",
}


@pytest.mark.parametrize(
    ("file", "programs"),
    [
        ("server/sidecar/codec/cpu_lossy.cc", ["sidecar_test"]),
        ("kernels/codec/int8/int8.h", ["lossy_test", "optim_test"]),
        ("server/round/fold.cc", []),
        ("docs/codecs.md", []),
    ],
)
def test_programs_are_those_of_the_nearest_folder_that_has_any(file, programs):
    assert affected.programs([file], FOLDERS) == programs


def test_tests_that_name_a_changed_module_run_with_one_job_through_servers():
    changed = ["client/python/thalweg/_attach/_left_out.py"]
    assert affected.python_tests(changed, TESTS) == [
        "client/python/tests/test_left_out.py",
        affected.JOB,
    ]


def test_module_that_no_test_names_runs_the_tests_of_its_package():
    changed = ["client/python/thalweg/amp/_masters.py", "client/python/thalweg/amp/__init__.py"]
    assert affected.python_tests(changed, TESTS) == [
        "client/python/tests/test_amp_levels.py",
        affected.JOB,
    ]


def test_changed_test_runs_by_itself():
    assert affected.python_tests(["tests/e2e/test_run.py"], TESTS) == ["tests/e2e/test_run.py"]


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("core/ipc/message.cc", True),
        ("client/torch/module.cc", True),
        ("core/ipc/message_test.cc", False),
        ("tests/integration/cluster.h", False),
        ("client/python/thalweg/ddp.py", False),
    ],
)
def test_installed_programs_are_built_anew_when_their_sources_change(file, changes):
    assert affected.changes_native([file]) is changes
