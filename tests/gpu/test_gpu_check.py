"""Tests scripts/gpu_check on a bundle whose programs only claim to have used a GPU."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = '<testcase classname="A" name="b"/>'
FAILS = '<testcase classname="A" name="c"><failure message="1 is not 2"/></testcase>'
SKIPS = '<testcase classname="A" name="d"><skipped message="file.cc:1&#xA;no GPU"/></testcase>'
ROW = {"case": "cast fp32 to fp16", "ms": 1.0, "of_copy": 0.9, "launches": 1}


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu_check  # type: ignore[import-not-found]

    return gpu_check


class Bundle:
    """A folder like those of scripts/gpu_bundle, and one with installed tools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bundle"
        self.tools = folder / "tools"
        self.report = folder / "report.json"
        self.torch([])

    def program(self, name: str, body: str) -> None:
        self._write(self.folder / "bin" / name, f"#!{sys.executable}\nimport sys\n{body}")

    def test(self, name: str, *cases: str, status: int = 0) -> None:
        report = f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"
        self.program(
            name,
            "option = sys.argv[1]\n"
            "if option.startswith('--gtest_output=xml:'):\n"
            f"    open(option.partition(':')[2], 'w').write({report!r})\n"
            f"sys.exit({status})\n",
        )

    def bench(self, name: str, rows: list[dict], status: int = 0, log: str = "") -> None:
        lines = ",\n".join(json.dumps(row) for row in rows)
        text = f'{log}{{\n"rows": [\n{lines}' + ("\n]\n}" if status == 0 else "")
        self.program(name, f"print({text!r})\nsys.exit({status})\n")

    def torch(self, rows: list[dict]) -> None:
        text = json.dumps({"rows": rows})
        self._write(self.folder / "gpu_torch_bench.py", f"print({text!r})")

    def tool(self, name: str, status: int = 0) -> None:
        self._write(self.tools / name, f"#!/bin/sh\necho {name} $*\nexit {status}\n")

    def check(self, module, monkeypatch, *options: str) -> dict:
        self.tools.mkdir(exist_ok=True)
        monkeypatch.setenv("PATH", str(self.tools))
        monkeypatch.setattr(module, "TOOLKIT", str(self.tools))
        monkeypatch.setattr(
            sys, "argv", ["", "--bundle", str(self.folder), "--out", str(self.report), *options]
        )
        status = module.main()
        result = json.loads(self.report.read_text())
        assert (status != 1) == result["ok"]
        assert (status == 2) == (result["ok"] and bool(result["not started"]))
        return result

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)


@pytest.fixture
def bundle(tmp_path):
    return Bundle(tmp_path)


def test_all_that_has_passed_is_ok_beside_torch_and_the_targets(bundle, gpu_check, monkeypatch):
    bundle.test("gpu_a_test", PASSES)
    bundle.bench(
        "gpu_b_bench",
        [
            ROW,
            {
                "case": "path ipc, 2 workers, 25 MiB",
                "ms": 2.0,
                "call_ms": 0.03,
                "two_copies_ms": 0.02,
            },
        ],
    )
    bundle.torch([{"case": "Gloo, 2 workers, 25 MiB", "ms": 9.0}])
    result = bundle.check(gpu_check, monkeypatch)
    assert result["ok"]
    assert result["tests"]["gpu_a_test"]["passed"] == 1
    assert result["benchmarks"]["gpu_b_bench"]["rows"][0] == ROW
    [compared] = result["against torch"]
    assert (compared["peer"], compared["ratio"]) == ("Gloo, 2 workers, 25 MiB", 4.5)
    said = {target["what"]: (target["value"], target["ok"]) for target in result["targets"]}
    assert said["cast fp32 to fp16: share of a copy's rate"] == (0.9, True)
    assert said["times as fast as: Gloo, 2 workers, 25 MiB"] == (4.5, False)
    assert said["resnet50 rank 4 round: launches"] == (None, False)
    beyond = "path ipc, 2 workers, 25 MiB: milliseconds of the call beyond two copies"
    assert said[beyond] == (0.01, True)
    assert result["sanitizers"] == {"not run": "compute-sanitizer is not installed"}


