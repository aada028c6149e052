"""Contains a job whose rank 1 is killed while a sharded model is used:
`fsdp_failure_jobs.py killed OUT`.

STAGE says when: "forward", "backward", "gather" or "save"; in "save" it is rank 0. CHECKPOINT is a
file that is saved before, and again at that stage.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsdp1_cases
import fsdp2_cases
import torch
import torch.distributed as dist
from fsdp_models import plain_loop
from jobs import outcome
from torch import nn

import thalweg.fsdp


class Deadly:
    """Kills the process that pickles it."""

    def __reduce__(self) -> Any:
        return die()


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def killed() -> dict[str, Any]:
    """Returns the error that a worker gets which is not killed, and after how many seconds."""
    stage, path = os.environ["STAGE"], Path(os.environ["CHECKPOINT"])
    model = fsdp2_cases.shard(fsdp1_cases.Groups.of("thalweg"))
    plain_loop(model, lr=0.1, steps=1)
    thalweg.fsdp.save(model, path)
    dist.barrier()
    if dist.get_rank() == 1:
        _prepare(model, stage)
    begun = time.monotonic()
    error = outcome(lambda: _use(model, stage, path))
    return {"error": error, "seconds": time.monotonic() - begun}


def _prepare(model: nn.Module, stage: str) -> None:
    block = model.blocks[1]
    if stage == "forward":
        block.register_forward_hook(die)
    elif stage == "backward":
        block.register_full_backward_hook(die)
    elif stage == "gather":
        block.register_state_dict_post_hook(die)


def _use(model: nn.Module, stage: str, path: Path) -> None:
    plain_loop(model, lr=0.1, steps=1)
    thalweg.fsdp.save(model, path, more=Deadly() if stage == "save" else None)
    dist.barrier()


def main() -> None:
    _, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("thalweg", timeout=timedelta(seconds=20))
    result = killed()
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    os._exit(0)  # torch's threads may wait for the dead rank


if __name__ == "__main__":
    main()
