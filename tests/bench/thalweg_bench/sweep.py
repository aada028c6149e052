"""`thalweg bench sweep` runs allreduces of tensors from 4 KiB to 256 MiB."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from thalweg_bench import lab_case
from thalweg_bench.cluster import Cluster
from thalweg_bench.lab_case import LabCase
from thalweg_bench.rows import Row

_FIRST, _LAST, _FACTOR = 4 << 10, 256 << 20, 4
_LARGE = 32 << 20  # from here on a few repeats suffice, and take minutes
_LARGE_REPEATS = 3


def sizes() -> Iterator[int]:
    size = _FIRST
    while size <= _LAST:
        yield size
        size *= _FACTOR


def run(case: LabCase) -> list[Row]:
    """Runs `case` with each of the sizes. Raises BenchError, LabError or ServerError."""
    cases = [replace(case, size=size, repeats=_repeats(case.repeats, size)) for size in sizes()]
    rows: list[Row] = []
    with Cluster(case.shape) as cluster:
        lab_case.start_workers(cluster, cases[-1])
        for one in cases:
            rows += lab_case.measure(cluster, one).rows
    return rows


def _repeats(wanted: int, size: int) -> int:
    return min(wanted, _LARGE_REPEATS) if size >= _LARGE else wanted
