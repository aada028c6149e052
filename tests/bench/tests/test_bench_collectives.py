"""Tests the bounds of collectives, and that the command line knows them all."""

import pytest

from thalweg_bench.collectives import KINDS
from thalweg_bench.collectives_case import CollectivesCase
from thalweg_bench.shape import Shape


def case_of(nodes, workers=1, rate=8_000_000):
    return CollectivesCase(shape=Shape(nodes, 0, workers, rate, 1), bytes=12_000_000)


# At 8 Mbit/s a megabyte takes a second.
@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("all_reduce", 18),  # 2 · 3/4 of them, as in a ring
        ("all_gather", 9),
        ("reduce_scatter", 9),
        ("all_to_all", 9),
        ("broadcast", 12),
        ("reduce", 12),
        ("barrier", None),
    ],
)
def test_bound_is_what_the_busiest_link_carries(name, seconds):
    assert case_of(4).bound_of(name) == (seconds and pytest.approx(seconds))


def test_only_what_each_worker_sends_to_each_grows_with_the_workers_of_a_node():
    assert case_of(4, 2).bound_of("all_to_all") == pytest.approx(18)
    assert case_of(4, 2).bound_of("all_gather") == pytest.approx(9)


def test_nothing_bounds_one_node_or_links_without_a_rate():
    assert case_of(1, 4).bound_of("all_gather") is None
    assert case_of(4, rate=None).bound_of("all_gather") is None


def test_command_line_knows_all_collectives():
    assert set(CollectivesCase().only) == set(KINDS)
