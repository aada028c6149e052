"""Tests that the names on docs/migrate.md exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

import thalweg.compat.apex as shim
from thalweg import codecs
from thalweg._settings import _variables
from thalweg.compat._apex_map import PROVIDED

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`((?:torch|thalweg|apex)\.[\w.]*\w)`", PAGE)))
VARIABLES = sorted(set(re.findall(r"\b(?:THALWEG|AIAK)_[A-Z0-9_]*[A-Z0-9]", PAGE)))


@pytest.fixture(scope="module", autouse=True)
def apex():
    """Provides the module `apex`, and the names of AIAK-Training, which thalweg.compat gives."""
    assert shim.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in PROVIDED]:
        del sys.modules[name]  # other tests look whether it is there


def test_page_names_enough_to_be_checked():
    assert len(NAMES) > 40
    assert len(VARIABLES) > 10
    with pytest.raises(AttributeError):
        resolve_name("torch.distributed.all_together")


@pytest.mark.parametrize("name", NAMES)
def test_name_of_the_migration_page_is_there(name):
    assert callable(resolve_name(name))


def test_variables_of_the_migration_page_are_known():
    assert {*VARIABLES} <= {*_variables.KNOWN, *_variables.AIAK.values()}


def test_codecs_of_the_migration_page_are_read():
    texts = re.findall(r"THALWEG_CODEC=([\w:=,.]+)`", PAGE)
    assert [codecs.parse(text).name for text in texts] == [
        "fp16",
        "powersgd",
        "fp16",
        "bf16",
        "int8",
    ]


def test_arguments_of_powersgd_are_those_of_the_page():
    [listed] = re.findall(r"`thalweg.PowerSGD`, whose arguments are (.*?) \|", PAGE)
    assert {*re.findall(r"`(\w+)`", listed)} == {*codecs.PowerSGD._keys} - {"wire"}
