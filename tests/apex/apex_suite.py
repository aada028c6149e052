"""Runs apex's own tests on `thalweg.compat.apex`, on the CPU, and counts them by file.

    python tests/apex/apex_suite.py CHECKOUT [FILE…]

CHECKOUT is a work tree of NVIDIA/apex at the last commit that has `apex/amp`. FILE is a path below
its `tests/L0`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
LIMIT = 1800  # seconds for one file; test_multi_tensor_scale.py takes 74 on an idle machine

FOLDERS = ("run_amp", "run_fp16util", "run_optimizers", "run_fused_layer_norm")
# What is not run, and why.
LEFT_OUT = {
    "run_deprecated": "asks for the warnings that apex is deprecated",
    "run_mlp": "apex.mlp is not provided: torch.nn.Sequential does the same",
    "run_transformer": "apex.transformer is not provided: Megatron-LM has its own",
}
# Tests that are not run, by part of their name, and why.
LEFT_OUT_TESTS = {
    "_export_": "onnx is not installed here",
    "test_compile_": "torch.compile does not see through the mapping of CUDA",
    "batch_size_65536": "compares what batches of 16 do, with 6 GB of memory",
}
# Tests that fail, by part of their name, and why; test_apex_suite.py accepts these alone.
EXPECTED_FAILURES = {
    "TestMultiTensorUnscaleL2Norm": (
        "compares the norm, which apex's function too returns in shape (1,), with a scalar"
    ),
    "TestFusedSGD.test_half": (
        "compares with torch's SGD in float16 on the CPU, which rounds each product and sum: "
        "apex's own formulas in float32 are further off than its tolerance"
    ),
    "test_autocast_fused_layer_norm_float16": (
        "compares with torch's LayerNorm in float16 on the CPU, whose gradients are less precise"
    ),
    "test_layer_norm_bfloat16_batch_size_16_contiguous_False": (
        "compares roundings to bfloat16 of other random numbers than CUDA's: one element of 8192 "
        "near 0 is further off than its tolerance"
    ),
}


@dataclass
class Outcome:
    """What became of the tests of one file."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def run_file(checkout: Path, file: str) -> Outcome:
    """Runs one file of `tests/L0` in a process of its own."""
    tests = checkout.resolve() / "tests" / "L0"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, tests / Path(file).parent))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "THALWEG_COMPAT": "apex",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "cuda_on_cpu", "-p", "no:cacheprovider"),
            *("--import-mode=importlib", f"--rootdir={folder}", "-c", os.devnull),
            *(f"--junitxml={report}", str(tests / file)),
            *("-k", f"not ({' or '.join(LEFT_OUT_TESTS)})"),
        ]
        try:
            output = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT
            ).stdout
        except subprocess.TimeoutExpired:
            return Outcome(failed={file: f"took longer than {LIMIT} s"})
        if not report.exists():
            return Outcome(failed={file: output[-2000:]})
        return _read(report)


def _read(report: Path) -> Outcome:
    outcome = Outcome()
    for case in ElementTree.parse(report).iter("testcase"):  # written by our own process
        name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
        bad = [found for kind in ("failure", "error") for found in case.findall(kind)]
        skipped = case.find("skipped")
        if bad:
            told = (bad[0].text or "").strip().splitlines()
            message = (bad[0].get("message") or "").split("\n")[0]
            outcome.failed[name] = f"{message} | {told[-1]}" if told else message
        elif skipped is not None:
            outcome.skipped[name] = skipped.get("message") or ""
        else:
            outcome.passed.append(name)
    return outcome


def files_of(checkout: Path) -> list[str]:
    """Returns the test files that are run, as paths below `tests/L0`."""
    root = checkout / "tests" / "L0"
    found = [path for folder in FOLDERS for path in sorted((root / folder).glob("test_*.py"))]
    return [str(path.relative_to(root)) for path in found]


def table(outcomes: dict[str, Outcome]) -> str:
    """Returns the counts by file, then every reason."""
    lines = [f"{'file':58} passed skipped failed"]
    for file, outcome in outcomes.items():
        counts = (len(outcome.passed), len(outcome.skipped), len(outcome.failed))
        lines.append(f"{file:58} {counts[0]:6} {counts[1]:7} {counts[2]:6}")
    for folder, reason in {**LEFT_OUT, **LEFT_OUT_TESTS}.items():
        lines.append(f"{folder:58} not run: {reason}")
    for file, outcome in outcomes.items():
        for kind, reasons in (("skipped", outcome.skipped), ("failed", outcome.failed)):
            lines += [f"{kind} {file} {name}: {reason}" for name, reason in reasons.items()]
    return "\n".join(lines)


def unexpected(outcomes: dict[str, Outcome]) -> list[str]:
    """Returns the tests that failed and are not among EXPECTED_FAILURES."""
    failed = [name for outcome in outcomes.values() for name in outcome.failed]
    return [name for name in failed if not any(known in name for known in EXPECTED_FAILURES)]


def main() -> int:
    """Prints the table; returns 1 if a test failed unexpectedly."""
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    checkout = Path(sys.argv[1])
    files = sys.argv[2:] or files_of(checkout)
    outcomes = {}
    for file in files:
        outcomes[file] = run_file(checkout, file)
        print(f"{file}: done", file=sys.stderr)
    print(table(outcomes))
    return int(bool(unexpected(outcomes)))


if __name__ == "__main__":
    sys.exit(main())
