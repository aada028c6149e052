"""Tests the table of what the module `apex` provides, and what is said of the rest."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from amp_models import script_environment

import thalweg.compat.apex as shim
from thalweg import amp
from thalweg.compat._apex_map import INSTEAD, PROVIDED, names_of, why_missing

PAGE = Path(__file__).parents[3] / "docs" / "amp.md"


@pytest.fixture(autouse=True)
def apex():
    def remove():
        for name in [name for name in sys.modules if name.partition(".")[0] in PROVIDED]:
            del sys.modules[name]

    remove()
    assert shim.install()
    yield sys.modules["apex"]
    remove()


@pytest.mark.parametrize("module", PROVIDED)
def test_every_name_of_the_table_is_there(module):
    found = importlib.import_module(module)
    for name, source in names_of(module).items():
        assert getattr(found, name) is getattr(importlib.import_module(source), name)
    assert {name for name in names_of(module) if not name.startswith("_")} == set(found.__all__)
    assert names_of(module).keys() <= set(dir(found))


def test_page_lists_every_module_of_the_table_with_its_names():
    section = PAGE.read_text(encoding="utf-8").split("## Modules of apex")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    listed = {re.findall(r"[\w.]+", row[0])[0]: set(re.findall(r"`(\w+)`", row[1])) for row in rows}
    assert listed == {module: set(names_of(module)) for module in PROVIDED}


def test_names_win_over_modules_inside_of_the_same_name(apex):
    import apex.amp._amp_state
    import apex.parallel.LARC
    from apex.amp import _amp_state, handle

    assert apex.amp._amp_state is _amp_state is amp._amp_state
    assert isinstance(apex.parallel.LARC, type)
    assert handle.scale_loss is amp.scale_loss
    assert sys.modules["apex.amp._amp_state"]._amp_state is amp._amp_state


def test_everything_public_is_imported_by_a_star():
    names = {}
    exec("from apex.fp16_utils import *", names)
    assert names["network_to_half"] is amp.fp16_utils.network_to_half


@pytest.mark.parametrize(
    ("statement", "name", "said"),
    [
        ("import apex.contrib.xentropy", "apex.contrib", "torch's functions"),
        ("from apex import transformer", "apex.transformer", "Megatron-LM"),
        (
            "from apex.optimizers import FP16_Optimizer",
            "apex.optimizers.FP16_Optimizer",
            "fp16_util",
        ),
        ("from apex.parallel import Other", "apex.parallel.Other", "docs/amp.md"),
        (
            "from amp_C import multi_tensor_other",
            "amp_C.multi_tensor_other",
            "apex.optimizers",
        ),
        ("import apex.mlp", "apex.mlp", "torch.nn.Sequential"),
    ],
)
def test_missing_name_raises_import_error_that_says_what_to_use(statement, name, said):
    with pytest.raises(ImportError, match=re.escape(f"does not provide {name}: ")) as caught:
        exec(statement, {})
    assert said in str(caught.value)


def test_missing_attribute_is_none(apex):
    assert not hasattr(apex, "contrib")
    assert not hasattr(apex.amp, "other")
    with pytest.raises(AttributeError, match=r"use torch\.nn\.Linear"):
        _ = apex.fused_dense


def test_nothing_is_both_provided_and_replaced():
    assert not {name for name in INSTEAD if name in PROVIDED} - {"apex", "amp_C"}
    for name in INSTEAD:
        module, _, last = name.rpartition(".")
        assert last not in names_of(module)
    assert why_missing("apex.contrib.optimizers.x").endswith(INSTEAD["apex.contrib.optimizers"])


def test_libraries_find_that_apex_is_there():
    assert importlib.util.find_spec("apex") is not None
    assert importlib.util.find_spec("apex.amp") is not None


def test_folder_of_the_name_is_no_installed_apex(tmp_path):
    (tmp_path / "apex").mkdir()
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch; from apex import amp; print(amp.initialize.__name__)",
        ],
        cwd=tmp_path,
        env=script_environment() | {"THALWEG_COMPAT": "apex"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.stderr) == ("initialize\n", "")


def test_small_functions_say_and_raise(caplog):
    from apex.amp._amp_state import maybe_print, warn_or_err

    amp._amp_state.verbosity = 1
    with caplog.at_level("INFO", "thalweg.amp"):
        maybe_print("a line", rank0=True)
    assert "a line" in caplog.text
    with pytest.raises(RuntimeError, match="a reason"):
        warn_or_err("a reason")
    from apex import DeprecatedFeatureWarning, deprecated_warning

    with pytest.warns(DeprecatedFeatureWarning, match="old"):
        deprecated_warning("old")
