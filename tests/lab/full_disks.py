"""Trains where /dev/shm and the folder of the sockets are full, for test_full_disks.py.

Run it where both are file systems of their own, TMPDIR being the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

import torch
from harness import servers
from shard_nodes import ELEMENTS, train

SIZE = 1 << 20  # of both file systems


def fill(folder: str) -> None:
    with Path(folder, "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(2 * SIZE // 4096):
            file.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0


def main() -> None:
    for folder in ("/dev/shm", os.environ["TMPDIR"]):
        fill(folder)
    with servers(shards=1) as cluster, ThreadPoolExecutor(2) as pool:
        shards, secret = [cluster.aggregators[0].address], secrets.token_hex(32)
        sidecars = [cluster.add_sidecar(aggregators="").address for _ in range(2)]
        joined = [
            pool.submit(train, sidecar, node, shards, [-1], secret)
            for node, sidecar in enumerate(sidecars)
        ]
        for each in joined:
            assert torch.equal(each.result(), torch.full((ELEMENTS,), 1.5))


if __name__ == "__main__":
    main()
