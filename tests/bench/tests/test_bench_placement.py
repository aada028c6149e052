"""Tests which clusters `thalweg bench placement` measures."""

import json

from thalweg_bench import lab_case, placement
from thalweg_bench.cluster import Shape
from thalweg_bench.lab_case import LabCase, Outcome
from thalweg_bench.rows import Row

SLOW, FAST = 250_000_000, 1_000_000_000
CASE = LabCase(Shape(4, 0, 1, SLOW, "fp32", local=True), 4, "fp32", ("gloo",), 1)


def test_every_number_of_nodes_meets_every_number_of_aggregators_up_to_it_at_every_rate():
    sweep = placement.Sweep(CASE, [2, 3], range(4), [SLOW, FAST])
    found = [(s.nodes, s.shards, s.rate) for s in sweep.shapes()]
    assert found == [
        (nodes, shards, rate)
        for rate in (SLOW, FAST)
        for nodes, most in ((2, 2), (3, 3))
        for shards in range(most + 1)
    ]
    assert all(shape.local for shape in sweep.shapes())


def measured(case):
    rows = [
        Row(case.name, "thalweg", case.size, 1.0, 1.0, 1.0, 0.9),
        Row(case.name, "gloo", case.size, 1.5, 1.5, 1.5, 1.2),
    ]
    return Outcome(rows, [])


def test_rows_of_all_shapes_are_returned_saved_drawn_and_tabulated(monkeypatch, tmp_path):
    monkeypatch.setattr(lab_case, "run", measured)
    sweep = placement.Sweep(CASE, [2, 4], [0, 4], [SLOW, FAST])
    rows = placement.run(sweep, tmp_path / "rows.json")
    assert [row.case for row in rows if row.system == "gloo"] == [
        f"{nodes} nodes, local + {shards} shards, {rate}, fp32"
        for rate in ("250mbit", "1gbit")
        for nodes, shards in ((2, 0), (4, 0), (4, 4))
    ]
    assert len(json.loads((tmp_path / "rows.json").read_text())) == len(rows)
    placement.plot(tmp_path / "plot.png", rows, sweep)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    table = placement.format_grid(rows, sweep).splitlines()
    assert table[:6] == [
        "250mbit: times as fast as Gloo (part of the bound)",
        "",
        "| nodes | + 0 | + 4 |",
        "|---|---|---|",
        "| 2 | 1.50 (0.90) |  |",
        "| 4 | 1.50 (0.90) | 1.50 (0.90) |",
    ]
