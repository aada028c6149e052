"""`hanging_worker.py RANK STORE` attaches a module; rank 1 hangs there until rank 0 has an error.

Prints it as JSON.
"""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg._job import _starting


def main() -> None:
    rank, path = int(sys.argv[1]), sys.argv[2]
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    told = dist.PrefixStore("test", store)
    if rank == 1:
        _starting.find_sidecars = lambda *_: told.wait(["error"], timedelta(seconds=60))
    try:
        thalweg.ddp.attach(DistributedDataParallel(torch.nn.Linear(2, 2)))
        error = ""
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is the result
        error = f"{type(failure).__name__}: {failure}"
    told.set("error", error)
    print(json.dumps(error))


main()
