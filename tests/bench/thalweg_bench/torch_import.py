"""Imports torch so that children can be forked afterwards."""

from __future__ import annotations

import os
from pathlib import Path

from thalweg_bench.rows import BenchError


def import_torch() -> None:
    """Imports torch with one thread per worker, as torchrun does, and none in this process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # torch warns that the lab's addresses have no names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed
    import torch.nn.parallel

    from thalweg import _C  # noqa: F401

    torch.set_num_threads(1)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise BenchError(f"importing torch started {threads - 1} threads: forking is not safe")
