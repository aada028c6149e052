"""Trains on a GPU with the wheel of a bundle, for scripts/gpu_check."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_results import cases, rows_of

if TYPE_CHECKING:
    from gpu_check import Bundle


def run_training(bundle: Bundle) -> dict[str, Any]:
    """Runs the tests of training and of the optimizers, then whole steps, with the wheel."""
    if bundle.wheel is None:
        return {"not run": "the bundle has no wheel"}
    if importlib.util.find_spec("torch") is None:
        return {"not run": f"torch is not installed in {sys.executable}"}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        options = ("--no-index", "--no-deps", "--quiet", "--target", str(site))
        pip = [sys.executable, "-m", "pip", "install", *options, str(bundle.wheel)]
        status, output, errors = bundle.run(pip, "training")
        if status != 0:
            return {"exit": status, "ok": False, "output": (output + errors)[-4000:]}
        env = bundle.env_of["training"]
        env["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [env.get("PYTHONPATH")])])
        env["PATH"] = os.pathsep.join([str(site / "bin"), env["PATH"]])
        result = test(bundle, Path(folder) / "report.xml")
        bench = [sys.executable, str(bundle.folder / "gpu_step_bench.py")]
        result["steps"] = rows_of(*bundle.run(bench, "training"))
    result["ok"] = result["ok"] and result["steps"]["ok"]
    return result


def test(bundle: Bundle, report: Path) -> dict[str, Any]:
    checkout = bundle.folder / "checkout"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-c", str(checkout / "pyproject.toml"), f"--junit-xml={report}"]
    # The others need files that are not in the bundle, already to be collected.
    tests = sorted(checkout.rglob("test_*.py"))
    command += [str(path) for path in tests if "mark.gpu" in path.read_text("utf-8")]
    status, output, errors = bundle.run(command, "training")
    result: dict[str, Any] = {"exit": status, "ok": status == 0}
    if report.exists():
        return result | cases(report)
    return result | {"output": (output + errors)[-4000:]}
