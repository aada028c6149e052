"""Tests which clusters `thalweg bench placement` measures, and its tables."""

import json

from thalweg_bench.case import Outcome
from thalweg_bench.lab_case import LabCase
from thalweg_bench.placement import PlacementCase
from thalweg_bench.rows import Row

SLOW, FAST = 250_000_000, 1_000_000_000


def test_every_number_of_nodes_meets_every_number_of_aggregators_up_to_it_at_every_rate():
    case = PlacementCase(nodes=(2, 3), rate=(SLOW, FAST))
    shapes = [lab.shape for lab in case.cases()]
    assert [(s.nodes, s.shards, s.rate) for s in shapes] == [
        (nodes, shards, rate)
        for rate in (SLOW, FAST)
        for nodes in (2, 3)
        for shards in range(nodes + 1)
    ]
    assert all(shape.local for shape in shapes)


def measured(case):
    return Outcome(
        [
            Row(case.name, "thalweg", case.size, 1.0, 1.0, 1.0, 0.9),
            Row(case.name, "gloo", case.size, 1.5, 1.5, 1.5, 1.2),
        ]
    )


def test_rows_of_all_clusters_are_saved_and_tabulated(monkeypatch, tmp_path):
    monkeypatch.setattr(LabCase, "run", measured)
    path = tmp_path / "rows.json"
    case = PlacementCase(nodes=(2, 4), shards=(0, 4), rate=(SLOW, FAST), json=path)
    found = case.run()
    assert [row.case for row in found.rows if row.system == "gloo"] == [
        f"{nodes} nodes, local + {shards} shards, {rate}, fp32"
        for rate in ("250mbit", "1gbit")
        for nodes, shards in ((2, 0), (4, 0), (4, 4))
    ]
    assert len(json.loads(path.read_text())) == len(found.rows)
    tables = [line for line in str(found).splitlines() if "1.50" in line and "(" in line]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in tables] == [
        ["2", "1.50 (0.90)", ""],
        ["4", "1.50 (0.90)", "1.50 (0.90)"],
    ] * len(case.rate)
