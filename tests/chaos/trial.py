"""Attempts of a job to train, and what became of each."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from chaos_worker import TIMEOUT, WORLD, Terms
from fleet import Fleet, Member

# A wait ends within TIMEOUT of the last progress; the rest is for two busy cores. A job gathers
# its workers first, and then its nodes.
_HANG = TIMEOUT + 7.0
_HANG_AT_START = 2 * TIMEOUT + 7.0
_STARTS = 5
_NAMED = re.compile(r"\b(node|rank|worker|shard|aggregator)s? \S*\d|\.sock")


class Hang(Exception):
    """A worker has neither made progress nor been told a reason in time."""


class WrongSum(Exception):
    """A worker has got other bits than the reference."""


@dataclass
class Trial:
    """One attempt after the other, with the same processes as far as they live."""

    fleet: Fleet
    seed: int
    attempts: int = 0
    rounds: int = 0
    failed: int = 0
    not_begun: int = 0  # of those that have failed, the ones without a round
    unnamed: list[str] = field(default_factory=list)  # reasons that name nothing
    outcomes: dict[int, tuple[str, str]] = field(default_factory=dict)  # of this attempt, by rank
    longest_pause: float = 0.0  # between rounds that all have completed, since forget_pauses()
    _told: dict[int, float] = field(default_factory=dict)  # when each has answered, by rank
    _seen: list[tuple[int, float]] = field(default_factory=list)
    _least: int = 0
    _advanced: float = 0.0

    def start(self) -> float:
        """Replaces lost processes and starts another attempt; returns after how many seconds all
        have completed a round.
        """
        begin = time.monotonic()
        for _ in range(_STARTS):
            self.fleet.replace_lost()
            if self._begin_attempt():
                return time.monotonic() - begin
        raise Hang(f"{_STARTS} attempts in a row have not begun: {self.reason()}")

    def _begin_attempt(self) -> bool:
        self.attempts += 1
        terms = Terms(
            f"chaos{self.attempts}",
            secrets.token_hex(32),
            self.seed + self.attempts,
            self.fleet.shards,
            self.fleet.hosts,
        )
        self.fleet.progress.begin()
        for call in ("offer", "train"):
            self.outcomes = {}
            self._seen = [(0, time.monotonic())] * WORLD
            self._least, self._advanced = 0, time.monotonic()
            for pipe in self.fleet.pipes.values():
                pipe.send((call, terms))
            while len(self.outcomes) < WORLD and self._least < 1:
                self.watch(0.05)
            if any(outcome == "failed" for outcome, _ in self.outcomes.values()):
                self.not_begun += 1
                print(f"    a job has not begun: {self.finish()}", flush=True)
                return False
        return self._least >= 1

    def watch(self, seconds: float) -> None:
        """Waits for an answer or as long as that. Raises Hang or WrongSum."""
        pipes = {pipe: rank for rank, pipe in self.fleet.pipes.items() if rank not in self.outcomes}
        for pipe in wait(list(pipes), seconds):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                self.outcomes[rank] = pipe.recv()
            except (EOFError, OSError):
                self.outcomes[rank] = ("lost", "")
            self._told[rank] = time.monotonic()
            if self.outcomes[rank][0] == "wrong":
                raise WrongSum(f"rank {rank}: {self.outcomes[rank][1]}")
        now = time.monotonic()
        for rank in range(WORLD):
            done = self.fleet.progress.of(rank)
            if done != self._seen[rank][0] or self._is_excused(rank):
                self._seen[rank] = (done, now)
            elif now - self._seen[rank][1] > (_HANG if done else _HANG_AT_START):
                raise Hang(f"rank {rank} after {done} rounds of attempt {self.attempts}")
        least = self.fleet.progress.least()
        if least > self._least:
            self.longest_pause = max(self.longest_pause, now - self._advanced)
            self._least, self._advanced = least, now

    def _is_excused(self, rank: int) -> bool:
        return rank in self.outcomes or self._member(rank).stopped

    def _member(self, rank: int) -> Member:
        return next(m for m in self.fleet.members if m.name == f"rank{rank}")

    def least(self) -> int:
        return self._least

    def forget_pauses(self) -> None:
        self.longest_pause, self._advanced = 0.0, time.monotonic()

    def is_ending(self) -> bool:
        return bool(self.outcomes)

    def finish(self) -> str:
        """Waits until all workers have answered or are lost; returns the reason of the failure."""
        while len(self.outcomes) < WORLD:
            self.watch(0.05)
        self.rounds += self._least
        reason = self.reason()
        if reason:
            self.failed += 1
            told = [text for outcome, text in self.outcomes.values() if outcome == "failed"]
            self.unnamed += [text for text in told if not _NAMED.search(text)]
        return reason

    def told_at(self, but: set[str]) -> float:
        """Returns when the last worker knew how the attempt has ended, but for some."""
        return max(at for rank, at in self._told.items() if self._member(rank).name not in but)

    def reason(self) -> str:
        """Returns what the first worker that has failed was told."""
        told = [text for outcome, text in self.outcomes.values() if outcome == "failed"]
        return told[0] if told else ""

    def end(self) -> None:
        """Ends the attempt in order."""
        self.fleet.progress.end_soon()
        self.finish()
