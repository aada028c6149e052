"""Tests `thalweg status --sidecars` with sidecars whose answers the tests choose."""

import json

import pytest
from shard_answers import http_server

from thalweg.cli import _status_collectives, main
from thalweg.cli._look import Collectives


def flight(number, came=(0, 1), sent=0.5, done=0.25):
    return {
        "name": f"allreduce {number} of group 'default'",
        "what": "mean of 1024 elements of fp32",
        "came": [{"rank": rank, "seconds_ago": 1.5} for rank in came],
        "sent_seconds_ago": sent,
        "done_seconds_ago": done,
    }


def sidecar(*flights):
    return Collectives("a:1", "", [{"name": "gpt", "node": 2, "collectives": list(flights)}])


def rows(*sidecars):
    return [" ".join(line.split()) for line in _status_collectives.lines(sidecars)]


def test_what_is_open_is_shown_with_the_ranks_that_have_come():
    waiting = flight(8, came=[5], sent=None, done=None)
    assert rows(sidecar(flight(7), waiting)) == [
        "sidecar a:1 · job gpt · node 2 · the latest 2 collectives, 1 not done",
        "COLLECTIVE VALUES RANKS HERE CAME SENT DONE",
        "allreduce 7 of group 'default' mean of 1024 elements of fp32 0: 1.5 s ago, 1: 1.5 s ago "
        "500 ms ago 250 ms ago",
        "allreduce 8 of group 'default' mean of 1024 elements of fp32 5: 1.5 s ago not yet not yet",
    ]


def test_of_those_that_are_done_the_latest_ten_are_shown_and_all_that_are_not():
    early = flight(1, done=None)
    lines = rows(sidecar(early, *(flight(number) for number in range(2, 32))))
    numbers = [int(line.split()[1]) for line in lines if line.startswith("allreduce")]
    assert numbers == [1, *range(22, 32)]


def test_many_ranks_are_counted():
    assert "3: 1.5 s ago, 5 more" in rows(sidecar(flight(1, came=range(9))))[2]


def test_group_names_cannot_control_the_terminal():
    named = flight(1) | {"name": "barrier 1 of group '\x1b[2J'"}
    assert not any("\x1b" in line for line in rows(sidecar(named)))


def test_sidecars_without_a_job_or_an_answer_say_so():
    silent = Collectives("b:2", "not reachable: Connection refused", [])
    assert rows(Collectives("a:1", "", []), silent, sidecar()) == [
        "sidecar a:1 · no job",
        "",
        "sidecar b:2 not reachable: Connection refused",
        "",
        "sidecar a:1 · job gpt · node 2 · no collective yet",
    ]


def test_json_has_all_that_a_sidecar_says(capsys):
    answer = {"jobs": sidecar(flight(1)).jobs}
    with http_server({"/api/v1/collectives": json.dumps(answer)}) as address:
        assert main(["status", "--json", "--sidecars", address]) == 0
    expected = sidecar(flight(1))._replace(address=address)._asdict()
    assert json.loads(capsys.readouterr().out) == {"sidecars": [expected]}


def test_aggregator_is_no_sidecar(capsys):
    with http_server({}) as address:
        assert main(["status", "--sidecars", address]) == 1
    assert "expected the HTTP address of an aggregator or sidecar" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [["--sidecars", ""], ["--sidecars", "nowhere"], ["--sidecars", "a:1", "--shards", "b:2"]],
)
def test_wrong_options_are_refused(options, capsys):
    assert main(["status", *options]) == 2
    assert "--sidecars" in capsys.readouterr().err
