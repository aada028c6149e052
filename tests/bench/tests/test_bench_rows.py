"""Tests rows, bounds and what else `thalweg bench` computes from times."""

import json

import pytest

from thalweg_bench import latency, sweep
from thalweg_bench.cluster import Shape
from thalweg_bench.lab_case import LabCase, make_rows, run_alternating, slowest_bound
from thalweg_bench.rows import (
    Row,
    exchange_bound,
    format_table,
    hosted_bound,
    make_row,
    percentile,
    ring_bound,
    write_json,
)
from thalweg_bench.step_case import StepCase
from thalweg_bench.step_case import make_rows as make_step_rows

MBIT = 10**6


def case(nodes=4, shards=4, workers=1, rate=250 * MBIT, **changes):
    fields = {"size": 25_600_000, "dtype": "fp32", "peers": ("gloo",), "repeats": 5} | changes
    return LabCase(Shape(nodes, shards, workers, rate, "fp32"), **fields)


def test_row_has_the_median_and_the_spread():
    assert make_row("c", "gloo", 4, [3.0, 1.0, 2.0], None) == Row(
        "c", "gloo", 4, 2.0, 1.0, 3.0, None
    )


def test_json_is_a_list_of_rows_with_exactly_these_keys(tmp_path):
    write_json(tmp_path / "rows.json", [Row("c", "thalweg", 4, 2.0, 1.0, 3.0, None)])
    assert json.loads((tmp_path / "rows.json").read_text()) == [
        {
            "case": "c",
            "system": "thalweg",
            "bytes": 4,
            "median_s": 2.0,
            "min_s": 1.0,
            "max_s": 3.0,
            "bound_s": None,
        }
    ]


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)]
)
def test_percentile_is_one_of_the_values(percent, expected):
    assert percentile(range(100, 0, -1), percent) == expected


def test_percentile_of_one_value_is_that_value():
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(
    ("nodes", "shards", "expected"), [(4, 4, 0.8), (4, 8, 0.8), (4, 2, 1.6), (16, 1, 12.8)]
)
def test_exchange_takes_size_over_rate_unless_shards_are_few(nodes, shards, expected):
    assert exchange_bound(25_000_000, 250 * MBIT, nodes, shards) == pytest.approx(expected)


def test_slow_shard_delays_all_as_little_as_its_share_allows():
    # Every shard's link carries 4 nodes' bytes in proportion to its rate.
    bound = exchange_bound(25_000_000, 250 * MBIT, 4, 4, slow_factor=10)
    assert bound == pytest.approx(0.8 * 40 / 31)


def test_only_shard_may_be_the_slow_one():
    assert exchange_bound(4, 32, 1, 1, slow_factor=10) == pytest.approx(10)


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"), [(2, 2, 0.8), (4, 4, 1.2), (8, 4, 1.4), (8, 8, 1.4)]
)
def test_ring_carries_its_share_over_each_link_once(ranks, nodes, expected):
    assert ring_bound(25_000_000, 250 * MBIT, ranks, nodes) == pytest.approx(expected)


def test_nothing_bounds_what_needs_no_link():
    assert exchange_bound(4, None, 4, 4) is None
    assert exchange_bound(4, MBIT, 1, 0) is None
    assert ring_bound(4, None, 4, 4) is None
    assert ring_bound(4, MBIT, 4, 1) is None


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_bound_with_hosted_shards_is_the_closed_form_at_equal_rates(nodes: int) -> None:
    for shards in range(nodes + 1):
        expected = 2 * nodes * (nodes - 1) / (nodes**2 + shards * nodes - 2 * shards)
        assert hosted_bound(1000, 8000, nodes, shards) == pytest.approx(expected)


def test_bound_with_a_slow_node_is_its_own_link_when_others_can_sum_everything() -> None:
    # The slow node carries the gradient at a quarter of the rate; the others sum a third each.
    assert hosted_bound(1000, 8000, 4, 0, slow_node=4) == pytest.approx(4)


def test_bounds_use_the_rate_that_iperf3_got():
    goodput = 240 * MBIT
    seconds = 25_600_000 * 8 / goodput
    times = {"iperf3": [seconds] * 3, "gloo": [1.3], "thalweg": [0.9]}
    rows = {row.system: row for row in make_rows(case(), times)}
    assert list(rows) == ["thalweg", "gloo", "iperf3"]
    assert rows["thalweg"].bound_s == pytest.approx(seconds)
    assert rows["gloo"].bound_s == pytest.approx(1.5 * seconds)
    assert rows["iperf3"].bound_s == pytest.approx(25_600_000 * 8 / (250 * MBIT))


