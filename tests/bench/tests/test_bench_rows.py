"""Tests rows, bounds and what else `thalweg bench` computes from times."""

import json
from dataclasses import replace

import pytest

from thalweg_bench.case import run_alternating
from thalweg_bench.cluster import durations
from thalweg_bench.lab_case import LabCase, LatencyCase
from thalweg_bench.rows import Row, format_table, make_row, percentile, write_json
from thalweg_bench.shape import Shape
from thalweg_bench.step_case import StepCase

MBIT = 10**6
SIZE = 25_000_000
CASE = LabCase(shape=Shape())


def lines_of(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_row_has_the_median_and_the_spread():
    found = make_row("c", "gloo", 4, [3.0, 1.0, 2.0], None)
    assert found == Row("c", "gloo", 4, 2.0, 1.0, 3.0, None)


def test_json_replaces_what_was_there(tmp_path):
    for document in ([1], [{"case": "c"}]):
        write_json(tmp_path / "rows.json", document)
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"case": "c"}]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)]
)
def test_percentile_is_one_of_the_values(percent, expected):
    assert percentile(range(100, 0, -1), percent) == expected
    assert percentile([7.0], percent) == 7.0


@pytest.mark.parametrize(
    ("nodes", "shards", "slow", "expected"),
    [
        *((4, 4, 1, 0.8), (4, 8, 1, 0.8), (4, 2, 1, 1.6), (16, 1, 1, 12.8)),
        # Every shard's link carries 4 nodes' bytes in proportion to its rate.
        (4, 4, 10, 0.8 * 40 / 31),
        (1, 1, 10, 8.0),
    ],
)
def test_exchange_takes_size_over_rate_unless_shards_are_few(nodes, shards, slow, expected):
    shape = Shape(nodes, shards, slow_shard=slow)
    assert shape.exchange_bound(SIZE, 250 * MBIT) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("nodes", "workers", "expected"), [(2, 1, 0.8), (4, 1, 1.2), (4, 2, 1.4), (8, 1, 1.4)]
)
def test_ring_carries_its_share_over_each_link_once(nodes, workers, expected):
    assert Shape(nodes, 4, workers).ring_bound(SIZE, 250 * MBIT) == pytest.approx(expected)


def test_nothing_bounds_what_needs_no_link():
    alone = Shape(1, 0)
    assert [Shape().exchange_bound(4, None), alone.exchange_bound(4, MBIT)] == [None, None]
    assert [Shape().ring_bound(4, None), alone.ring_bound(4, MBIT)] == [None, None]
    assert replace(CASE, shape=Shape(rate=None)).slowest is None


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_bound_with_hosted_shards_is_the_closed_form_at_equal_rates(nodes):
    for shards in range(nodes + 1):
        expected = 2 * nodes * (nodes - 1) / (nodes**2 + shards * nodes - 2 * shards)
        shape = Shape(nodes, shards, local_shards=1)
        assert shape.exchange_bound(1000, 8000) == pytest.approx(expected)


def test_bound_with_a_slow_node_is_its_own_link_when_others_can_sum_everything():
    # The slow node carries the gradient at a quarter of the rate; the others sum a third each.
    shape = Shape(4, 0, local_shards=1, slow_node=4)
    assert shape.exchange_bound(1000, 8000) == pytest.approx(4)


def test_bounds_use_the_rate_that_iperf3_got_or_else_the_nominal_one():
    nominal = 25_600_000 * 8 / (250 * MBIT)
    seconds = 25_600_000 * 8 / (240 * MBIT)
    times = {"iperf3": [seconds] * 3, "gloo": [1.3], "thalweg": [0.9]}
    found = replace(CASE, peers=("gloo", "iperf3")).rows(times)
    bounds = {"thalweg": seconds, "gloo": 1.5 * seconds, "iperf3": nominal}
    assert {row.system: row.bound_s for row in found} == pytest.approx(bounds)
    (row,) = CASE.rows({"thalweg": [0.9]})
    assert row.bound_s == pytest.approx(nominal)


def test_case_names_tell_cases_apart():
    shapes = [Shape(), Shape(workers=2), Shape(rate=None), Shape(1, 0), Shape(slow_shard=10)]
    shapes += [Shape(slow_shard=10, weighted=True), Shape(local_shards=1), Shape(slow_node=2)]
    assert len({replace(CASE, shape=shape).name for shape in shapes}) == len(shapes)
    case = LabCase(shape=Shape(workers=2), dtype="fp16")
    assert case.name == "4 nodes x 2 workers, 4 shards, 250mbit, fp16"


def test_systems_take_turns_and_the_first_turn_does_not_count():
    calls = []

    def measure(system, repeat):
        calls.append((system, repeat))
        return float(repeat)

    assert run_alternating(["a", "b"], 2, measure) == {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_communication_is_what_the_step_takes_longer_than_without():
    step = StepCase(model="swin-t", codec="fp16")
    times = {"local": [0.1, 0.3, 0.2], "thalweg": [1.2, 1.4, 1.3], "ddp": [5.0, 5.0, 5.0]}
    rows = {(row.case.split()[-1], row.system): row for row in step.rows(times)}
    assert rows["step", "thalweg"].median_s == pytest.approx(1.3)
    assert rows["communication", "thalweg"].median_s == pytest.approx(1.1)
    assert rows["communication", "ddp"].min_s == pytest.approx(4.8)
    size = 28_288_354 * 4
    assert rows["communication", "thalweg"].bound_s == pytest.approx(size / 2 * 8 / 250e6)
    assert rows["communication", "ddp"].bound_s == pytest.approx(1.5 * size * 8 / 250e6)


def test_latency_rows_are_percentiles_of_all_repeats():
    runs = {"thalweg": [[1.0] * 99 + [9.0], [2.0] * 100]}
    p50, p99 = LatencyCase().percentiles(runs)
    assert (p50.median_s, p50.min_s, p50.max_s) == (2.0, 1.0, 2.0)
    assert (p99.median_s, p99.min_s, p99.max_s) == (2.0, 1.0, 2.0)
    assert [p50.case[-4:], p99.case[-4:]] == [" p50", " p99"]


def test_an_allreduce_lasts_from_the_first_begin_to_the_last_end():
    worker0, worker1 = [(0.0, 1.0), (5.0, 6.0)], [(0.5, 2.0), (4.0, 5.5)]
    assert durations([worker0, worker1]) == [2.0, 2.0]


def test_table_compares_equal_sizes_only():
    rows = [Row("c", s, n, 2.0 * n, 2.0, 2.0, None) for n in (4, 8) for s in ("thalweg", "gloo")]
    assert [line[-1] for line in lines_of(format_table(rows))[2:]] == ["-", "1.00x"] * 2


def test_table_shows_how_close_to_the_bound_and_how_much_slower_than_thalweg():
    rows = [Row("c", "thalweg", 4, 2.0, 2.0, 2.0, 1.9), Row("c", "gloo", 4, 3.0, 3.0, 3.0, None)]
    heading, _, ours, theirs = lines_of(format_table(rows))
    assert heading[-2:] == ["of bound", "vs thalweg"]
    assert ours[-2:] == ["0.950", "-"]
    assert theirs[-2:] == ["-", "1.50x"]
