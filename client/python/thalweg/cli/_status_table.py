"""Formats the table of `thalweg status` from two samples of the shards."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thalweg import __version__
from thalweg.cli._look import Look

_FAULTS = 8
_NOTABLE_SECONDS = 2e-3  # a mean delay below it makes no node the slowest
_NONE = "-"
_Json = Mapping[str, Any]


class Job(NamedTuple):
    """One job, merged over all answering shards: sums, or rates and sums of an interval."""

    state: str
    codec: str
    workers: int
    shards: int  # number that have answered, out of `of_shards`
    of_shards: int
    rounds: float
    raw_bytes: float
    wire_bytes: float
    last_rounds: tuple[float, ...]  # by node
    waited_seconds: tuple[float, ...]
    reconnections: tuple[float, ...]
    nodes: tuple[_Json, ...]
    remark: str  # a failure, or the nodes it waits for
    placement: _Json | None  # as its first shard tells it
    update_seconds: float  # spent on steps of an optimizer, where shards keep the weights
    kept_bytes: float  # of residuals, or of weights and the optimizer's state


def lines(before: Sequence[Look], now: Sequence[Look]) -> list[str]:
    """Returns the table's lines, cut to the width of the terminal if they go to one.

    `before` may lack shards or be empty: then there are no rates.
    """
    clock = time.strftime("%H:%M:%S")
    result = [f"thalweg {__version__} · {count(len(now), 'shard')} · {clock}", ""]
    result += columns(_shard_rows(before, now), "<><>>>>>>")
    result += [f"{look.address}  {look.error}" for look in now if look.error]
    earlier = merged_jobs(_comparable(before, now))
    for name, job in merged_jobs(now).items():
        result += ["", *_job_lines(name, job, earlier.get(name))]
    result = [clean(line) for line in [*result, *_fault_lines(now)]]
    if not sys.stdout.isatty():
        return result
    width = shutil.get_terminal_size((120, 24)).columns
    return [line if len(line) <= width else line[: width - 1] + "…" for line in result]


def clean(text: str) -> str:
    """Removes control characters, which a terminal would obey: texts come from anywhere."""
    return "".join(c if c.isprintable() else "?" for c in text)


def size(value: float) -> str:
    """Formats bytes, for example 118 MB."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:.0f} {units[0]}"


def duration(seconds: float) -> str:
    """Formats a duration, for example 12 ms, 3.4 s, 2 min, 5 h 7 min or 3 d 4 h."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def count(number: int, what: str) -> str:
    """Returns for example "1 node" or "2 nodes"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Returns rows of cells as lines, padded to columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)).rstrip()
            for row in rows]  # fmt: skip


def _comparable(before: Sequence[Look], now: Sequence[Look]) -> list[Look]:
    """Returns the earlier samples of processes that still run: their counters only grow."""
    current = {look.address: look for look in now if not look.error}
    return [
        look
        for look in before
        if not look.error
        and look.address in current
        and _era(look) == _era(current[look.address])
        and _seconds(look) < _seconds(current[look.address])
    ]


def _era(look: Look) -> float:
    return float(look.shard["started_unix_seconds"])


def _seconds(look: Look) -> float:
    return float(look.shard["uptime_seconds"])


def _ratio(raw: float, wire: float) -> str:
    return f"{raw / wire:.3g}x" if raw > 0 and wire > 0 else _NONE


def _shard_rows(before: Sequence[Look], now: Sequence[Look]) -> list[list[str]]:
    rows = [["SHARD", "UP", "STATE", "JOBS", "ROUNDS/S", "RECEIVED", "SENT", "HELD", "RESERVED"]]
    earlier = {look.address: look for look in _comparable(before, now)}
    for look in now:
        if look.error:
            continue
        shard = look.shard
        row = [look.address, duration(_seconds(look))]
        row += ["draining" if shard["draining"] else "live", str(shard["jobs"])]
        if (old := earlier.get(look.address)) is None:
            row += [_NONE] * 3
        else:
            passed = _seconds(look) - _seconds(old)
            row.append(f"{(shard['rounds'] - old.shard['rounds']) / passed:,.0f}")
            for way in ("received", "sent"):
                grown = shard[way]["wire_bytes"] - old.shard[way]["wire_bytes"]
                row.append(f"{size(grown / passed)}/s")
        row += [size(shard["held_bytes"]), _NONE]
        if "memory_budget_bytes" in shard:  # older shards have none
            budget = size(shard["memory_budget_bytes"])
            row[-1] = f"{size(shard['memory_reserved_bytes'])} of {budget}"
        rows.append(row)
    return rows


def merged_jobs(looks: Iterable[Look]) -> dict[str, Job]:
    """Returns jobs by name, each merged from all shards that have answered.

    Jobs with different keys may have one name; the beginning of the key then follows it.
    """
    parts: dict[tuple[str, str], list[_Json]] = {}
    for look in looks:
        for job in look.jobs:
            parts.setdefault((job["name"], job.get("identity", "")), []).append(job)
    counts = Counter(name for name, _ in parts)

    def label(name: str, identity: str) -> str:
        return name if counts[name] == 1 else f"{name} ({identity[:8] or 'no key'})"

    return {label(*key): _merge(parts[key]) for key in sorted(parts)}


