"""Runs a job of a script of jobs in a worker: `SCRIPT NAME OUT`. OUT gets its result as JSON."""

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
from harness import metric_in


def run(do: Callable[[str], Any], backend: str, timeout: timedelta | None = None) -> None:
    """Calls `do` with the job's name in a process group of that back end; None: its own timeout."""
    name, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timeout)
    result = do(name)
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    gc.collect()  # modules in reference cycles keep threads of the group
    dist.destroy_process_group()


def run_joined(
    jobs: Mapping[str, Callable[[], Any]], backend: str, timeout: timedelta | None = None
) -> None:
    """Does all jobs whose names are joined by "+"; their results are by name."""
    run(lambda names: {name: jobs[name]() for name in names.split("+")}, backend, timeout)


def sent_bytes() -> float:
    """Returns how many bytes of values this node has sent so far. All workers call it together."""
    dist.barrier()
    url = f"http://{os.environ['SIDECAR_HTTP']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        sent = metric_in(reply.read().decode(), "thalweg_grpc_sent_payload_bytes_total")
    dist.barrier()
    return sent
