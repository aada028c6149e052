"""Tests what scripts/release builds for, and how scripts/repair_wheel.py lowers what it needs."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def bounds():
    """Returns the first minor version of torch that pyproject.toml allows, and the one after."""
    wanted = {r for r in PROJECT["project"]["dependencies"] if r.startswith("torch")}
    assert wanted == {r for r in PROJECT["build-system"]["requires"] if r.startswith("torch")}
    [(first, after)] = re.findall(r"^torch>=2\.(\d+),<2\.(\d+)$", "\n".join(wanted))
    return int(first), int(after)


def test_every_torch_that_may_be_installed_is_built_for_and_documented():
    first, after = bounds()
    script = (ROOT / "scripts" / "torches.sh").read_text("utf-8")
    [built] = re.findall(r"all_torches=\((2\.[\d. ]+)\)", script)
    assert [int(v.split(".")[1]) for v in built.split()] == list(range(first, after))
    for page in ("README.md", "docs/install.md"):
        assert f"2.{first} to 2.{after - 1}" in (ROOT / page).read_text("utf-8")


def version(name):
    header = (ROOT / "core" / "base" / "protocol.h").read_text("utf-8")
    [number] = re.findall(rf"\b{name} = (\d+);", header)
    return number


def test_pages_state_the_versions_that_the_programs_speak():
    install = (ROOT / "docs" / "install.md").read_text("utf-8")
    row = r"^\| \[%s version\].*?\| .*? \| (\d+) \|"
    assert re.findall(row % "wire", install, re.M) == [version("kWireVersion")]
    assert re.findall(row % "ipc", install, re.M) == [version("kIpcVersion")]
    wire = (ROOT / "docs" / "wire.md").read_text("utf-8")
    assert re.findall(r"The current version is (\d+)", wire) == [version("kWireVersion")]


def test_changelog_says_which_versions_the_formats_have():
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    for name, constant in (("wire", "kWireVersion"), ("ipc", "kIpcVersion")):
        assert f"he {name} version is {version(constant)}" in changelog.replace("\n  ", " ")


def test_release_builds_with_the_versions_of_development():
    def pins(name):
        return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text("utf-8"), re.M))

    development = pins("requirements-demo.txt") | pins("requirements-dev.txt")
    release = pins("requirements-release.txt")
    assert release.items() <= development.items()


@pytest.fixture
def repair_wheel(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("repair_wheel")


def library(folder, text, *options):
    source, path = folder / "made.cc", folder / "libmade.so"
    source.write_text(text, "utf-8")
    command = ["g++", "-shared", "-fPIC", "-O1", *options, str(source), "-o", str(path)]
    subprocess.run(command, check=True, timeout=100)
    return path


def needs(path):
    """Returns the versions of libstdc++ that a library needs symbols of."""
    told = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True)
    return set(re.findall(r"\*UND\*.*\((GLIBCXX_[\d.]+)\)", told.stdout))


WAITS = """
#include <condition_variable>
extern "C" int wait_for(int value) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock<std::mutex> lock(mutex);
  while (value == 0) changed.wait(lock);
  return value;
}
"""


def test_library_that_waits_for_a_condition_works_without_gcc_12(repair_wheel, tmp_path):
    path = library(tmp_path, WAITS)
    assert repair_wheel.NEW.decode() in needs(path)
    repair_wheel.lower(path)
    assert repair_wheel.NEW.decode() not in needs(path)
    assert repair_wheel.OLD.decode() in needs(path)
    assert ctypes.CDLL(str(path)).wait_for(7) == 7


def test_library_that_needs_more_of_gcc_12_is_refused_naming_the_symbol(repair_wheel, tmp_path):
    asserts = '#include <vector>\nextern "C" int at(int i) { return std::vector<int>(3)[i]; }\n'
    path = library(tmp_path, asserts, "-D_GLIBCXX_ASSERTIONS")
    with pytest.raises(ValueError, match=r"libmade\.so needs GLIBCXX_3\.4\.30 for .*assert_fail"):
        repair_wheel.lower(path)


def test_files_that_are_no_libraries_are_left_alone(repair_wheel, tmp_path):
    text = tmp_path / "page.md"
    text.write_text("GLIBCXX_3.4.30")
    repair_wheel.lower(text)
    assert text.read_text() == "GLIBCXX_3.4.30"