def test_bounds_use_the_nominal_rate_without_iperf3():
    (row,) = make_rows(case(), {"thalweg": [0.9]})
    assert row.bound_s == pytest.approx(25_600_000 * 8 / (250 * MBIT))


def test_case_names_tell_cases_apart():
    names = {
        case().name,
        case(dtype="fp16").name,
        case(workers=2).name,
        case(rate=None).name,
        case(nodes=1, shards=0).name,
        LabCase(Shape(4, 4, 1, 250 * MBIT, "fp32", 10), 4, "fp32", (), 1).name,
        LabCase(Shape(4, 4, 1, 250 * MBIT, "fp32", 10, True), 4, "fp32", (), 1).name,
    }
    assert len(names) == 7
    assert case(workers=2, dtype="fp16").name == "4 nodes x 2 workers, 4 shards, 250mbit, fp16"


def test_watchdog_knows_of_no_bound_without_links():
    assert slowest_bound(case(rate=None)) is None


def test_systems_take_turns_and_the_first_turn_does_not_count():
    calls = []

    def measure(system, repeat):
        calls.append((system, repeat))
        return float(repeat)

    assert run_alternating(["a", "b"], 2, measure) == {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_communication_is_what_the_step_takes_longer_than_without():
    step = StepCase(Shape(4, 4, 1, 250 * MBIT, "fp16"), "swin-t", ("ddp",), 3)
    times = {"local": [0.1, 0.3, 0.2], "thalweg": [1.2, 1.4, 1.3], "ddp": [5.0, 5.0, 5.0]}
    rows = {(row.case.split()[-1], row.system): row for row in make_step_rows(step, times)}
    assert rows["step", "thalweg"].median_s == pytest.approx(1.3)
    assert rows["communication", "thalweg"].median_s == pytest.approx(1.1)
    assert rows["communication", "ddp"].min_s == pytest.approx(4.8)
    size = 28_288_354 * 4
    assert rows["communication", "thalweg"].bound_s == pytest.approx(size / 2 * 8 / 250e6)
    assert rows["communication", "ddp"].bound_s == pytest.approx(1.5 * size * 8 / 250e6)


def test_latency_rows_are_percentiles_of_all_repeats():
    runs = {"thalweg": [[1.0] * 99 + [9.0], [2.0] * 100]}
    p50, p99 = latency.make_rows(case(rate=None), runs)
    assert (p50.median_s, p50.min_s, p50.max_s) == (2.0, 1.0, 2.0)
    assert (p99.median_s, p99.min_s, p99.max_s) == (2.0, 1.0, 2.0)
    assert p50.case.endswith(" p50")
    assert p99.case.endswith(" p99")


def test_an_allreduce_lasts_from_the_first_begin_to_the_last_end():
    worker0, worker1 = [(0.0, 1.0), (5.0, 6.0)], [(0.5, 2.0), (4.0, 5.5)]
    assert latency.durations([worker0, worker1]) == [2.0, 2.0]


def test_sweep_goes_from_4_kib_to_256_mib():
    sizes = list(sweep.sizes())
    assert (sizes[0], sizes[-1], len(sizes)) == (4096, 256 << 20, 9)


def test_table_compares_equal_sizes_only():
    rows = [Row("c", s, n, 2.0 * n, 2.0, 2.0, None) for n in (4, 8) for s in ("thalweg", "gloo")]
    assert [line.split()[-1] for line in format_table(rows).splitlines()[1:]] == ["-", "1.00x"] * 2


def test_table_shows_how_close_to_the_bound_and_how_much_slower_than_thalweg():
    rows = [Row("c", "thalweg", 4, 2.0, 2.0, 2.0, 1.9), Row("c", "gloo", 4, 3.0, 3.0, 3.0, None)]
    heading, ours, theirs = format_table(rows).splitlines()
    assert heading.split()[-4:] == ["of", "bound", "vs", "thalweg"]
    assert ours.split()[-2:] == ["0.950", "-"]
    assert theirs.split()[-2:] == ["-", "1.50x"]
