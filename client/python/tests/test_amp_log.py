"""Tests what a script that has not set up logging shows of mixed precision."""

import json
import subprocess
import sys

import pytest
from amp_models import script_environment

SCRIPT = """
import json, sys, torch
from thalweg import amp

options = json.loads(sys.argv[1])
if options.pop("rank", 0):  # with a process group in which this is not rank 0
    import torch.distributed as dist
    dist.is_initialized = lambda: True
    dist.get_rank = lambda *_: 1
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
amp.initialize(model, optimizer, opt_level="O1", **options)
for factor in (0.25, float("inf")):  # 2¹⁶, the scale, is no half
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(2)).sum(), optimizer) as scaled:
        (scaled * factor).backward()
    optimizer.step()
print("trained")
"""
SET_UP = "thalweg: mixed precision is set up: Options("
SKIPPED = (
    "thalweg: gradients of loss 0 are not finite: the step is skipped, "
    "the loss scale is now 32768.0"
)


def lines_of(options, **variables):
    """Returns what the script writes to standard error, by lines."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        env=script_environment() | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    return result.stderr.splitlines()


@pytest.mark.parametrize("options", [{}, {"verbosity": 1}])
def test_set_up_and_skipped_steps_are_shown_by_default(options):
    set_up, skipped = lines_of(options)
    assert set_up.startswith(SET_UP)
    assert skipped == SKIPPED


def test_set_up_is_shown_by_rank_0_and_skipped_steps_by_all():
    assert lines_of({"rank": 1}) == [SKIPPED]


@pytest.mark.parametrize(
    ("options", "variables"), [({"verbosity": 0}, {}), ({}, {"THALWEG_LOG": "warn"})]
)
def test_nothing_is_shown_to_who_does_not_want_it(options, variables):
    assert lines_of(options, **variables) == []
