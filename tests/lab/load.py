"""Runs clusters under load for test_load.py: `load.py SCENARIO FILE` writes the outcome as JSON.

It is a separate program because workers are forked from a process without other threads.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from waiting import pass_time

from thalweg_bench import torch_import
from thalweg_bench.cluster import Cluster
from thalweg_bench.lab import INTERFACE
from thalweg_bench.lab_case import LabCase
from thalweg_bench.resources import peak_rss_mb
from thalweg_bench.shape import Shape

NODES = 4
CHUNK_BYTES, WINDOW_CHUNKS = 64 << 10, 8
SLOW_BYTES = 4 << 20
SLOW_FACTOR = 10
RATE = 100_000_000
ROUNDS = 2
TIMEOUT = 12.0
CUT_BYTES = 64 << 20
CUT_SECONDS = 5.0
_WAIT = re.compile(
    r'^thalweg_sidecar_shard_wait_seconds_total\{shard="(\d+)"\} (\S+)$', re.MULTILINE
)


def slow_shard() -> dict[str, Any]:
    """Gives the last shard's link a tenth of the others' rate, and an equal share."""
    os.environ["THALWEG_WEIGHT"] = "1"
    os.environ["THALWEG_CHUNK_BYTES"] = str(CHUNK_BYTES)
    os.environ["THALWEG_WINDOW_CHUNKS"] = str(WINDOW_CHUNKS)
    shape = Shape(NODES, NODES, 1, RATE, slow_shard=SLOW_FACTOR)
    case = LabCase(shape=shape, bytes=(SLOW_BYTES,), peers=())
    with case.cluster(http=True) as cluster:
        case.start(cluster, gloo=False)
        case.open(cluster, SLOW_BYTES)
        # Every result is checked.
        seconds = [cluster.measure("thalweg", repeat, case.slowest) for repeat in range(ROUNDS)]
        return {
            "seconds": seconds,
            "waits": {node: read_waits(cluster, node) for node in cluster.nodes},
            "shard_mb": [peak_rss_mb(cluster.server(s).process.pid) for s in cluster.shards],
        }


def read_waits(cluster: Cluster, node: str) -> dict[str, float]:
    """Returns the seconds for which the node waited, by shard."""
    url = f"http://{cluster.server(node).http}/metrics"
    with cluster.lab.inside(node), urllib.request.urlopen(url, timeout=10) as reply:
        return {shard: float(value) for shard, value in _WAIT.findall(reply.read().decode())}


def stopped_aggregator() -> dict[str, Any]:
    """Stops shard 1 between two rounds; returns what every worker is told, and when."""
    torch_import.import_torch()
    from thalweg_bench import worker
    from thalweg_bench.collectives import factories, make_pattern

    worker.TIMEOUT = TIMEOUT

    class Worker(worker.Worker):
        def do_run_failing(self) -> tuple[float, str]:
            begin = time.monotonic()
            try:
                self.do_run("thalweg", begin)
            except RuntimeError as error:
                return time.monotonic() - begin, str(error)
            return time.monotonic() - begin, ""

    size = 4 << 20
    systems = factories(make_pattern(size, "fp32"))
    with Cluster(Shape(2, 2, 2, None), "fp32") as cluster:
        cluster.fork(lambda rank: Worker(cluster.lab, cluster.place(rank), systems))
        cluster.call("open", "thalweg", size)
        cluster.measure("thalweg", 0, None)
        os.kill(cluster.server("shard1").process.pid, signal.SIGSTOP)
        told = cluster.crew.call("run_failing", seconds=5 * TIMEOUT)
        return {"told": told}


def partition() -> dict[str, Any]:
    """Cuts node 1 off in the middle of a round; returns how long the round took."""
    case = LabCase(shape=Shape(2, 1, 1, RATE), bytes=(CUT_BYTES,), peers=())
    with case.cluster() as cluster:
        case.start(cluster, gloo=False)
        case.open(cluster, CUT_BYTES)
        cluster.measure("thalweg", 0, None)

        def cut() -> None:
            for state in ("down", "up"):
                cluster.lab.run("node1", ["ip", "link", "set", INTERFACE, state], check=True)
                pass_time(CUT_SECONDS if state == "down" else 0)

        cutting = threading.Timer(CUT_BYTES * 8 / RATE / 2, cut)
        cutting.start()
        seconds = cluster.measure("thalweg", 1, None)  # checks the result
        cutting.join()
        return {"seconds": seconds}


SCENARIOS = {
    "slow_shard": slow_shard,
    "stopped_aggregator": stopped_aggregator,
    "partition": partition,
}

if __name__ == "__main__":
    result = SCENARIOS[sys.argv[1]]()
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
