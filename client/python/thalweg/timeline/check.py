"""Checks that a merged trace is complete and in a possible order."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import Any

from thalweg.timeline.spans import SIDES, Span, Timeline

# Every round of every bucket has these phases at each worker and at each node, but for _GIVING.
_OF_WORKER = ("copy_in", "wait", "copy_out")
_OF_NODE = ("wait_workers", "exchange", "return")
# Every chunk has these phases at each node (a node alone has only the first) and at its shard.
_OF_CHUNK = ("reduce", "send", "wire", "decode")
_AT_SHARD = ("wait_for_slowest", "fold", "deliver")
# A round that only asks shards for weights, or for what LAMB needs, has none of these anywhere.
_GIVING = ("copy_in", "reduce", "send")
# Times in the file have three decimals.
_ROUNDING_US = 0.01


def problems(timeline: Timeline) -> list[str]:
    """Returns what is wrong; empty when buckets have all phases and none ends before its begin."""
    if not timeline.spans:
        return ["there are no spans of Thalweg"]
    found = []
    if timeline.dropped:
        found.append(f"{timeline.dropped} spans were dropped: what follows may be because of that")
    found += _negative(timeline)
    found += _without_workers(timeline)
    apart = _apart(timeline)
    of_buckets = [
        span
        for span in timeline.spans
        if "collective" not in span.args and span.args.get("job") not in apart
    ]
    pulls = _pulls(of_buckets)
    found += _missing_of_buckets(of_buckets, pulls)
    found += _missing_of_chunks(of_buckets, pulls)
    found += _disorder(timeline, of_buckets)
    return found


def _apart(timeline: Timeline) -> set[str]:
    """Returns the jobs whose nodes may be apart: what they get need not wait for what they give."""
    return {span.args["job"] for span in timeline.spans if "version" in span.args}


def _pulls(spans: Sequence[Span]) -> set[tuple[Any, ...]]:
    """Returns the rounds that push nothing, of jobs whose shards update weights.

    One in which any worker or node gives something is none: then what is missing is missing.
    """
    served = {span.args["job"] for span in spans if span.phase == "update"}
    of_nodes = [
        span
        for span in spans
        if span.side != "shard" and span.args["job"] in served and "round" in span.args
    ]
    giving = {span.bucket_round for span in of_nodes if span.phase in _GIVING}
    return {span.bucket_round for span in of_nodes} - giving


def _negative(timeline: Timeline) -> Iterator[str]:
    for span in timeline.spans:
        if span.end < span.begin - _ROUNDING_US:
            yield (
                f"{timeline.names[span.process]}: {span.phase} of {_text(span.args)} ends "
                f"{span.begin - span.end:.3f} us before it begins"
            )


def _without_workers(timeline: Timeline) -> list[str]:
    """Reports jobs whose buckets only sidecars have traced: workers alone say how many they are."""
    sides: defaultdict[str, set[str]] = defaultdict(set)  # by job
    for span in timeline.spans:
        if span.args.get("raw_bytes", 0) > 0 and "collective" not in span.args:
            sides[span.args["job"]].add(span.side)
    lacking = [job for job, has in sides.items() if "sidecar" in has and "worker" not in has]
    return [f"job {job}: no worker's trace" for job in sorted(lacking)]


def _missing_of_buckets(spans: Sequence[Span], pulls: Set[tuple[Any, ...]]) -> Iterator[str]:
    """Reports rounds that one worker or node has traced but another has not."""
    seen: defaultdict[tuple[Any, ...], set[tuple[str, int]]] = defaultdict(set)
    sizes: dict[str, tuple[int, int]] = {}  # by job: numbers of workers and nodes
    for span in spans:
        if span.side not in ("worker", "sidecar"):
            continue
        args = span.args
        workers, nodes = sizes.get(args["job"], (0, 0))
        sizes[args["job"]] = (args.get("world_size", workers), args.get("num_nodes", nodes))
        place = args["rank"] if span.side == "worker" else args["node"]
        if args["raw_bytes"] > 0:
            seen[span.bucket_round].add((span.phase, place))
    for (job, bucket, layout, number), phases in sorted(seen.items()):
        workers, nodes = sizes[job]
        left_out = _GIVING if (job, bucket, layout, number) in pulls else ()
        of_worker = [phase for phase in _OF_WORKER if phase not in left_out]
        wanted = [(phase, rank, "worker") for phase in of_worker for rank in range(workers)]
        wanted += [(phase, node, "node") for phase in _OF_NODE for node in range(nodes)]
        for phase, place, kind in wanted:
            if (phase, place) not in phases:
                yield (
                    f"job {job}, bucket {bucket} (layout {layout}), round {number}: {kind} {place} "
                    f"has no {phase}"
                )


def _missing_of_chunks(spans: Sequence[Span], pulls: Set[tuple[Any, ...]]) -> Iterator[str]:
    """Reports chunks that not all nodes and one shard have traced."""
    seen: defaultdict[tuple[Any, ...], set[tuple[str, int]]] = defaultdict(set)
    nodes: dict[str, int] = {}
    pulled: set[tuple[Any, ...]] = set()
    for span in spans:
        if "chunk" in span.args:
            if span.side != "shard" and span.bucket_round in pulls:
                pulled.add(span.chunk_round)
            nodes[span.args["job"]] = span.args["num_nodes"]
            place = -1 if span.side == "shard" else span.args["node"]
            seen[span.chunk_round].add((span.phase, place))
    for (job, bucket, layout, part, number, chunk), phases in sorted(seen.items()):
        alone = nodes[job] == 1
        left_out = _GIVING if (job, bucket, layout, part, number, chunk) in pulled else ()
        of_chunk = [p for p in _OF_CHUNK[: 1 if alone else None] if p not in left_out]
        wanted = [(p, node) for p in of_chunk for node in range(nodes[job])]
        wanted += [] if alone else [(phase, -1) for phase in _AT_SHARD]
        for phase, node in wanted:
            if (phase, node) not in phases:
                where = "its shard" if node < 0 else f"node {node}"
                yield (
                    f"job {job}, bucket {bucket} (layout {layout}, part {part}), round {number}, "
                    f"chunk {chunk}: {where} has no {phase}"
                )


def _disorder(timeline: Timeline, spans: Sequence[Span]) -> Iterator[str]:
    """Reports effects that precede their cause by more than the clocks' error."""
    by_chunk: defaultdict[tuple[Any, ...], list[Span]] = defaultdict(list)
    by_round: defaultdict[tuple[Any, ...], list[Span]] = defaultdict(list)
    for span in spans:
        if span.phase in ("send", "fold", "deliver", "decode"):
            by_chunk[span.chunk_round].append(span)
        elif span.phase in ("copy_in", "wait", "exchange", "return"):
            of_node = (*span.bucket_round, span.args["node"])
            by_round[of_node].append(span)
    for group, orders in (
        (by_chunk, (("send", "fold"), ("deliver", "decode"))),
        (by_round, (("copy_in", "exchange"), ("return", "wait"))),
    ):
        for some in group.values():
            for cause, effect in orders:
                yield from _late(timeline, some, cause, effect)


