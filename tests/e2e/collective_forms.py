"""This module has all forms of collectives, each as a check of its own.

Each raises AssertionError unless it gets what numpy, or counting, expects.
"""

import functools
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

CHECKS: dict[str, Callable[[], None]] = {}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def given(rank: int, *shape: int) -> torch.Tensor:
    """Returns what a rank gives: small integers, whose sums float32 has."""
    source = np.random.default_rng(rank)
    values = torch.from_numpy(source.integers(-9, 10, shape).astype(np.float32))
    return values.to(torch.get_default_device())


def everybodys(*shape: int) -> np.ndarray:
    """Returns what all ranks give, stacked."""
    return np.stack([given(rank, *shape).cpu().numpy() for rank in range(dist.get_world_size())])


def mine(*shape: int) -> torch.Tensor:
    return given(dist.get_rank(), *shape)


def same(got: torch.Tensor, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        expected = expected.cpu()
    np.testing.assert_array_equal(got.cpu().numpy(), np.asarray(expected))


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception:  # noqa: BLE001 - whatever it is, it is the result
        return traceback.format_exc()
    return ""


def shares(values: np.ndarray) -> np.ndarray:
    """Returns this rank's share of the sum of `values` over ranks."""
    return np.split(values.sum(0), dist.get_world_size())[dist.get_rank()]


@check
def functional_collectives() -> None:
    group, world = dist.group.WORLD, dist.get_world_size()
    values, rows = everybodys(4, 3), everybodys(2 * world, 3)
    same(functional.all_reduce(mine(4, 3), "sum", group), values.sum(0))
    same(functional.all_reduce(mine(4, 3), "max", group), values.max(0))
    same(functional.all_gather_tensor(mine(4, 3), 0, group), np.concatenate(values))
    same(functional.all_gather_tensor(mine(4, 3), 1, group), np.concatenate(values, 1))
    same(functional.reduce_scatter_tensor(mine(2 * world, 3), "sum", 0, group), shares(rows))
    same(functional.broadcast(mine(4, 3), world - 1, group), values[-1])
    blocks = rows.reshape(world, world, 2, 3)[:, dist.get_rank()].reshape(-1, 3)
    same(functional.all_to_all_single(mine(2 * world, 3), None, None, group), blocks)


@check
def functional_coalesced_collectives() -> None:
    group, world = dist.group.WORLD, dist.get_world_size()
    shapes = (4, 3), (7,), (0,)
    inputs = [mine(*shape) for shape in shapes]
    for shape, got in zip(
        shapes, functional.all_reduce_coalesced(inputs, "sum", group), strict=True
    ):
        same(got, everybodys(*shape).sum(0))
    gathered = functional.all_gather_into_tensor_coalesced(inputs, group)
    for shape, got in zip(shapes, gathered, strict=True):
        same(got, np.concatenate(everybodys(*shape)))
    inputs = [mine(2 * world, 3), mine(world)]
    scattered = functional.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0], group)
    for one, got in zip(inputs, scattered, strict=True):
        same(got, shares(everybodys(*one.shape)))


@check
def coalescing_manager() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    sums = [mine(5), mine(2, 3)]
    with dist._coalescing_manager():
        for tensor in sums:
            dist.all_reduce(tensor)
    same(sums[0], everybodys(5).sum(0))
    same(sums[1], everybodys(2, 3).sum(0))
    outputs = [torch.empty(5 * world), torch.empty(world)]
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_gather_into_tensor(outputs[0], mine(5))
        dist.all_gather_into_tensor(outputs[1], torch.tensor([float(rank)]))
    works.wait()
    same(outputs[0], np.concatenate(everybodys(5)))
    same(outputs[1], range(world))
    parts = [torch.empty(2), torch.empty(3)]
    with dist._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_tensor(part, mine(len(part) * world))
    for part in parts:
        same(part, shares(everybodys(len(part) * world)))


@check
def coalesced_collectives() -> None:
    world = dist.get_world_size()
    sums = [mine(5), mine(2, 3), mine(0)]
    dist.all_reduce_coalesced(sums)
    for total in sums:
        same(total, everybodys(*total.shape).sum(0))
    outputs = [[torch.empty(5), torch.empty(2, 3)] for _ in range(world)]
    dist.all_gather_coalesced(outputs, [mine(5), mine(2, 3)])
    for rank, (first, second) in enumerate(outputs):
        same(first, given(rank, 5))
        same(second, given(rank, 2, 3))


@check
def results_that_come_in_parts() -> None:
    """Gets results of several MiB, which also lie where the worker's own values do."""
    rank, world, size = dist.get_rank(), dist.get_world_size(), 3 << 19
    values = everybodys(size)
    sums = [mine(size) for _ in range(3)]
    works = [dist.all_reduce(total, async_op=True) for total in sums]
    for work, total in zip(works, sums, strict=True):
        work.wait()
        same(total, values.sum(0))
    whole = torch.zeros(world * size)
    slots = whole.view(world, size)
    slots[rank] = mine(size)
    dist.all_gather_into_tensor(whole, slots[rank])
    same(whole, np.concatenate(values))
    part = whole.view(world, size)[rank]
    dist.reduce_scatter_tensor(part, whole)
    same(part, values[rank] * world)
    pieces = [torch.empty(size) for _ in range(world)]
    dist.all_gather(pieces, mine(size))
    same(torch.stack(pieces), values)
    dist.broadcast(pieces[0], world - 1)
    same(pieces[0], values[0])
    root = world - 1
    total = mine(size)
    dist.reduce(total, root)
    if rank == root:
        same(total, values.sum(0))


