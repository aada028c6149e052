"""Adds what concerns groups and single calls, whatever the collective, to collective_forms."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collective_forms import check, everybodys, mine, outcome, same
from torch.distributed.device_mesh import init_device_mesh


@check
def groups_of_a_mesh() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(
        torch.get_default_device().type, (world // 2, 2), mesh_dim_names=("outer", "inner")
    )
    row, column = divmod(rank, 2)
    total = mine(5)
    dist.all_reduce(total, group=mesh.get_group("inner"))
    same(total, everybodys(5)[2 * row : 2 * row + 2].sum(0))
    total = mine(5)
    dist.all_reduce(total, group=mesh.get_group("outer"))
    same(total, everybodys(5)[column::2].sum(0))
    total = functional.all_reduce(mine(5), "sum", (mesh, 1))
    same(total, everybodys(5)[2 * row : 2 * row + 2].sum(0))


@check
def split_groups() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    dist.group.WORLD.bound_device_id = torch.device("cuda:0")  # torch splits no other groups
    parts = [range(1, world), range(1)]
    ours = parts[0] if rank > 0 else parts[1]
    total = mine(5)
    dist.all_reduce(total, group=dist.split_group(split_ranks=[list(part) for part in parts]))
    same(total, everybodys(5)[ours.start : ours.stop].sum(0))
    last = dist.split_group(split_ranks=[[world - 1]])
    # torch 2.14 and newer return NON_GROUP_MEMBER, older ones None.
    assert (last in (None, dist.GroupMember.NON_GROUP_MEMBER)) == (rank < world - 1)
    dist.new_group([0])  # which torch splits off, too


@check
def two_types_in_one_call() -> None:
    """Are refused, and the group goes on."""
    world = dist.get_world_size()
    for other in (torch.int32, torch.float64, torch.complex64):
        of_all = torch.zeros(2 * world, dtype=other)
        into = outcome(lambda of_all=of_all: dist.all_gather_into_tensor(of_all, mine(2)))
        out_of = outcome(lambda of_all=of_all: dist.reduce_scatter_tensor(mine(2), of_all))
        assert "RuntimeError: thalweg: allgather of Float and " in into or "elements" in into, into
        assert "RuntimeError: thalweg: reduce_scatter of " in out_of, out_of
    count = torch.ones(1)
    dist.all_reduce(count)
    same(count, [world])


@check
def works_that_torch_counts() -> None:
    """Are forgotten when they have been waited for."""
    with functional.allow_inflight_collective_as_graph_input_ctx():
        before = torch._C._distributed_c10d._get_work_registry_size()
        work = dist.all_reduce(mine(5), async_op=True)
        assert work is not None
        assert torch._C._distributed_c10d._get_work_registry_size() == before + 1
        work.wait()
        assert torch._C._distributed_c10d._get_work_registry_size() == before


@check
def futures_of_works_that_have_been_waited_for() -> None:
    """A work's future has its value when wait() has returned."""
    for _ in range(500):
        tensor = mine(5)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        future = work.get_future()
        work.wait()
        assert future.done()
        assert work.is_completed()
        same(future.value()[0], tensor)


@check
def tensors_that_repeat_their_memory() -> None:
    expected = everybodys(3, 1).sum(0).repeat(4, axis=1)
    tensor = mine(3, 1).expand(3, 4)
    dist.all_reduce(tensor)
    same(tensor, expected)
    tensor = torch.zeros(1, device=tensor.device).expand(2, 4)
    dist.broadcast(tensor, 0) if dist.get_rank() else dist.broadcast(torch.ones_like(tensor), 0)
    assert dist.get_rank() == 0 or tensor.eq(1).all()


@check
def inference_mode() -> None:
    """Tensors that are not contiguous may be given and got in it, too."""
    with torch.inference_mode():
        tensor = mine(3, 4).t()
        dist.all_reduce(tensor)
        same(tensor, everybodys(3, 4).sum(0).T)
        outputs = [torch.empty(4, 3).t() for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, mine(3, 4))
        same(torch.stack(outputs), everybodys(3, 4))


@check
def many_at_once() -> None:
    """A collective in flight holds no descriptor."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    tensors = [torch.full((5000,), float(number)) for number in range(300)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        work.wait()
        assert tensor.eq(number * dist.get_world_size()).all()
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 50


@check
def exchange_in_place() -> None:
    """Gives what the memory had at the call, also in parts that take their time."""
    world, rank = dist.get_world_size(), dist.get_rank()
    elements = 1 << 20
    tensor = (10 * rank + torch.arange(world)).repeat_interleave(elements)
    dist.all_to_all_single(tensor, tensor)
    got = tensor.view(world, elements)
    same(got.amin(1), [10 * other + rank for other in range(world)])
    same(got.amax(1), [10 * other + rank for other in range(world)])
