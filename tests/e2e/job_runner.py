"""Runs a job of a script of jobs in a worker: `SCRIPT NAME OUT`. OUT gets its result as JSON.

Importing it imports nothing of Thalweg: scripts that do not either use it.
"""

import gc
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run(do: Callable[[str], Any], backend: str = "gloo", timeout: timedelta | None = None) -> None:
    """Calls `do` with the job's name in a process group of that back end; None: its own timeout."""
    name, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timeout)
    result = do(name)
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    # torch sometimes aborts ("terminate called without an active exception") when Python ends while
    # a thread of Gloo still releases a tensor. Destroying the group joins its threads, once nothing
    # refers to it any more: DDP modules do, from within reference cycles.
    gc.collect()
    dist.destroy_process_group()


def run_joined(
    jobs: Mapping[str, Callable[[], Any]], backend: str, timeout: timedelta | None = None
) -> None:
    """Does all jobs whose names are joined by "+"; their results are by name."""
    run(lambda names: {name: jobs[name]() for name in names.split("+")}, backend, timeout)


def meet() -> None:
    """Returns when all workers have called it, once in a job. What fails a job then finds none of
    them in the barrier, or in the step, that came before: they may return from one at different
    times. Rank 0, whose end is the store's, returns last.
    """
    store = dist.distributed_c10d._get_default_store()
    for done in ("met", "left"):
        store.set(f"{done} {dist.get_rank()}", "")
        if done == "met" or dist.get_rank() == 0:
            store.wait([f"{done} {rank}" for rank in range(dist.get_world_size())])


def sent_bytes() -> float:
    """Returns how many bytes of values this node has sent so far. All workers call it together."""
    from harness import metric_in

    dist.barrier()
    url = f"http://{os.environ['SIDECAR_HTTP']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        sent = metric_in(reply.read().decode(), "thalweg_grpc_sent_payload_bytes_total")
    dist.barrier()
    return sent
