"""Measures what a training uses."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def memory_mb(device: torch.device) -> float:
    """Returns the largest memory so far in 10^6 bytes: of the GPU's tensors, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def sent_bytes(*, loopback: bool, table: Path = Path("/proc/net/dev")) -> int:
    """Returns what this host's network interfaces have sent since they exist.

    `loopback`: all nodes are on this machine, and loopback is the network between them. Then the
    bytes are those of all nodes, and of the workers within them.
    """
    total = 0
    for line in table.read_text(encoding="ascii").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if (name.strip() == "lo") == loopback:
            total += int(numbers.split()[8])
    return total
