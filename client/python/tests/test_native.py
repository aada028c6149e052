"""Tests how the extension is chosen that fits the running torch."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

from thalweg import _binaries, _native


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Returns a function that makes an installation with extensions for these torches."""

    def install(*series):
        for one in series:
            folder = tmp_path / f"torch_{one.replace('.', '_')}"
            folder.mkdir()
            (folder / _native._FILE).touch()
        monkeypatch.setattr(_binaries, "folders", lambda: [tmp_path])

    return install


def test_the_loaded_extension_is_the_one_for_this_torch():
    from thalweg import _C

    major, minor = torch.__version__.split(".")[:2]
    assert f"/torch_{major}_{minor}/_C." in _C.__file__
    assert sys.modules["thalweg._C"] is _C


def test_torch_of_another_minor_version_is_refused_naming_those_that_work():
    script = "import torch; torch.__version__ = '2.99.1'; import thalweg._C"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    works = ".".join(torch.__version__.split(".")[:2])
    assert "ImportError: this thalweg works with torch " in result.stderr
    assert works in result.stderr.partition("works with torch ")[2].partition(", and")[0]
    assert "and torch 2.99.1 is installed: install another torch" in result.stderr


def test_versions_are_named_in_their_order(installed, monkeypatch):
    installed("2.9", "2.11", "2.12")
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    with pytest.raises(ImportError, match=r"works with torch 2\.9, 2\.11, 2\.12, and torch 2\.10"):
        _native.load("thalweg._C")


def test_unfinished_versions_of_torch_count_as_their_series(installed, monkeypatch):
    installed("2.11")
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+git70d99e9")
    # It is found, and is empty.
    with pytest.raises(ImportError, match=rf"{_native._FILE}: file too short"):
        _native.load("thalweg._C")


def test_installation_without_the_extension_says_so(installed):
    installed()
    with pytest.raises(ImportError, match="install thalweg again"):
        _native.load("thalweg._C")


def test_torch_finds_the_back_end_by_its_own_entry_point():
    # From 2.14 on, also where TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps `import torch` from doing it.
    [point] = entry_points(group="torch.distributed.backends", name="thalweg")
    register = point.load()
    register()
    register()
    assert "thalweg" in torch.distributed.Backend.backend_list


def test_threads_that_import_the_extension_at_once_all_get_it():
    script = """
import threading
import torch
import thalweg.optim

start, found = threading.Barrier(3), []

def use():
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = thalweg.optim.FusedSGD([param], lr=0.5)
    start.wait()
    optimizer.step()
    found.append(param.tolist())

threads = [threading.Thread(target=use) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(found)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout == f"{[[0.5, 0.5]] * 3}\n", result.stderr
