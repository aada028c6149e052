"""Starts a script once for each GPU: `python -m thalweg.compat.multiproc script.py …`.

It takes the place of apex.parallel.multiproc, also as `python -m apex.parallel.multiproc`. Each
process has `--world-size` and its `--rank` among its arguments; the output of all but the first
goes to `GPU_<rank>.log`. Scripts that read the environment need torchrun instead.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch


def main(arguments: list[str]) -> int:
    """Returns the first exit status that is not 0, when all processes have ended."""
    arguments = list(arguments)
    if "--world-size" in arguments:
        size = int(arguments[arguments.index("--world-size") + 1])
    else:
        size = max(torch.cuda.device_count(), 1)
        arguments += ["--world-size", str(size)]
    with ExitStack() as stack:
        workers = []
        for rank in range(size):
            log = None
            if rank > 0:
                log = stack.enter_context(Path(f"GPU_{rank}.log").open("w", encoding="utf-8"))
            command = [sys.executable, *arguments, "--rank", str(rank)]
            workers.append(subprocess.Popen(command, stdout=log))
        return next((code for code in [worker.wait() for worker in workers] if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