def _merge(parts: Sequence[_Json]) -> Job:
    """Merges one job's parts on several shards: adds sums and takes the worst of the states."""
    worst = max(parts, key=lambda part: ("running", "gathering", "failed").index(part["state"]))
    count = max(len(part["nodes"]) for part in parts)

    def by_node(key: str) -> tuple[float, ...]:
        # A shard of an earlier release counts no reconnections.
        lists = [[node.get(key, 0) for node in part["nodes"]] for part in parts]
        return tuple(sum(values[i] for values in lists if i < len(values)) for i in range(count))

    def bytes_of(kind: str) -> float:
        return float(sum(part[way][kind] for part in parts for way in ("received", "sent")))

    return Job(
        state=worst["state"],
        codec=worst["codec"],
        workers=worst["workers"],
        shards=len(parts),
        of_shards=worst["shards"],
        rounds=sum(part["rounds"] for part in parts),
        raw_bytes=bytes_of("raw_bytes"),
        wire_bytes=bytes_of("wire_bytes"),
        last_rounds=by_node("last_rounds"),
        waited_seconds=by_node("waited_seconds"),
        reconnections=by_node("reconnections"),
        nodes=tuple(worst["nodes"]),
        remark=worst["failure"] or _waiting(parts),
        placement=next((told for part in parts if (told := part.get("placement"))), None),
        update_seconds=sum(part.get("update_seconds", 0.0) for part in parts),
        kept_bytes=sum(part.get("residual_bytes", 0) for part in parts),
    )


def _waiting(parts: Sequence[_Json]) -> str:
    waits = [part for part in parts if part["waiting"] and part["waiting"]["seconds"] >= 1]
    if not waits:
        return ""
    longest = max(waits, key=lambda part: float(part["waiting"]["seconds"]))
    names = [f"node {i} ({longest['nodes'][i]['name']})" for i in longest["waiting"]["nodes"]]
    return f"waiting for {', '.join(names)} for {duration(longest['waiting']['seconds'])}"


def _job_lines(name: str, job: Job, before: Job | None) -> list[str]:
    grown = job if before is None or before.shards != job.shards else _minus(job, before)
    if grown.rounds <= 0:
        grown = job  # nothing has moved: show the totals so far
    head = [f"job {name}", job.state, job.codec, count(len(job.nodes), "node")]
    head += [count(job.workers, "worker"), f"{size(job.raw_bytes)} as {size(job.wire_bytes)}"]
    head.append(_ratio(grown.raw_bytes, grown.wire_bytes))
    if job.shards != job.of_shards:
        head.append(f"seen on {job.shards} of {job.of_shards} shards")
    rows = [["NODE", "HOST", "STATE", "WORKERS", "HEARD OF", "LAST IN", "MEAN DELAY WHEN LAST", ""]]
    waited = sum(grown.waited_seconds)
    for i, node in enumerate(job.nodes):
        last, seconds = grown.last_rounds[i], grown.waited_seconds[i]
        active = node["state"] == "active"
        remarks = []
        delays = last > 0 and seconds / last >= _NOTABLE_SECONDS
        if len(job.nodes) > 1 and delays and seconds > 0.6 * waited:
            remarks.append("slowest")
        if job.reconnections[i]:
            remarks.append(f"reconnected {count(int(job.reconnections[i]), 'time')}")
        rows.append(
            [
                str(i),
                node["name"],
                node["state"],
                str(node["workers"]),
                f"{duration(node['silent_seconds'])} ago" if active else _NONE,
                f"{last / grown.rounds:.0%}" if grown.rounds else _NONE,
                duration(seconds / last) if last else _NONE,
                ", ".join(remarks),
            ]
        )
    result = [" · ".join(head), *(f"  {line}" for line in columns(rows, "><<>>>><"))]
    if job.update_seconds:
        result.append(
            f"  weights on the shards: {size(job.kept_bytes)} with the optimizer's state, "
            f"{duration(grown.update_seconds)} of updates"
        )
    return [*result, f"  {job.remark}"] if job.remark else result


def _minus(job: Job, before: Job) -> Job:
    def less(now: tuple[float, ...], then: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(a - b for a, b in zip(now, then, strict=True))

    if len(job.nodes) != len(before.nodes) or job.rounds < before.rounds:
        return job  # it is another job with the same name
    return job._replace(
        rounds=job.rounds - before.rounds,
        raw_bytes=job.raw_bytes - before.raw_bytes,
        wire_bytes=job.wire_bytes - before.wire_bytes,
        last_rounds=less(job.last_rounds, before.last_rounds),
        waited_seconds=less(job.waited_seconds, before.waited_seconds),
        update_seconds=job.update_seconds - before.update_seconds,
    )


def merged_faults(looks: Iterable[Look]) -> list[_Json]:
    """Returns the faults, latest first; keeps one report of those by each shard of a failed job."""
    latest: dict[tuple[str, str, str], _Json] = {}
    for look in looks:
        for fault in look.shard.get("faults", ()):
            key = (fault["job"], fault["reason"], fault["kind"])
            if key not in latest or fault["seconds_ago"] < latest[key]["seconds_ago"]:
                latest[key] = fault
    return sorted(latest.values(), key=lambda fault: float(fault["seconds_ago"]))


def _fault_lines(looks: Iterable[Look]) -> list[str]:
    faults = merged_faults(looks)[:_FAULTS]
    if not faults:
        return []
    rows = [["FAULTS", "JOB", "REASON", ""]]
    for fault in faults:
        ago = f"{duration(fault['seconds_ago'])} ago"
        rows.append([ago, fault["job"], fault["reason"], fault["message"]])
    return ["", *columns(rows, "<<<<")]