@check
def sums_of_products() -> None:
    """Sums what each rank has multiplied by its own factor, a number or a tensor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    factors = np.array([[0.5 * (other + 1)] for other in range(world)])
    for factor in (float(factors[rank, 0]), torch.tensor(factors[rank], dtype=torch.float32)):
        product = dist._make_nccl_premul_sum(factor)
        tensor = mine(6)
        dist.all_reduce(tensor, product)
        same(tensor, (everybodys(6) * factors).sum(0))
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, mine(2 * world), product)
        same(part, shares(everybodys(2 * world) * factors))


@check
def complex_numbers() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.complex64, torch.complex128):
        values = everybodys(6) + 1j * everybodys(2, 3).reshape(world, 6)
        tensor = torch.from_numpy(values[rank]).to(dtype)
        total, mean = tensor.clone(), tensor.clone()
        dist.all_reduce(total)
        same(total, values.sum(0))
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        same(mean, values.sum(0) / world)
        outputs = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(outputs, tensor)
        same(torch.stack(outputs), values)
        dist.broadcast(tensor, 0)
        same(tensor, values[0])


@check
def truth_values() -> None:
    values = everybodys(64) > 0
    operations = {"SUM": "any", "PRODUCT": "all", "MAX": "any", "MIN": "all", "BOR": "any"}
    for operation, expected in operations.items():
        tensor = mine(64) > 0
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        same(tensor, getattr(values, expected)(0))
    outputs = [torch.empty(64, dtype=torch.bool) for _ in values]
    dist.all_gather(outputs, mine(64) > 0)
    same(torch.stack(outputs), values)


@check
def other_strides() -> None:
    """Gives and gets tensors whose elements do not lie side by side."""
    world, rank = dist.get_world_size(), dist.get_rank()
    values = everybodys(3, 4)
    tensor = mine(3, 4).t().contiguous().t()
    dist.all_reduce(tensor)
    same(tensor, values.sum(0))
    memory = torch.full((3, 8), -1.0)
    memory[:, ::2] = mine(3, 4)
    dist.broadcast(memory[:, ::2], world - 1)
    same(memory[:, ::2], values[-1])
    same(memory[:, 1::2], np.full((3, 4), -1))
    memory = torch.full((world, 3, 8), -1.0)
    dist.all_gather([one[:, ::2] for one in memory], mine(3, 8)[:, ::2])
    same(memory[..., ::2], everybodys(3, 8)[..., ::2])
    same(memory[..., 1::2], np.full((world, 3, 4), -1))
    output = torch.empty(4, 2 * world)[:, rank]
    dist.reduce_scatter(output, list(mine(4, 3 * world)[:, ::3].t()))
    same(output, everybodys(4, 3 * world)[:, :, 3 * rank].sum(0))
    output = torch.empty(4, 2)[:, 1]
    dist.scatter(output, list(mine(4, world).t()) if rank == 0 else None, 0)
    same(output, everybodys(4, world)[0][:, rank])
    output = torch.empty(3, 2 * world).t()[::2]
    dist.all_to_all_single(output, mine(3, world).t())
    same(output, everybodys(3, world)[:, :, rank])


@check
def nothing_at_all() -> None:
    """Calls everything with tensors that have no elements."""
    world, rank = dist.get_world_size(), dist.get_rank()
    none = torch.empty(0, 3)
    dist.all_reduce(none)
    dist.broadcast(none, 0)
    dist.reduce(none, 0)
    nones = [torch.empty(0, 3) for _ in range(world)]
    dist.all_gather(nones, none)
    dist.all_gather_into_tensor(torch.empty(0, 3), none)
    dist.reduce_scatter(none, nones)
    dist.reduce_scatter_tensor(none, torch.empty(0, 3))
    dist.gather(none, nones if rank == 0 else None, 0)
    dist.scatter(none, nones if rank == 0 else None, 0)
    dist.all_to_all(nones, [torch.empty(0, 3) for _ in range(world)])
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    count = torch.ones(1)
    dist.all_reduce(count)
    same(count, [world])


@check
def eight_bit_floats() -> None:
    """Moves them where nothing is summed, and is refused where something is."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in FLOAT8:
        values = [given(other, world, 5).to(dtype) for other in range(world)]
        raw = np.stack([value.view(torch.uint8).cpu().numpy() for value in values])
        empty = functools.partial(torch.empty, dtype=dtype)
        outputs = [empty(world, 5) for _ in range(world)]
        dist.all_gather(outputs, values[rank])
        same(torch.stack(outputs).view(torch.uint8), raw)
        output = empty(world * world, 5)
        dist.all_gather_into_tensor(output, values[rank])
        same(output.view(torch.uint8), raw.reshape(-1, 5))
        tensor = values[rank].clone()
        dist.broadcast(tensor, world - 1)
        same(tensor.view(torch.uint8), raw[-1])
        output = empty(world, 5)
        dist.all_to_all_single(output, values[rank])
        same(output.view(torch.uint8), raw[:, rank])
        dist.scatter(output[0], list(values[0]) if rank == 0 else None, 0)
        same(output[0].view(torch.uint8), raw[0, rank])
        outputs = [empty(5) for _ in range(world)] if rank == 0 else []
        dist.gather(values[rank][0], outputs or None, 0)
        for other, got in enumerate(outputs):
            same(got.view(torch.uint8), raw[other, 0])
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            assert "allreduce with SUM of Float8" in str(error)
        else:
            raise AssertionError("a sum of float8 was taken")


@check
def compiled_function() -> None:
    group, world = dist.group.WORLD, dist.get_world_size()

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(tensor * 2, "sum", group)
        return functional.all_gather_tensor(total + 1, 0, group)

    expected = 2 * everybodys(3, 2).sum(0) + 1
    same(compiled(mine(3, 2)), np.concatenate([expected] * world))
