"""Tests that docs/amp.md lists every function of thalweg.amp, with tests that exist."""

import re
from pathlib import Path

from thalweg import amp
from thalweg.amp import fp16_utils
from thalweg.compat import _apex_optimizers, _apex_parallel

# Scripts use these interfaces of AIAK-Training and of apex, so they must exist.
AIAK = "aiak_amp_decorate aiak_amp_parameters LAMB autocast GradScaler AIAK_FUSED_OPTIMIZER"
APEX = """
init AmpHandle NoOpHandle enable_caching verbose scale_loss wrap_optimizer rnn_cast weight_norm
half_function float_function promote_function
register_half_function register_float_function register_promote_function
initialize master_params state_dict load_state_dict
FP16_Optimizer DynamicLossScaler network_to_half
FusedAdam FusedLAMB FusedSGD DistributedDataParallel SyncBatchNorm
"""
TESTS = Path(__file__).parent
TABLE = (TESTS.parents[2] / "docs" / "amp.md").read_text(encoding="utf-8").split("## Functions")[1]


def rows():
    """Yields the cells of each row but the heading's."""
    lines = [line for line in TABLE.splitlines() if line.startswith("|")]
    return [line.strip("|").split(" | ") for line in lines[2:]]


def test_every_public_name_and_every_required_one_is_in_the_table():
    listed = {name for row in rows() for name in re.findall(r"\w+", row[0])}
    modules = (amp, fp16_utils, _apex_optimizers, _apex_parallel)
    public = {name for module in modules for name in module.__all__} - {"_amp_state"}
    missing = (public | {*AIAK.split(), *APEX.split()}) - listed
    assert not missing


def test_every_row_names_tests_that_exist():
    sources = "".join(path.read_text(encoding="utf-8") for path in TESTS.glob("test_*.py"))
    assert len(rows()) > 30
    for function, _, tests in rows():
        named = re.findall(r"`(\w+)`", tests)
        assert named, f"no test for {function}"
        missing = {name for name in named if f"def {name}(" not in sources}
        assert not missing
