"""Adds the forms of collectives of sparse tensors to those of collective_forms."""

import numpy as np
import torch
import torch.distributed as dist
from collective_forms import check, given, outcome, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def sparse(rank: int) -> torch.Tensor:
    """Returns what a rank gives: rows of a matrix, some twice; rank 0 has none."""
    rows = torch.arange(2 * rank) % 5
    return torch.sparse_coo_tensor(rows[None], given(rank, 2 * rank, 3), (7, 3))


@check
def sparse_tensors() -> None:
    expected = sum(sparse(rank).to_dense().cpu().numpy() for rank in range(dist.get_world_size()))
    mine = sparse(dist.get_rank())
    work = dist.all_reduce(mine, async_op=True)
    dense = torch.ones(3)
    dist.all_reduce(dense)  # is not mistaken for what the sparse one still does
    work.wait()
    same(mine.to_dense(), expected)
    same(dense, [dist.get_world_size()] * 3)
    mean = sparse(dist.get_rank())
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    same(mean.to_dense(), expected / dist.get_world_size())
    whole = torch.eye(4).to_sparse()  # every dimension is sparse
    dist.all_reduce(whole)
    same(whole.to_dense(), np.eye(4) * dist.get_world_size())
    error = outcome(lambda: dist.all_reduce(sparse(0), dist.ReduceOp.MAX))
    assert "allreduce of sparse tensors with MAX is not supported" in error, error
    whole_numbers = torch.eye(4, dtype=torch.int64).to_sparse()
    error = outcome(lambda: dist.all_reduce(whole_numbers, dist.ReduceOp.AVG))
    assert "integers have no exact mean; take the sum and divide" in error, error
    changed = sparse(dist.get_rank()).coalesce()
    values = changed._values()  # taken now: by the time all_reduce returns, they may be the sum's
    work = dist.all_reduce(changed, async_op=True)
    values.zero_()  # what was given has been copied
    work.wait()
    same(changed.to_dense(), expected)
    dtype = torch.float64 if dist.get_rank() == 0 else torch.int64
    error = outcome(lambda: dist.all_reduce(torch.eye(4, dtype=dtype).to_sparse()))
    assert "or another type" in error, error


@check
def sparse_gradients_of_embeddings() -> None:
    def grad(rank: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
        if rank < 0:
            model, rank = DistributedDataParallel(model), dist.get_rank()
        model(torch.tensor([[rank, 3]])).sum().backward()
        return next(model.parameters()).grad.to_dense()

    world = dist.get_world_size()
    same(grad(-1), sum(grad(rank).cpu().numpy() for rank in range(world)) / world)


@check
def sparse_sums_whose_callbacks_call_collectives() -> None:
    """The callbacks of one rank are added when all has ended, and those of the others before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for late in range(world):
        if rank == late:
            store.wait([f"added {late} {other}" for other in range(world) if other != late])
        dense, total = torch.ones(2), sparse(rank)
        works = [dist.all_reduce(each, async_op=True) for each in (dense, total)]
        if rank == late:
            for work in works:
                work.wait()
        sums = [torch.ones(3), torch.full((5,), 10.0)]
        futures = [
            work.get_future().then(lambda _, each=each: dist.all_reduce(each))
            for work, each in zip(works, sums, strict=True)
        ]
        store.set(f"added {late} {rank}", "")
        for future in futures:
            future.wait()
        same(sums[0], [world] * 3)
        same(sums[1], [10 * world] * 5)
        same(total.to_dense(), sum(sparse(each).to_dense().cpu().numpy() for each in range(world)))
