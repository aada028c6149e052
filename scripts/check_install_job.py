"""Runs ten steps of DDP through thalweg, and compares with the same training in one process."""

import copy
import gc

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

STEPS = 10


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    state = thalweg.ddp.attach(ddp)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, alone)]
    for _ in range(STEPS):
        inputs, targets = torch.randn(world, 16, 32), torch.randn(world, 16, 4)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mse_loss(ddp(inputs[rank]), targets[rank]).backward()
        mse_loss(alone(inputs.flatten(0, 1)), targets.flatten(0, 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
    # Both sum the same float32 products in another order: 80 products per weight and step.
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    if state.stats()["rounds"] < STEPS:
        raise RuntimeError(f"the gradients of {STEPS} steps bypassed thalweg: {state.summary()}")
    if rank == 0:
        print(state.summary())
    state.close()
    del model, ddp, state
    gc.collect()  # a module in a reference cycle would keep Gloo's threads running to the end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
