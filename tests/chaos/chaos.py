"""Disturbs a job at random and checks every bit of what it computes.

`chaos.py --seed 1 --seconds 60 [--hosted] [--out FILE]` needs root, and OMP_NUM_THREADS=1 because
it forks workers from a process without other threads. Each line says what was done and what came of
it; the last ones sum up, and FILE gets them as JSON. Exits 1 if there was a wrong sum, a hang, a
leak, a reason that names nothing, or a failure that nothing explains.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mishaps
from fleet import Fleet, hosts_of_nodes, hosts_of_shards
from leaks import Ledger
from mishaps import Mishap
from network import Network
from trial import Hang, Trial, WrongSum

from thalweg_bench import torch_import
from thalweg_bench.lab import Lab

GRACE = 150.0  # seconds for what comes before and after the mishaps; then the watchdog ends all
ROUNDS_AFTER = 3  # that must be completed after a mishap


@dataclass
class Fates:
    """What came of the mishaps of one kind, in seconds."""

    pauses: list[float] = field(default_factory=list)  # of jobs that went on
    failures: list[float] = field(default_factory=list)  # until all workers knew the reason
    restarts: list[float] = field(default_factory=list)  # from then until the next job's round


class Chaos:
    def __init__(self, trial: Trial, fleet: Fleet, network: Network) -> None:
        self._trial, self._fleet, self._network = trial, fleet, network
        self.fates: dict[str, Fates] = defaultdict(Fates)
        self.unexplained: list[str] = []  # failures where the job must have gone on

    def run(self, seed: int, seconds: float) -> None:
        possible = {
            "lossy link": self._network.can(mishaps.LOSSY),
            "reset": self._network.can_reset(),
        }
        without = {kind for kind, is_possible in possible.items() if not is_possible}
        print(f"not possible with this kernel: {', '.join(without) or 'nothing'}", flush=True)
        end = time.monotonic() + seconds
        for gap, planned in mishaps.schedule(seed, self._fleet, without=without):
            self._train(gap)
            if self._trial.is_ending():
                print("nothing: ", end="")
                self._note_failure([])
            if time.monotonic() > end:
                return
            self._disturb(planned)

    def _train(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._trial.is_ending():
            self._trial.watch(0.02)

    def _disturb(self, planned: list[Mishap]) -> None:
        what = " and ".join(map(str, planned))
        print(f"{what}: ", end="", flush=True)
        fates = self.fates[" and ".join(f"{m.what} of a {m.member.kind}" for m in planned)]
        begin = time.monotonic()
        self._trial.forget_pauses()
        undo = [mishaps.begin(mishap, self._fleet, self._network) for mishap in planned]
        for mishap, finish in sorted(zip(planned, undo, strict=True), key=lambda p: p[0].seconds):
            while time.monotonic() < begin + mishap.seconds:
                self._trial.watch(0.02)
            finish()
        enough = self._trial.least() + ROUNDS_AFTER
        while not self._trial.is_ending() and self._trial.least() < enough:
            self._trial.watch(0.02)
        if not self._trial.is_ending():
            fates.pauses.append(self._trial.longest_pause)
            print(f"went on after {fates.pauses[-1]:.2f} s", flush=True)
            return
        told_at, restart = self._note_failure(planned)
        fates.failures.append(told_at - begin)
        fates.restarts.append(restart)
        print(f"    all knew after {told_at - begin:.2f} s; {restart:.2f} s until the next round")

    def _note_failure(self, planned: list[Mishap]) -> tuple[float, float]:
        """Waits until all workers know the reason, and starts another job; returns when the last
        one knew it, and the seconds that the other job took to begin.
        """
        reason = self._trial.finish()
        print(f"failed: {reason}", flush=True)
        if not planned or mishaps.are_harmless(planned):
            self.unexplained.append(f"{' and '.join(map(str, planned)) or 'nothing'}: {reason}")
        told_at = self._trial.told_at(but={mishap.member.name for mishap in planned})
        return told_at, self._trial.start()


def run(seed: int, seconds: float, *, hosted: bool) -> dict[str, Any]:
    """Returns what is printed at the end."""
    hosts = hosts_of_nodes() + ([] if hosted else hosts_of_shards())
    hangs: list[str] = []
    wrong: list[str] = []
    leaked: list[str] = []
    with Lab(hosts) as lab, tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        fleet = Fleet(lab, Path(folder), hosted=hosted)
        trial = Trial(fleet, seed)
        chaos = Chaos(trial, fleet, Network(lab))
        try:
            trial.start()
            trial.end()
            ledger = Ledger(fleet)
            trial.start()
            chaos.run(seed, seconds)
            trial.end()
            fleet.replace_lost()
            leaked = ledger.leaks()
        except Hang as hang:
            hangs.append(str(hang))
        except WrongSum as error:
            wrong.append(str(error))
        finally:
            log = fleet.log()
            fleet.kill()
    if hangs or wrong or leaked:
        print(log, file=sys.stderr)
    return {
        "seed": seed,
        "rounds": trial.rounds,
        "mishaps": sum(len(f.pauses) + len(f.failures) for f in chaos.fates.values()),
        "went on": sum(len(fates.pauses) for fates in chaos.fates.values()),
        "attempts": trial.attempts,
        "failed with a reason": trial.failed,
        "not begun": trial.not_begun,
        "reasons without a name": trial.unnamed,
        "unexplained failures": chaos.unexplained,
        "wrong sums": wrong,
        "hangs": hangs,
        "leaks": leaked,
        "kinds": {kind: summary(fates) for kind, fates in sorted(chaos.fates.items())},
    }


def summary(fates: Fates) -> str:
    """Returns a row of a table: what came of the mishaps, with medians and maxima of seconds."""

    def cell(times: list[float]) -> str:
        return f"{statistics.median(times):.2f} s, {max(times):.2f} s" if times else ""

    columns = [fates.pauses, fates.failures, fates.restarts]
    counts = f"{len(fates.pauses)} | {len(fates.failures)}"
    return " | ".join([counts, *map(cell, columns)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--hosted", action="store_true", help="sidecars host the shards")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch_import.import_torch()
    print(f"seed {arguments.seed}, {arguments.seconds:g} s", flush=True)
    signal.alarm(round(arguments.seconds + GRACE))  # ends this process, and with it all others
    result = run(arguments.seed, arguments.seconds, hosted=arguments.hosted)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    bad = ("unexplained failures", "reasons without a name", "wrong sums", "hangs", "leaks")
    return 1 if any(result[each] for each in bad) else 0


if __name__ == "__main__":
    sys.exit(main())
