"""Trains a small job on two nodes beside an attack, and watches the server that is attacked.

`bystander.py PID SHARD SIDECAR SIDECAR` writes a line with the address of the shard of process PID
once the job runs. SHARD is an aggregator's address, or "" if the sidecars host the job's shards.
When standard input ends, the job ends and another one is tried; the outcome is a line of JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import select
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import torch
from averaging import Averaging
from shard_nodes import ELEMENTS, JOB, offers, session

TIMEOUT = 40.0  # of the job's rounds: a stall is measured, and not ended
PACE = 0.01  # seconds between rounds
INTERVAL = 0.01  # seconds between looks at the server
# The seats of nodes that are silent are free after their lease, which is 15 s.
PATIENCE = 25.0
ATTEMPT = 5.0  # for each attempt to begin another job


class Watch:
    """The greatest memory and the largest number of threads that a process has had."""

    def __init__(self, pid: int) -> None:
        self.memory_mb = 0.0
        self.threads = 0
        self._status = Path(f"/proc/{pid}/status")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(INTERVAL):
            with contextlib.suppress(OSError):
                lines = self._status.read_text(encoding="ascii", errors="replace").splitlines()
                fields = dict(line.split(":", 1) for line in lines)
                if "VmHWM" in fields:  # a process that has ended has none
                    kilobytes = int(fields["VmHWM"].split()[0])
                    self.memory_mb = max(self.memory_mb, kilobytes * 1024 / 1e6)
                    self.threads = max(self.threads, int(fields["Threads"]))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


class Training:
    """A job with a secret of its own on all sidecars."""

    def __init__(self, job: str, extra: str, sidecars: list[str], timeout: float) -> None:
        self._stack = contextlib.ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(len(sidecars)))
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            secret = secrets.token_hex(32)
            self.shards, hosts = [extra], [-1]
            if not extra:
                self.shards = self._stack.enter_context(offers(sidecars, secret, job))
                hosts = list(range(len(sidecars)))

            def join(node: int) -> Any:
                return session(
                    sidecars[node], node, self.shards, hosts, secret, job=job, timeout=timeout
                )

            sessions = list(self._pool.map(join, range(len(sidecars))))
            for each in sessions:
                self._stack.callback(each.close)
            self._averages = [Averaging(each, [ELEMENTS]) for each in sessions]
            failing.pop_all()

    def round(self) -> float:
        """Averages 1 and 2; returns the seconds that it took."""
        values = [torch.full((ELEMENTS,), node + 1.0) for node in range(len(self._averages))]
        begin = time.monotonic()
        means = self._pool.map(lambda each, value: each.means([value]), self._averages, values)
        for [mean] in means:
            if not torch.equal(mean, torch.full((ELEMENTS,), 1.5)):
                raise ArithmeticError(f"a wrong mean: {mean}")
        return time.monotonic() - begin

    def close(self) -> None:
        self._stack.close()


def rounds_until_told(training: Training) -> Iterator[float]:
    """Gives the seconds of each round, until standard input ends."""
    yield training.round()
    while not select.select([sys.stdin], [], [], PACE)[0]:
        yield training.round()


def time_to_begin(extra: str, sidecars: list[str]) -> float | None:
    """Returns after how many seconds another job has trained, or None if it may not."""
    begin = time.monotonic()
    for attempt in itertools.count():
        if time.monotonic() - begin > PATIENCE:
            return None
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            job = f"later{attempt}"
            with contextlib.closing(Training(job, extra, sidecars, ATTEMPT)) as training:
                training.round()
            return time.monotonic() - begin
    return None


def main(pid: str, extra: str, *sidecars: str) -> None:
    watch = Watch(int(pid))
    error, stall, rounds = "", 0.0, 0
    training = Training(JOB, extra, list(sidecars), TIMEOUT)
    training.round()  # what it takes belongs to the job at rest
    print(training.shards[0], flush=True)
    begin = time.monotonic()
    try:
        for seconds in rounds_until_told(training):
            stall = max(stall, seconds)
            rounds += 1
            begin = time.monotonic()
    except RuntimeError as failure:
        error, stall = str(failure), max(stall, time.monotonic() - begin)
        sys.stdin.read()
    with contextlib.suppress(RuntimeError):
        training.close()
    began = time_to_begin(extra, list(sidecars))
    watch.stop()
    outcome = {
        "rounds": rounds,
        "error": error,
        "stall": stall,
        "new_job": began,
        "memory_mb": watch.memory_mb,
        "threads": watch.threads,
    }
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
