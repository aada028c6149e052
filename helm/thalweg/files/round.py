"""One round through the release's aggregators, as two workers of torchrun: `helm test` runs it.

Each worker is a node of its own, with a sidecar of its own: the workers of one node alone would not
need the aggregators. In a release without aggregators, the two sidecars host the shards.
"""

import gc
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg import _binaries
from thalweg._job._processes import Server

# In chunks of 4 KiB (THALWEG_CHUNK_BYTES) enough that each of up to 256 shards gets some.
PARAMETERS = 512 * 1024


def send_round() -> str:
    """Averages a gradient over all workers; returns what the worker has to say of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(PARAMETERS, 1, bias=False)
    ddp = DistributedDataParallel(model)
    state = thalweg.ddp.attach(ddp, "fp32")
    # The gradient of a sum of weights times inputs is the inputs: rank + 1 in every element.
    ddp(torch.full((1, PARAMETERS), rank + 1.0)).sum().backward()
    mean = sum(range(1, world + 1)) / world
    gradient = model.weight.grad
    if gradient is None or not torch.equal(gradient, torch.full((1, PARAMETERS), mean)):
        raise RuntimeError(f"rank {rank}: expected {mean} everywhere, got {gradient}")
    summary = str(state.summary())
    if state.stats()["rounds"] < 1:
        raise RuntimeError(f"the gradients bypassed thalweg: {summary}")
    state.close()
    return f"{world} nodes got the right mean of {PARAMETERS} gradients: {summary}"


def main() -> None:
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(prefix="thalweg-") as folder:
        socket = str(Path(folder) / "sidecar.sock")
        argv = [str(_binaries.find(_binaries.SIDECAR)), "--socket", socket]
        if not os.environ["THALWEG_AGGREGATORS"]:
            argv += ["--shard-listen", "127.0.0.1:0"]
        sidecar = Server("the sidecar", argv, env=os.environ)
        try:
            sidecar.wait_ready(30)
            os.environ["THALWEG_SIDECAR"] = socket
            said = send_round()
        finally:
            sidecar.stop(grace=5)
    if dist.get_rank() == 0:
        print(said)
    gc.collect()  # a module in a reference cycle would keep Gloo's threads running to the end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
