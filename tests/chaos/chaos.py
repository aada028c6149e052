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
from dataclasses import asdict, dataclass
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

GRACE = 240.0  # seconds for all else, each kind of mishap once among it; then the watchdog ends all
ROUNDS_AFTER = 3  # that must be completed after a mishap


@dataclass(frozen=True)
class Fate:
    """What came of a mishap, or of two at once."""

    kind: str
    victims: list[str]
    reason: str  # empty: the job went on
    seconds: float  # the longest pause of a job that went on; until all workers knew the reason
    restart: float = 0.0  # seconds from then until the next job's round


class Chaos:
    def __init__(self, trial: Trial, fleet: Fleet, network: Network) -> None:
        self._trial, self._fleet, self._network = trial, fleet, network
        self.fates: list[Fate] = []
        self.impossible: set[str] = set()  # with this kernel
        self.unexplained: list[str] = []  # failures where the job must have gone on

    def run(self, seed: int, seconds: float) -> None:
        """Goes on for so long, and until everything that is possible has happened."""
        works = {
            "lossy link": self._network.can(mishaps.LOSSY),
            "reset": self._network.can_reset(),
        }
        self.impossible = {kind for kind, is_possible in works.items() if not is_possible}
        print(f"not possible with this kernel: {self.impossible or 'nothing'}", flush=True)
        least = len(mishaps.possible(self._fleet, without=self.impossible))
        end = time.monotonic() + seconds
        schedule = mishaps.schedule(seed, self._fleet, without=self.impossible)
        for number, (gap, planned) in enumerate(schedule):
            self._train(gap)
            if self._trial.is_ending():
                print("nothing: ", end="")
                self._note_failure([])
            if number >= least and time.monotonic() > end:
                return
            self._disturb(planned)

    def _train(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._trial.is_ending():
            self._trial.watch(0.02)

    def _disturb(self, planned: list[Mishap]) -> None:
        what = " and ".join(map(str, planned))
        print(f"{what}: ", end="", flush=True)
        kind = " and ".join(f"{m.what} of a {m.member.kind}" for m in planned)
        victims = [mishap.member.name for mishap in planned]
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
            pause = self._trial.longest_pause
            self.fates.append(Fate(kind, victims, "", pause))
            print(f"went on after {pause:.2f} s", flush=True)
            return
        reason, told_at, restart = self._note_failure(planned)
        self.fates.append(Fate(kind, victims, reason, told_at - begin, restart))
        print(f"    all knew after {told_at - begin:.2f} s; {restart:.2f} s until the next round")

    def _note_failure(self, planned: list[Mishap]) -> tuple[str, float, float]:
        """Waits until all workers know the reason, and starts another job; returns the reason, when
        the last one knew it, and the seconds that the other job took to begin.
        """
        reason = self._trial.finish()
        print(f"failed: {reason}", flush=True)
        if not planned or mishaps.are_harmless(planned):
            self.unexplained.append(f"{' and '.join(map(str, planned)) or 'nothing'}: {reason}")
        told_at = self._trial.told_at(but={mishap.member.name for mishap in planned})
        return reason, told_at, self._trial.start()


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
    kinds = sorted({fate.kind for fate in chaos.fates})
    if hangs or wrong or leaked:
        print(log, file=sys.stderr)
    return {
        "seed": seed,
        "rounds": trial.rounds,
        "mishaps": len(chaos.fates),
        "went on": sum(not fate.reason for fate in chaos.fates),
        "attempts": trial.attempts,
        "failed with a reason": trial.failed,
        "not begun": trial.not_begun,
        "reasons without a name": trial.unnamed,
        "unexplained failures": chaos.unexplained,
        "wrong sums": wrong,
        "hangs": hangs,
        "leaks": leaked,
        "impossible": sorted(chaos.impossible),
        "fates": [asdict(fate) for fate in chaos.fates],
        "kinds": {kind: summary(chaos.fates, kind) for kind in kinds},
    }


def summary(fates: list[Fate], kind: str) -> str:
    """Returns a row of a table: what came of the mishaps, with medians and maxima of seconds."""

    def cell(times: list[float]) -> str:
        return f"{statistics.median(times):.2f} s, {max(times):.2f} s" if times else ""

    pauses = [fate.seconds for fate in fates if fate.kind == kind and not fate.reason]
    failed = [fate for fate in fates if fate.kind == kind and fate.reason]
    columns = [pauses, [fate.seconds for fate in failed], [fate.restart for fate in failed]]
    return " | ".join([f"{len(pauses)} | {len(failed)}", *map(cell, columns)])


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
