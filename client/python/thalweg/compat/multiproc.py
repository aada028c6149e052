"""Starts a script once for each GPU: `python -m thalweg.compat.multiproc script.py …`.

It takes the place of apex.parallel.multiproc, also as `python -m apex.parallel.multiproc`. Each
process has `--world-size` and its `--rank` among its arguments; the output of all but the first
goes to `GPU_<rank>.log`. When one fails, or on SIGTERM, the others are ended. Scripts that read the
environment need torchrun instead.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

_USAGE = "usage: python -m thalweg.compat.multiproc SCRIPT.py [--world-size N] [ARGS …]"
_GRACE_SECONDS = 30.0  # as torchrun, so that a script may write a checkpoint


def main(arguments: list[str]) -> int:
    """Returns 0 when all processes have ended well, or else a shell's exit status of the first that
    has not, or of SIGTERM, when the others have been ended; 2 for a wrong --world-size.
    """
    arguments = list(arguments)
    if "--world-size" in arguments:
        given = arguments[arguments.index("--world-size") + 1 :][:1]
        if not (given and given[0].isdecimal() and int(given[0])):
            print(f"{_USAGE}\n--world-size takes the number of processes", file=sys.stderr)
            return 2
        size = int(given[0])
    else:
        size = max(torch.cuda.device_count(), 1)
        arguments += ["--world-size", str(size)]
    # A handler that raised could do so while a process starts, which would then be forgotten.
    terminated, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, lambda *_: None)
    with ExitStack() as stack:
        workers: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, workers)
        for rank in range(size):
            log = None
            if rank > 0:
                log = stack.enter_context(Path(f"GPU_{rank}.log").open("w", encoding="utf-8"))
            command = [sys.executable, *arguments, "--rank", str(rank)]
            workers.append(subprocess.Popen(command, stdout=log))
        return _wait(workers, terminated)


def _wait(workers: Sequence[subprocess.Popen[bytes]], terminated: int) -> int:
    """Waits for the end of all, a failure of one, or a byte from `terminated`; returns the exit
    status.
    """
    running = {os.pidfd_open(worker.pid): worker for worker in workers}
    while running:
        for ready in select.select([terminated, *running], [], [])[0]:
            if ready == terminated:
                return 128 + signal.SIGTERM
            os.close(ready)
            if code := running.pop(ready).wait():
                return code if code > 0 else 128 - code
    return 0


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminates the processes that are left, and kills them after a while."""
    for worker in workers:
        worker.terminate()  # does nothing to one that has ended
    for worker in workers:
        try:
            worker.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