def _late(timeline: Timeline, spans: Sequence[Span], cause: str, effect: str) -> Iterator[str]:
    for one in (span for span in spans if span.phase == cause):
        for other in (span for span in spans if span.phase == effect):
            allowed = _error(timeline, one.process, other.process)
            # For a wait or an exchange the end is the effect: it began before its cause.
            reached = other.end if effect in ("wait", "exchange") else other.begin
            if allowed is not None and one.begin - reached > allowed:
                yield (
                    f"{_text(one.args)}: {effect} at {timeline.names[other.process]} is "
                    f"{one.begin - reached:.3f} us before {cause} at "
                    f"{timeline.names[one.process]}; clocks may be wrong by {allowed:.3f} us"
                )


def _error(timeline: Timeline, one: int, other: int) -> float | None:
    """Returns the maximal error between two processes' clocks in microseconds; None: unknown."""
    (clock, error), (other_clock, other_error) = timeline.clocks[one], timeline.clocks[other]
    if clock == other_clock:
        return _ROUNDING_US
    if error is None or other_error is None:
        return None
    return error + other_error + _ROUNDING_US


def _text(args: dict[str, Any]) -> str:
    if "collective" in args:
        return f"job {args['job']}, {args['collective']}"
    text = f"job {args['job']}, bucket {args['bucket']}, round {args.get('round', '?')}"
    return text + (f", chunk {args['chunk']}" if "chunk" in args else "")


def table(timeline: Timeline) -> list[str]:
    """Returns the phases' times in milliseconds as lines of text."""
    lengths: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for span in timeline.spans:
        lengths[SIDES.index(span.side), span.phase].append((span.end - span.begin) / 1e3)
    lines = [f"{'phase':24}{'spans':>8}{'mean':>11}{'median':>11}{'95 %':>11}{'most':>11}  ms"]
    for (side, phase), times in sorted(lengths.items()):
        times.sort()
        figures = (
            statistics.fmean(times),
            statistics.median(times),
            times[(len(times) * 95 + 99) // 100 - 1],
            times[-1],
        )
        name = f"{SIDES[side]} {phase}"
        lines.append(f"{name:24}{len(times):8}" + "".join(f"{f:11.3f}" for f in figures))
    return lines
