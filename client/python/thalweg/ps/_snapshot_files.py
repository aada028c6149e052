"""Reads the snapshots that shards have left in their folders, whatever job comes next."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg import _C
from thalweg.ps._rules import Kind

_log = logging.getLogger("thalweg")
_TENSOR = re.compile(r"(?P<name>.*) \[(?P<shape>[\d, ]*)\] of group \d+")
_Key = tuple[str, int, int]  # identity of a job, branch and step


class Saved(NamedTuple):
    """What all shards of a job kept at a step, in float32 and by parameter's name."""

    step: int
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]  # as torch has them


def read_latest(folders: Iterable[str | Path], kind: Kind, identity: str | None) -> Saved:
    """Returns the latest snapshot that all shards of its job have in these folders. One that is
    damaged is named in the log, and the one before it is taken. Raises ValueError: there is none,
    the job kept another kind of optimizer, or there are several jobs' and no `identity` says whose.
    """
    known = _complete(Path(folder) for folder in folders)
    jobs = sorted({job for job, _, _ in known})
    if identity is None and len(jobs) > 1:
        raise ValueError(
            f"thalweg: the folders have snapshots of several jobs: give the identity of one, "
            f"which is the name of its folder: {', '.join(jobs)}"
        )
    for key in sorted(known, reverse=True):
        if identity not in {None, key[0]}:
            continue
        try:
            return _read(known[key], kind)
        except RuntimeError as error:
            _log.warning("%s; the snapshot before it is used", str(error))
    raise ValueError("thalweg: the folders have no snapshot that all shards of a job have written")


def _complete(folders: Iterable[Path]) -> dict[_Key, list[Path]]:
    """Returns the files of snapshots of which no shard's is missing."""
    found: dict[_Key, dict[int, Path]] = {}
    shards: dict[_Key, int] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"thalweg: there is no folder {folder}")
        for path in folder.glob("*/*.snapshot"):
            try:
                header = _C.read_snapshot_header(str(path))
            except RuntimeError as error:
                _log.warning("%s; it is left out", str(error))
                continue
            key = (header["identity"], header["branch"], header["step"])
            found.setdefault(key, {})[header["shard"]] = path
            shards[key] = header["num_shards"]
    return {
        key: [paths[shard] for shard in sorted(paths)]
        for key, paths in found.items()
        if len(paths) == shards[key]
    }


def _read(paths: Sequence[Path], kind: Kind) -> Saved:
    buckets: dict[tuple[int, int, int], str] = {}
    chunks: dict[tuple[int, int, int], dict[int, tuple[int, list[Tensor]]]] = {}
    step = 0
    for path in paths:
        header, own = _C.read_snapshot(str(path))
        step = header["step"]
        buckets |= header["buckets"]
        for bucket, number, steps, slices in own:
            chunks.setdefault(bucket, {})[number] = (steps, slices)
    saved = Saved(step, {}, {})
    for bucket, description in buckets.items():
        rule, *lines = description.split("\n")
        if rule.split()[0] != kind.native:
            raise ValueError(
                f"thalweg: the snapshot is of an optimizer '{rule}', expected {kind.native}"
            )
        in_order = [chunks.get(bucket, {})[number] for number in sorted(chunks.get(bucket, {}))]
        _cut(saved, [_tensor(line) for line in lines], in_order, kind)
    return saved


def _cut(
    saved: Saved,
    tensors: Sequence[tuple[str, list[int]]],
    chunks: Sequence[tuple[int, list[Tensor]]],
    kind: Kind,
) -> None:
    """Adds the tensors of a bucket, whose chunks have its elements in their order."""
    sizes = [torch.Size(shape).numel() for _, shape in tensors]
    elements = sum(len(slices[0]) for _, slices in chunks)
    if elements != sum(sizes):
        raise RuntimeError(
            f"thalweg: a snapshot of step {saved.step} has {elements} elements of a bucket of "
            f"{sum(sizes)}"
        )
    steps = max((done for done, _ in chunks), default=0)
    weights = _joined(chunks, 0).split(sizes)
    moments = {
        name: _joined(chunks, slice_).split(sizes)
        for slice_, name in enumerate(kind.moments, start=1)
        if any(len(slices[slice_]) for _, slices in chunks)
    }
    for place, (name, shape) in enumerate(tensors):
        saved.weights[name] = weights[place].view(shape).clone()
        state = {key: values[place].view(shape).clone() for key, values in moments.items()}
        if state and kind.counts_steps:
            state["step"] = torch.tensor(float(steps), device="cpu")
        saved.states[name] = state


def _joined(chunks: Sequence[tuple[int, list[Tensor]]], slice_: int) -> Tensor:
    """Returns a slice of all chunks; one that has none has zeros."""
    parts = [
        slices[slice_] if len(slices[slice_]) else torch.zeros_like(slices[0])
        for _, slices in chunks
    ]
    return torch.cat(parts) if parts else torch.empty(0, device="cpu")


def _tensor(line: str) -> tuple[str, list[int]]:
    """Returns the name and the shape in a line of a description (docs/snapshots.md)."""
    found = _TENSOR.fullmatch(line)
    if found is None:
        raise RuntimeError(f"thalweg: a snapshot describes a tensor as '{line}'")
    return found["name"], [int(size) for size in found["shape"].split(", ") if size]
