"""Tests what is read of the snapshots that shards have left in their folders."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from thalweg.ps import _snapshot_files
from thalweg.ps._rules import KINDS
from thalweg.ps._snapshot_files import Saved, read_latest

_BUCKET = (0, 0, 0)
_ADAM = "adam (decoupled), weights in fp32, 1 group, fp32\na.w [2, 3] of group 0\na.b [] of group 0"


class Files:
    """Stands in for the extension: what it reads of which file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, tuple[dict[str, Any], list[Any]]] = {}
        self.damaged: set[str] = set()

    def add(
        self, job: str, step: int, shard: int, chunks: dict[int, list[float]], rule: str = _ADAM
    ) -> str:
        """Adds a file of one of two shards. Moments are the chunk's weights times 10 and 100."""
        path = self._folder / f"shard{shard}" / job / f"1-{step}.snapshot"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        header = {
            "identity": job,
            "branch": 1,
            "step": step,
            "shard": shard,
            "num_shards": 2,
            "buckets": {_BUCKET: rule},
        }
        slices = {
            n: [factor * torch.tensor(v) for factor in (1, 10, 100)] for n, v in chunks.items()
        }
        read = [(_BUCKET, number, step, values) for number, values in slices.items()]
        self._files[str(path)] = (header, read)
        return str(path)

    def read_snapshot_header(self, path: str) -> dict[str, Any]:
        return self._files[path][0]

    def read_snapshot(self, path: str) -> tuple[dict[str, Any], list[Any]]:
        if path in self.damaged:
            raise RuntimeError(f"thalweg: {path} is damaged")
        return self._files[path]


@pytest.fixture
def files(tmp_path, monkeypatch) -> Files:
    made = Files(tmp_path)
    monkeypatch.setattr(_snapshot_files, "_C", made)
    return made


def read(tmp_path: Path, kind: str = "adamw", identity: str | None = None) -> Saved:
    return read_latest([tmp_path / "shard0", tmp_path / "shard1"], KINDS[kind], identity)


def test_chunks_of_all_shards_are_put_together_by_number(files, tmp_path):
    files.add("j", 5, 0, {2: [5.0, 6.0, 7.0], 0: [1.0, 2.0]})
    files.add("j", 5, 1, {1: [3.0, 4.0]})
    saved = read(tmp_path)
    assert saved.step == 5
    weights = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert torch.equal(saved.weights["a.w"], weights)
    assert torch.equal(saved.weights["a.b"], torch.tensor(7.0))
    assert torch.equal(saved.states["a.w"]["exp_avg"], 10 * weights)
    assert torch.equal(saved.states["a.w"]["exp_avg_sq"], 100 * weights)
    assert float(saved.states["a.b"]["step"]) == 5


def test_snapshot_that_a_shard_lacks_or_that_is_damaged_is_passed_over(files, tmp_path, caplog):
    whole = {0: [0.0] * 7}
    for step in (5, 10):
        files.add("j", step, 0, whole)
        last = files.add("j", step, 1, {})
    files.add("j", 15, 0, whole)
    assert read(tmp_path).step == 10
    files.damaged.add(last)
    with caplog.at_level(logging.WARNING, "thalweg"):
        assert read(tmp_path).step == 5
    assert f"{last} is damaged; the snapshot before it is used" in caplog.text


def test_what_cannot_be_loaded_is_refused_with_the_reason(files, tmp_path):
    files.add("j", 5, 0, {0: [0.0] * 6})
    with pytest.raises(ValueError, match="no snapshot that all shards of a job have written"):
        read_latest([tmp_path / "shard0"], KINDS["adamw"], None)
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        read_latest([tmp_path / "nowhere"], KINDS["adamw"], None)
    files.add("j", 5, 1, {1: [0.0]})
    with pytest.raises(
        ValueError, match=r"is of an optimizer 'adam \(decoupled\).*', expected sgd"
    ):
        read(tmp_path, "sgd")
    for shard in (0, 1):
        files.add("k", 5, shard, {shard: [1.0] * (6 if shard == 0 else 1)})
    with pytest.raises(ValueError, match=r"several jobs: .*: j, k"):
        read(tmp_path)
    assert torch.equal(read(tmp_path, identity="k").weights["a.b"], torch.tensor(1.0))


def test_bucket_of_which_chunks_are_missing_is_not_used(files, tmp_path):
    files.add("j", 5, 0, {0: [0.0] * 6})
    files.add("j", 5, 1, {})
    with pytest.raises(ValueError, match="no snapshot that all shards"):
        read(tmp_path)
