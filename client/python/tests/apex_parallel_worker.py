"""One of two workers of test_apex_parallel.py: batch normalisation, Reducer and groups."""

import gc
import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from thalweg.compat._apex_batch_norm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from thalweg.compat._apex_reducer import Reducer

RANK = int(sys.argv[1])
SIZES = (3, 5)  # batches of the workers


def batches():
    torch.manual_seed(7)
    return torch.randn(sum(SIZES), 4, 3, 2) * 2 + 5, torch.randn(sum(SIZES), 4, 3, 2)


def mine(tensor):
    return tensor.split(SIZES)[RANK].clone()


def close(ours, exact):
    return float((ours.double() - exact).abs().max() / exact.abs().max())


def batch_norm(*, channel_last, momentum):
    """Returns the distances from one batch normalisation of the whole batch in float64."""
    x, slope = batches()
    torch.manual_seed(1)
    plain = nn.BatchNorm2d(4, momentum=momentum)
    nn.init.normal_(plain.weight)
    module = convert_syncbn_model(nn.Sequential(plain), None, channel_last)[0]
    assert module.weight is plain.weight
    exact = nn.BatchNorm2d(4, momentum=momentum).double()
    exact.load_state_dict(plain.state_dict())
    wide, local = x.double().requires_grad_(), mine(x)
    local = (local.movedim(1, -1) if channel_last else local).detach().requires_grad_()
    expected = exact(wide)
    (expected * slope).sum().backward()
    found = module(local)
    ours = found.movedim(-1, 1) if channel_last else found
    (ours * mine(slope)).sum().backward()
    gradient = local.grad.movedim(-1, 1) if channel_last else local.grad
    weight = module.weight.grad.clone()
    dist.all_reduce(weight)
    module.eval()
    exact.eval()
    later = module(local)
    later = later.movedim(-1, 1) if channel_last else later
    return [
        close(ours, mine(expected.detach())),
        close(gradient, mine(wide.grad)),
        close(weight, exact.weight.grad),
        close(module.running_mean, exact.running_mean),
        close(module.running_var, exact.running_var),
        close(later, mine(exact(wide).detach())),
    ]


def fused():
    """Returns whether z is added before the clamp, in half."""
    module = SyncBatchNorm(4, fuse_relu=True).half()
    x, z = (mine(t).half() for t in batches())
    found = module(x, z)
    plain = SyncBatchNorm(4)(x.float()) + z.float()
    return [str(found.dtype), float((found.float() - plain.relu()).abs().max())]


def under_ddp():
    """Returns the distance of DDP's mean of gradients from half of one batch's in float64."""
    x, slope = batches()
    exact = nn.BatchNorm2d(4).double()
    (exact(x.double()) * slope).sum().backward()
    model = nn.parallel.DistributedDataParallel(convert_syncbn_model(nn.BatchNorm2d(4)))
    (model(mine(x)) * mine(slope)).sum().backward()
    return close(2 * model.module.weight.grad, exact.weight.grad)


def groups():
    own = create_syncbn_process_group(1)
    module = SyncBatchNorm(4, process_group=own)
    x = mine(batches()[0])
    alone = nn.BatchNorm2d(4)(x)
    return [
        dist.get_world_size(own),
        create_syncbn_process_group(0),
        close(module(x), alone.double()),
    ]


def reducer():
    torch.manual_seed(RANK)
    module = nn.Linear(2, 1)
    reducing = Reducer(module)
    weights = module.weight.tolist()
    module(torch.full((1, 2), float(RANK + 1))).sum().backward()
    reducing.reduce()
    grads = [torch.full((2,), float(RANK)), torch.ones(1, dtype=torch.float64)]
    Reducer(grads).reduce()
    return [weights, module.weight.grad.tolist(), [g.tolist() for g in grads]]


def main():
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    result = {
        "first": batch_norm(channel_last=False, momentum=0.1),
        "last": batch_norm(channel_last=True, momentum=None),
        "fused": fused(),
        "ddp": under_ddp(),
        "groups": groups(),
        "reducer": reducer(),
    }
    gc.collect()  # Gloo's threads end with the last reference to their group
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