def test_without_a_gpu_nothing_is_claimed(bundle, gpu_check, monkeypatch):
    bundle.test("gpu_a_test", SKIPS)
    bundle.test("gpu_b_test", PASSES, SKIPS)
    result = bundle.check(gpu_check, monkeypatch)
    assert not result["ok"]
    assert result["error"] == "nothing was checked: no GPU"
    assert "benchmarks" not in result


@pytest.mark.parametrize("case", [SKIPS, FAILS])
def test_one_case_less_fails_and_hides_nothing_else(case, bundle, gpu_check, monkeypatch):
    bundle.test("gpu_a_test", PASSES)
    bundle.test("gpu_b_test", case, status=0 if case is SKIPS else 1)
    bundle.bench("gpu_b_bench", [ROW])
    result = bundle.check(gpu_check, monkeypatch)
    assert not result["ok"]
    assert result["benchmarks"]["gpu_b_bench"]["rows"] == [ROW]


@pytest.mark.parametrize(("status", "log"), [(1, ""), (0, "[info] job 'job': path ipc\n")])
def test_bench_that_fails_or_prints_no_json_keeps_its_rows(
    status, log, bundle, gpu_check, monkeypatch
):
    bundle.test("gpu_a_test", PASSES)
    bundle.bench("gpu_b_bench", [ROW], status=status, log=log)
    result = bundle.check(gpu_check, monkeypatch)
    assert not result["ok"]
    assert result["benchmarks"]["gpu_b_bench"]["rows"] == [ROW]


def test_program_that_hangs_ends_with_its_workers_and_the_next_has_its_turn(
    bundle, gpu_check, monkeypatch
):
    # The program's worker holds the same pipes: while it lives they never close.
    bundle.program(
        "gpu_a_test",
        "import os, signal\nprint('case 7', flush=True)\nos.fork()\nsignal.pause()\n",
    )
    bundle.test("gpu_b_test", PASSES)
    monkeypatch.setitem(gpu_check.LIMIT, "test", 12)
    result = bundle.check(gpu_check, monkeypatch)
    assert not result["ok"]
    assert "case 7" in result["tests"]["gpu_a_test"]["output"]
    assert "stopped after 12 s" in result["tests"]["gpu_a_test"]["output"]
    assert result["tests"]["gpu_b_test"]["passed"] == 1


def test_what_was_not_started_has_not_failed_and_is_named(bundle, gpu_check, monkeypatch, capsys):
    bundle.test("gpu_a_test", PASSES)
    bundle.bench("gpu_b_bench", [ROW])
    result = bundle.check(gpu_check, monkeypatch, "--minutes", "0")
    assert result["ok"]
    assert result["not started"] == ["gpu_a_test", "gpu_b_bench", "torch", "training", "profile"]
    assert "not started, the time was up: gpu_a_test, gpu_b_bench" in capsys.readouterr().err


def test_sanitizers_may_have_a_call_of_their_own(bundle, gpu_check, monkeypatch):
    bundle.test("gpu_kernels_test", PASSES)
    bundle.tool("compute-sanitizer")
    result = bundle.check(gpu_check, monkeypatch, "--parts", "sanitizers")
    assert list(result["sanitizers"]) == [
        f"{tool} gpu_kernels_test" for tool in ("memcheck", "racecheck", "synccheck")
    ]
    assert "tests" not in result and "benchmarks" not in result


