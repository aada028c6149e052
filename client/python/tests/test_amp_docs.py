"""docs/amp.md lists every function of thalweg.amp, with tests that exist."""

import re
from pathlib import Path

from thalweg import amp
from thalweg.amp import fp16_utils
from thalweg.compat import _apex_optimizers, _apex_parallel

TESTS = Path(__file__).parent
TABLE = (TESTS.parents[2] / "docs" / "amp.md").read_text(encoding="utf-8").split("## Functions")[1]


def test_every_public_name_is_in_the_table():
    functions = "".join(line.split("|")[1] for line in TABLE.splitlines() if line.startswith("|"))
    listed = set(re.findall(r"\w+", functions))
    modules = (amp, fp16_utils, _apex_optimizers, _apex_parallel)
    public = {name for module in modules for name in module.__all__} - {"_amp_state"}
    assert public <= listed, public - listed


def test_every_test_in_the_table_exists():
    sources = "".join(path.read_text(encoding="utf-8") for path in TESTS.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert len(named) > 40
    missing = {name for name in named if f"def {name}(" not in sources}
    assert not missing
