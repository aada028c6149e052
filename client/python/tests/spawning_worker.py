"""`spawning_worker.py fails|succeeds` starts a worker with torch.multiprocessing.spawn whose
sidecar is still needed by other nodes when it ends; what the worker logs is printed.
"""

import logging
import subprocess
import sys

import torch.multiprocessing
from job_of_threads import worker

from thalweg._job import _processes, _starting


class LastingServer:
    """A program that does not end before the process that has started it."""

    def __init__(self, name: str, argv: list[str], *, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def wait_ready(self, timeout: float) -> None:
        pass


def work(rank: int, how: str) -> None:
    logging.basicConfig(stream=sys.stdout)
    _processes.Server = LastingServer
    _starting._start(worker(timeout=0.2), "127.0.0.1:0")
    if how == "fails":
        raise ValueError("no such file")


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],))
