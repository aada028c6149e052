"""Formats what `thalweg status --sidecars` shows: the latest collectives of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thalweg.cli._look import Collectives
from thalweg.cli._status_table import clean, columns, count, duration

_MOST_DONE = 10  # of those that are done, the latest; the others are shown all
_MOST_RANKS = 4
_Json = Mapping[str, Any]


def lines(sidecars: Sequence[Collectives]) -> list[str]:
    """Returns the table's lines, a table for each job of each sidecar."""
    result: list[str] = []
    for sidecar in sidecars:
        head = f"sidecar {sidecar.address}"
        if sidecar.error:
            result += ["", f"{head}  {clean(sidecar.error)}"]
        elif not sidecar.jobs:
            result += ["", f"{head} · no job"]
        for job in sidecar.jobs:
            result += ["", *_job_lines(head, job)]
    return result[1:]


def _job_lines(head: str, job: _Json) -> list[str]:
    flights: list[_Json] = job["collectives"]
    head = f"{head} · job {clean(job['name'])} · node {job['node']}"
    unfinished = sum(flight["done_seconds_ago"] is None for flight in flights)
    if not flights:
        return [f"{head} · no collective yet"]
    number_done = len(flights) - unfinished
    head += f" · the latest {count(len(flights), 'collective')}, {unfinished} not done"
    rows = [["COLLECTIVE", "VALUES", "RANKS HERE CAME", "SENT", "DONE"]]
    for flight in flights:
        is_done = flight["done_seconds_ago"] is not None
        number_done -= is_done
        if is_done and number_done >= _MOST_DONE:
            continue
        rows.append(
            [
                clean(flight["name"]),
                clean(flight["what"]),
                _arrivals(flight["came"]),
                _ago(flight["sent_seconds_ago"]),
                _ago(flight["done_seconds_ago"]),
            ]
        )
    return [head, *(f"  {line}" for line in columns(rows, "<<<<<"))]


def _arrivals(came: Sequence[_Json]) -> str:
    """Returns the workers' ranks in the group and when they came, the first ones by name."""
    texts = [f"{each['rank']}: {_ago(each['seconds_ago'])}" for each in came[:_MOST_RANKS]]
    if len(came) > _MOST_RANKS:
        texts.append(f"{len(came) - _MOST_RANKS} more")
    return ", ".join(texts)


def _ago(seconds: float | None) -> str:
    return "not yet" if seconds is None else f"{duration(seconds)} ago"