def test_the_drivers_own_path_of_libraries_stays(bundle, gpu_check, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/driver")
    made = gpu_check.Bundle(bundle.folder, 1)
    assert made.env["LD_LIBRARY_PATH"] == f"{bundle.folder / 'lib'}:/of/the/driver"


@pytest.mark.parametrize("finds", [False, True])
def test_sanitizers_take_every_test_and_what_they_find_fails(finds, bundle, gpu_check, monkeypatch):
    bundle.test("gpu_a_test", PASSES)
    bundle.test("gpu_kernels_test", PASSES)
    bundle.tool("compute-sanitizer", 99 if finds else 0)
    bundle.tool("ncu")
    result = bundle.check(gpu_check, monkeypatch)
    assert result["ok"] != finds
    kernels = [f"{tool} gpu_kernels_test" for tool in ("memcheck", "racecheck", "synccheck")]
    assert list(result["sanitizers"]) == [*kernels, "memcheck gpu_a_test"]
    if finds:
        said = result["sanitizers"]["racecheck gpu_kernels_test"]["output"]
        assert "--tool racecheck --report-api-errors no --error-exitcode 99" in said
    assert "gpu_powersgd_bench bert-large rank 4 round" in result["profile"]["output"]


# Cases are found by their names, which programs compose of these parts.
@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("kernels/cuda/gpu_kernels_bench.cc", ['"fold "', '"cast "']),
        ("kernels/cuda/gpu_optim_bench.cc", ['"adamw "', '"norm "', '"lamb "', '"O2 fp16"']),
        (
            "kernels/cuda/gpu_powersgd_bench.cc",
            ['" rank "', '"round"', '"resnet50"', '"bert-large"'],
        ),
        ("client/core/gpu_pinned_path_bench.cc", ['"gradient, "', '"result, "', '" MiB"']),
        ("tests/integration/gpu_path_bench.cc", ['"path %s, %s workers, %s MiB']),
    ],
)
def test_programs_name_their_cases_as_targets_do(file, parts):
    source = (ROOT / file).read_text().replace('\\"', '"')
    for part in parts:
        assert part in source


def test_torchs_cases_are_those_of_the_targets(gpu_check):
    import gpu_targets  # type: ignore[import-not-found]

    source = (ROOT / "scripts" / "gpu_torch_bench.py").read_text()
    for case in (*gpu_targets._OPTIMIZERS, "torch's PowerSGD hook, ", "Gloo, "):
        assert f'"{case}' in source


def wheel_of(folder: Path) -> None:
    """Writes a wheel with a module that has nothing."""
    folder.mkdir(exist_ok=True)
    info = "thalweg-0.1.dist-info"
    with zipfile.ZipFile(folder / "thalweg-0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("of_the_wheel.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: thalweg\nVersion: 0.1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("fails", [False, True])
def test_training_uses_the_wheel_and_counts(fails, bundle, gpu_check, monkeypatch):
    bundle.test("gpu_a_test", PASSES)
    wheel_of(bundle.folder)
    bundle._write(bundle.folder / "checkout" / "pyproject.toml", "[tool.pytest.ini_options]\n")
    bundle._write(
        bundle.folder / "checkout" / "test_it.py",
        f"import of_the_wheel, pytest\n@pytest.mark.gpu\ndef test_it():\n    assert not {fails}\n",
    )
    rows = [
        {"case": "ResNet-50 O2, Thalweg", "ms": 2.0},
        {"case": "ResNet-50 O2, DDP over Gloo", "ms": 3.0},
    ]
    text = json.dumps({"rows": rows})
    bundle._write(bundle.folder / "gpu_step_bench.py", f"import of_the_wheel\nprint({text!r})")
    result = bundle.check(gpu_check, monkeypatch)
    assert result["ok"] != fails
    assert result["training"]["passed"] == 1 - fails
    assert list(result["training"]["failed"]) == ["test_it.test_it"] * fails
    said = {target["what"]: (target["value"], target["ok"]) for target in result["targets"]}
    assert said["steps of ResNet-50: times as fast"] == (1.5, True)
    assert said["steps of GPT-2: times as fast"] == (None, False)
