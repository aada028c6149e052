"""Tests what allocator the programs have, and what memory is left of jobs that have ended."""

from __future__ import annotations

import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from averaging import Averaging
from harness import servers
from shard_nodes import offers, session
from waiting import settled

from thalweg import _C

ALLOCATOR = "libjemalloc.so"
JOBS = 15
ELEMENTS, BUCKETS, ROUNDS = 500_000, 4, 2
CHUNK_BYTES = 64 << 10
# The allocator returns free memory within a second, or later on a busy machine.
PATIENCE = 40.0


def maps(pid):
    return Path(f"/proc/{pid}/maps").read_text("utf-8")


def private_bytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def run_job(job, sidecars):
    """Trains with a shard in every sidecar."""
    nodes, secret = len(sidecars), secrets.token_hex(32)
    with contextlib.ExitStack() as stack:
        shards = stack.enter_context(offers(sidecars, secret, job))
        pool = stack.enter_context(ThreadPoolExecutor(nodes))

        def join(node):
            terms = {"job": job, "nodes": nodes, "chunk_bytes": CHUNK_BYTES}
            return session(sidecars[node], node, shards, [*range(nodes)], secret, **terms)

        sessions = list(pool.map(join, range(nodes)))
        for each in sessions:
            stack.callback(each.close)
        averages = [Averaging(each, [ELEMENTS] * BUCKETS) for each in sessions]
        values = [torch.ones(ELEMENTS)] * BUCKETS
        for _ in range(ROUNDS):
            for means in pool.map(lambda average: average.means(values), averages):
                assert all(map(torch.equal, means, values))


def test_programs_have_an_allocator_for_servers_and_workers_keep_theirs():
    with servers(nodes=1, shards=1) as cluster:
        for server in [*cluster.sidecars, *cluster.aggregators]:
            assert ALLOCATOR in maps(server.process.pid)
    assert Path(_C.__file__).name in maps("self")
    assert ALLOCATOR not in maps("self")


def test_memory_of_jobs_that_have_ended_is_returned():
    # A sidecar may have a job's results once, for shards that are restarted, and its windows of
    # contributions and of results, which are less.
    of_a_job = 2 * BUCKETS * ELEMENTS * 4
    with servers() as cluster:
        programs = [
            cluster.add_sidecar("--shard-listen", "127.0.0.1:0", aggregators="") for _ in range(3)
        ]
        at_rest = max(private_bytes(program.process.pid) for program in programs)
        for job in range(JOBS):
            run_job(f"job{job}", [program.address for program in programs])
        left = settled(
            lambda: [private_bytes(program.process.pid) - at_rest for program in programs],
            lambda left: max(left) < of_a_job,
            PATIENCE,
        )
    assert max(left) < of_a_job, left
