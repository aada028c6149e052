"""Converts times from the steady clocks of several hosts to one of them.

Processes of a host read the same clock. Every sidecar has compared its own clock with the shards'
repeatedly: a comparison is wrong by at most half its round trip. For a host without comparisons
only the wall clock is available, which is as wrong as the hosts' time service allows.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from thalweg.timeline.files import Offset, TraceFile

# Only the comparison with the shortest round trip in a window is used. Steady clocks drift apart by
# at most some microseconds a second; a time service adjusts them by much less.
_WINDOW = 10_000_000_000


class Curve:
    """The offset of another clock from ours over our time; linear between comparisons."""

    def __init__(self, offsets: Sequence[Offset]) -> None:
        windows: dict[int, Offset] = {}
        for offset in offsets:
            window = offset.at // _WINDOW
            best = windows.get(window)
            if best is None or offset.error < best.error:
                windows[window] = offset
        best_ones = [windows[window] for window in sorted(windows)]
        self._at = [offset.at for offset in best_ones]
        self._nanos = [offset.nanos for offset in best_ones]
        self.error = max(offset.error for offset in best_ones)

    def forth(self, ours: float) -> float:
        """Converts our time to theirs."""
        return ours + self._beyond(ours)

    def back(self, theirs: float) -> float:
        """Converts their time to ours."""
        ours = theirs - self._nanos[0]
        for _ in range(2):  # offsets change by millionths: the second step matters for large ones
            ours = theirs - self._beyond(ours)
        return ours

    def _beyond(self, ours: float) -> float:
        after = bisect.bisect(self._at, ours)
        if after == 0:
            return self._nanos[0]
        if after == len(self._at):
            return self._nanos[-1]
        begin, end = self._at[after - 1], self._at[after]
        share = (ours - begin) / (end - begin)
        return self._nanos[after - 1] + share * (self._nanos[after] - self._nanos[after - 1])


@dataclass
class Way:
    """The conversion from a clock to the common one."""

    error: int | None = 0  # upper bound in nanoseconds; None: the clocks were never compared
    steps: list[tuple[Curve, bool]] = field(default_factory=list)  # each step is forth or back
    shift: int = 0

    def __call__(self, nanos: float) -> float:
        for curve, forth in self.steps:
            nanos = curve.forth(nanos) if forth else curve.back(nanos)
        return nanos + self.shift


def ways(traces: Sequence[TraceFile]) -> tuple[str, dict[str, Way]]:
    """Returns the first shard's clock, and the conversion from every process's clock to it."""
    root = _root(traces)
    found = _shortest(root, _curves(traces))
    by_clock = {trace.clock: trace for trace in traces}
    for clock, trace in by_clock.items():
        if clock not in found:
            theirs = by_clock[root]
            shift = (trace.wall - trace.steady) - (theirs.wall - theirs.steady)
            found[clock] = Way(error=None, shift=shift)
    return root, found


def _root(traces: Sequence[TraceFile]) -> str:
    """Returns the clock of the lowest shard; without shards, that of the first process."""
    shards = [
        (event["args"]["shard"], position)
        for position, trace in enumerate(traces)
        for event in trace.events
        if event.get("cat") == "shard" and "args" in event
    ]
    return traces[min(shards)[1] if shards else 0].clock


def _curves(traces: Sequence[TraceFile]) -> dict[tuple[str, str], Curve]:
    """Returns curves by the clock that was compared and the clock it was compared with."""
    offsets: defaultdict[tuple[str, str], list[Offset]] = defaultdict(list)
    for trace in traces:
        for offset in trace.offsets:
            if offset.clock != trace.clock:
                offsets[trace.clock, offset.clock].append(offset)
    return {pair: Curve(some) for pair, some in offsets.items()}


def _shortest(root: str, curves: dict[tuple[str, str], Curve]) -> dict[str, Way]:
    """Finds the conversions with the smallest error (Dijkstra)."""
    found: dict[str, Way] = {}
    queue: list[tuple[int, int, str, Way]] = [(0, 0, root, Way())]
    count = 0  # a tie-breaker, because conversions cannot be ordered
    while queue:
        error, _, clock, way = heapq.heappop(queue)
        if clock in found:
            continue
        found[clock] = way
        for (ours, theirs), curve in curves.items():
            for near, far, forth in ((theirs, ours, True), (ours, theirs, False)):
                if near == clock and far not in found:
                    count += 1
                    longer = Way(error + curve.error, [(curve, forth), *way.steps])
                    heapq.heappush(queue, (error + curve.error, count, far, longer))
    return found
