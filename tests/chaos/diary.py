"""What the workers of an elastic training have written down, and who of them lived."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Living:
    """Which nodes lived, and when."""

    count: int
    _noted: list[tuple[float, list[bool]]] = field(default_factory=list)

    def note(self, living: list[bool], at: float) -> None:
        if not self._noted or self._noted[-1][1] != living:
            self._noted.append((at, living))

    def seconds(self, begin: float, end: float) -> float:
        """Returns for how many seconds nodes lived, of all nodes together."""
        total = 0.0
        ends = [at for at, _ in self._noted[1:]] + [end]
        for (at, living), until in zip(self._noted, ends, strict=True):
            total += sum(living) * max(0.0, min(until, end) - max(at, begin))
        return total

    def share(self, begin: float, end: float) -> float:
        return self.seconds(begin, end) / (self.count * (end - begin))


@dataclass(frozen=True)
class _Commit:
    """A step that a node has committed."""

    node: int
    at: float
    step: int
    generation: int
    workers: int
    digest: str
    loss: float


class Diary:
    """The logs of all nodes, as far as read() has seen them."""

    def __init__(self, logs: list[Path], *, are_apart: bool = False) -> None:
        """`are_apart` says that each node commits steps of its own, as by quorum."""
        self._logs, self._are_apart = logs, are_apart
        self._read = [0] * len(logs)
        self._commits: list[list[_Commit]] = [[] for _ in logs]
        self._memberships: list[list[int]] = []  # as the first node has seen them
        self._ends: list[str] = []  # digests of the last weights

    def read(self) -> None:
        for node, log in enumerate(self._logs):
            if not log.exists():
                continue
            with log.open("rb") as file:
                file.seek(self._read[node])
                text, newline, _ = file.read().rpartition(b"\n")
            self._read[node] += len(text) + len(newline)
            for line in text.splitlines():
                self._add(node, json.loads(line))

    def _add(self, node: int, entry: dict[str, Any]) -> None:
        if "end" in entry:
            self._ends.append(entry["end"])
        elif "nodes" not in entry:
            self._commits[node].append(_Commit(node, **entry))
        elif node == min(entry["nodes"]):
            self._memberships.append(entry["nodes"])

    def train_together(self, count: int) -> bool:
        """Returns whether the last commits are of a membership of so many workers."""
        last = [commits[-1] for commits in self._commits if commits]
        return len(last) == count == last[0].workers and len({c.generation for c in last}) == 1

    def last_of(self, node: int) -> float:
        return self._commits[node][-1].at if self._commits[node] else 0.0

    def longest_gap(
        self, nodes: set[int], since: float, begun_by: float = math.inf
    ) -> tuple[float, float]:
        """Returns how long the longest time between two commits of these nodes was, of those that
        began by a moment and ended after another one, and when it ended.
        """
        times = sorted(commit.at for node in nodes for commit in self._commits[node])
        return max((b - a, b) for a, b in itertools.pairwise(times) if a < begun_by and b > since)

    def rate(self, begin: float, end: float) -> float:
        """Returns the steps a second, each counted once for every worker that took part."""
        if self._are_apart:
            return sum(map(len, self._times(begin, end))) / (end - begin)
        return sum(s.workers for s in self._steps() if begin < s.at <= end) / (end - begin)

    def usual_rate(self, begin: float, end: float) -> float:
        """Returns the same for a time without faults; where nodes are apart, by the median of the
        times between two commits, which may be too few to be counted.
        """
        if not self._are_apart:
            return self.rate(begin, end)
        gaps = [b - a for own in self._times(begin, end) for a, b in itertools.pairwise(own)]
        return len(self._commits) / statistics.median(gaps)

    def share_of(self, living: Living, begin: float, end: float) -> float:
        """Returns how many of the living nodes took part: each time belongs to the next commit;
        where they are apart, to a node's own if it is no later than twice the usual time.
        """
        if self._are_apart:
            return self._own_times(begin, end) / living.seconds(begin, end)
        took_part = could = 0.0
        last = begin
        for step in self._steps():
            if begin < step.at <= end:
                lived = living.seconds(last, step.at)
                took_part += min(step.workers * (step.at - last), lived)
                could += lived
                last = step.at
        return took_part / could

    def losses(self) -> list[float]:
        """Returns the first node's loss of each step that counts."""
        return [step.loss for step in self._steps()]

    def memberships(self) -> list[list[int]]:
        return self._memberships

    def differing(self) -> list[str]:
        """Returns which steps of a membership did not end in the same weights on all its nodes."""
        seen: dict[tuple[int, int], set[str]] = {}
        for commits in self._commits:
            for commit in commits:
                if not self._are_apart:
                    seen.setdefault((commit.step, commit.generation), set()).add(commit.digest)
        differing = [f"step {key[0]}: {found}" for key, found in seen.items() if len(found) > 1]
        return differing + ([f"the end: {self._ends}"] if len(set(self._ends)) > 1 else [])

    def _times(self, begin: float, end: float) -> list[list[float]]:
        """Returns for each node when it has committed."""
        return [[one.at for one in own if begin < one.at <= end] for own in self._commits]

    def _own_times(self, begin: float, end: float) -> float:
        """Returns the seconds, of all nodes together, for which each was not late."""
        times = self._times(begin, end)
        gaps = [[b - a for a, b in itertools.pairwise([begin, *own, end])] for own in times]
        usual = statistics.median(itertools.chain.from_iterable(gaps))
        return sum(min(gap, 2 * usual) for own in gaps for gap in own)

    def _steps(self) -> list[_Commit]:
        """Returns the first commit of each step, of the last membership that did it."""
        best: dict[int, _Commit] = {}
        for commits in self._commits:
            for one in commits:
                old = best.get(one.step)
                if old is None or (one.generation, -one.at) > (old.generation, -old.at):
                    best[one.step] = one
        return [best[step] for step in sorted(best)]
