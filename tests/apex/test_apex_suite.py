"""Runs apex's own tests on `thalweg.compat.apex`: `pytest tests/apex --apex CHECKOUT`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from apex_suite import files_of, run_file, table, unexpected

HERE = Path(__file__).parent


@pytest.fixture
def checkout(pytestconfig):
    path = pytestconfig.getoption("--apex", default=None)
    if path is None:
        pytest.skip("apex's sources are not part of this repository: pass --apex CHECKOUT")
    if not Path(path, "tests", "L0", "run_amp").is_dir():
        pytest.fail(f"{path} has no tests/L0/run_amp, expected a work tree of apex that has amp")
    return Path(path)


@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_tests_of_apex_pass_on_the_shim(checkout):
    outcomes = {file: run_file(checkout, file) for file in files_of(checkout)}
    print(table(outcomes))
    assert not unexpected(outcomes), table(outcomes)
    assert outcomes["run_amp/test_basic_casts.py"].passed


def test_mapping_tells_a_script_where_it_put_its_tensors():
    script = """
import cuda_on_cpu, torch
half = torch.ones(2, device="cuda").half()
print(half.type(), half.is_cuda, half.is_cpu, (half + 1).is_cuda, half.cpu().type())
layer = torch.nn.Linear(2, 1).cuda()
layer(torch.ones(1, 2).cuda()).sum().backward()
print(layer.weight.type(), layer.weight.grad.is_cuda, torch.ones(2).is_cuda)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "torch.cuda.HalfTensor True True True torch.HalfTensor",
        "torch.cuda.FloatTensor True False",
    ]
