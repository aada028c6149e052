"""Trains with the rank that Slurm's srun gives a task, as scripts without torchrun read it."""

import os

import torch.distributed as dist
from common import main
from plain_loop import train

if __name__ == "__main__":
    dist.init_process_group(
        "gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"])
    )
    main(train)
