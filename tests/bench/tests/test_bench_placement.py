"""Tests which clusters `thalweg bench placement` measures."""

from thalweg_bench import lab_case, placement
from thalweg_bench.cluster import Shape
from thalweg_bench.lab_case import LabCase, Outcome
from thalweg_bench.rows import Row

FIRST = Shape(4, 0, 1, 250_000_000, "fp32", local=True)


def test_every_number_of_nodes_meets_every_number_of_aggregators_up_to_it():
    found = [(s.nodes, s.shards, s.local) for s in placement.shapes(FIRST, [2, 3], range(4))]
    assert found == [
        *[(2, shards, True) for shards in (0, 1, 2)],
        *[(3, shards, True) for shards in (0, 1, 2, 3)],
    ]


def test_rows_of_all_shapes_are_returned_and_drawn(monkeypatch, tmp_path):
    def run(case):
        rows = [Row(case.name, s, case.size, 1.0, 1.0, 1.0, 0.9) for s in ("thalweg", "gloo")]
        return Outcome(rows, [])

    monkeypatch.setattr(lab_case, "run", run)
    case = LabCase(FIRST, 4, "fp32", ("gloo",), 1)
    rows = placement.run(case, [2, 4], [0, 4])
    assert [row.case for row in rows if row.system == "gloo"] == [
        "2 nodes, local + 0 shards, 250mbit, fp32",
        "4 nodes, local + 0 shards, 250mbit, fp32",
        "4 nodes, local + 4 shards, 250mbit, fp32",
    ]
    placement.plot(tmp_path / "plot.png", rows, case, [2, 4])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
