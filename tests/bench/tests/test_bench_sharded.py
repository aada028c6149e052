"""Tests what `thalweg bench fsdp` runs and shows, without servers."""

import pytest

from thalweg_bench import sharded_case
from thalweg_bench.rows import make_row
from thalweg_bench.shape import Shape
from thalweg_bench.sharded_case import FsdpCase

FLAT = Shape(4, 0, 1, 8_000_000, 1)
HYBRID = Shape(2, 0, 2, 8_000_000, 1)


def make(shape, width, blocks, *codecs):
    form = "flat" if shape is FLAT else "hybrid"
    sizes = {"width": width, "blocks": blocks}
    return FsdpCase(shape=shape, cases=(form,), codecs=codecs, hybrid_codecs=codecs, **sizes)


def test_flat_and_hybrid_cases_have_their_systems_each_beside_gloo():
    flat = make(FLAT, 512, 16, "int8").kinds()
    assert list(flat) == [
        *("gloo fsdp2", "gloo fsdp1", "thalweg fsdp2", "thalweg fsdp1"),
        "thalweg fsdp2 int8",
    ]
    assert not any(kind.hybrid for kind in flat.values())
    hybrid = make(HYBRID, 512, 16, "powersgd:4").kinds()
    assert list(hybrid) == ["gloo fsdp2", "thalweg fsdp2", "thalweg fsdp2 powersgd:4"]
    assert all(kind.hybrid for kind in hybrid.values())


def test_bytes_are_those_of_gathers_and_reductions_over_other_nodes():
    case = make(FLAT, 256, 2, "fp16", "int8")
    kinds, part = case.kinds(), case.elements * 3 / 4
    assert case.sent_bytes(kinds["gloo fsdp2"]) == 4 * 4 * part
    assert case.sent_bytes(kinds["thalweg fsdp1"]) == 3 * 4 * part
    assert case.sent_bytes(kinds["thalweg fsdp2 fp16"]) == 3 * 2 * part
    assert case.sent_bytes(kinds["thalweg fsdp2 int8"]) == pytest.approx(3 * 1.016 * part, rel=1e-3)


def test_bytes_of_a_hybrid_are_those_of_sums_over_copies_of_shards():
    case = make(HYBRID, 512, 1, "powersgd:4")
    kinds = case.kinds()
    assert case.sent_bytes(kinds["thalweg fsdp2"]) == 4 * case.elements
    # Two shards of n/2 rows of each matrix n x m send 4 (n/2 + m) elements; 13 vectors go whole.
    matrices = ((1536, 512), (512, 512), (2048, 512), (512, 2048))
    factors = sum(2 * 4 * (n // 2 + m) for n, m in matrices)
    assert case.sent_bytes(kinds["thalweg fsdp2 powersgd:4"]) == 4 * (factors + 13 * 512)


def test_table_compares_times_with_gloo_and_bytes_with_gloo_and_without_a_codec():
    times = {"gloo fsdp2": 4.0, "thalweg fsdp2": 2.0, "thalweg fsdp2 int8": 1.0}
    rows = [make_row("c", system, 1000, [seconds], 1.0) for system, seconds in times.items()]
    lines = sharded_case.table(rows, [40.0, 30.0, 6.0]).splitlines()
    assert lines[2].split()[-10::2] == ["0.250", "1.00", "40.00", "1.000", "1.333"]
    assert lines[4].split()[-10::2] == ["1.000", "4.00", "6.00", "0.150", "0.200"]
