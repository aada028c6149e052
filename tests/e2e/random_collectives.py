"""Takes part in random collectives, and compares them with numpy's results."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SIZES = (0, 1, 3, 1000, 4097, 70_001)
# Workers of a node get results of so many elements of 4 bytes in parts, while others are made.
LARGE_SIZES = (1_500_001, 2_200_001)
OPS = {
    "SUM": lambda values: values.sum(0),
    "PRODUCT": lambda values: values.prod(0),
    "MIN": lambda values: values.min(0),
    "MAX": lambda values: values.max(0),
    "BAND": np.bitwise_and.reduce,
    "BOR": np.bitwise_or.reduce,
    "BXOR": np.bitwise_xor.reduce,
    "AVG": lambda values: values.mean(0),
}
# Roundings to a type, in units of 2**-digits.
DIGITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def random_large_collectives() -> list[str]:
    """Does so with sizes whose results come in parts."""
    return random_collectives(20, LARGE_SIZES)


def random_collectives(count: int = 70, sizes: Sequence[int] = SIZES) -> list[str]:
    """Takes part in random collectives of random groups; returns what was wrong.

    All ranks draw the same collectives, and know what each rank gives: the reference is numpy's, in
    the integers' own type, or float64.
    """
    seed = int(os.environ["SEED"])
    rank, world = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed)
    groups = [(list(range(world)), dist.group.WORLD)]
    for _ in range(2):
        ranks = sorted(draw.sample(range(world), draw.randint(1, world)))
        groups.append((ranks, dist.new_group(ranks)))
    problems = []
    for number in range(count):
        ranks, group = draw.choice(groups)
        kind = draw.choice(sorted(KINDS))
        dtype = draw.choice(FLOATS + INTEGERS)
        ops = [op for op in OPS if _has(op, dtype)]
        op, size, root = draw.choice(ops), draw.choice(sizes), draw.choice(ranks)
        if rank not in ranks:
            continue
        case = Case(seed * 1000 + number, group, ranks, dtype, op, size, root)
        problem = KINDS[kind](case)
        if problem:
            problems.append(f"{number}: {kind} {op} of {size} {dtype} on {ranks}: {problem}")
    return problems


def _has(op: str, dtype: torch.dtype) -> bool:
    return not ((dtype in FLOATS and op.startswith("B")) or (dtype in INTEGERS and op == "AVG"))


@dataclass(frozen=True)
class Case:
    """One collective, and what each rank of its group gives to it."""

    seed: int
    group: Any
    ranks: list[int]
    dtype: torch.dtype
    op: str
    size: int
    root: int

    @property
    def me(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(dist.get_rank())

    @property
    def reduce_op(self) -> Any:
        return getattr(dist.ReduceOp, self.op)

    def given(self, place: int, part: int = 0) -> torch.Tensor:
        """What the rank at this place gives, as its part for another."""
        source = torch.Generator().manual_seed(self.seed * 10_000 + place * 100 + part)
        if self.dtype in FLOATS:
            return (torch.rand(self.size, generator=source) * 4 - 2).to(self.dtype)
        info = torch.iinfo(self.dtype)
        low, high = max(info.min, -(2**62)), min(info.max, 2**62)
        values = torch.randint(low, high, (self.size,), generator=source, dtype=torch.int64)
        return values.to(self.dtype)

    def all(self, part: int = 0) -> list[torch.Tensor]:
        return [self.given(place, part) for place in range(len(self.ranks))]

    def empty(self) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype)

    def check(self, got: torch.Tensor, expected: torch.Tensor) -> str:
        return "" if torch.equal(got, expected) else "other bytes"

    def check_folded(self, got: torch.Tensor, part: int = 0) -> str:
        values = self.all(part)
        if self.dtype in INTEGERS:
            stacked = np.stack([value.numpy() for value in values])
            with np.errstate(over="ignore"):
                folded = OPS[self.op](stacked).astype(stacked.dtype)
            return self.check(got, torch.from_numpy(folded))
        stacked = np.stack([value.double().numpy() for value in values])
        expected = torch.from_numpy(np.asarray(OPS[self.op](stacked)))
        # Each node rounds to the type, and so does the shard; sums are at most as large as those of
        # absolute values, and each of n - 1 operations rounds in float32 at least.
        n = len(values)
        roundings = 3 * 2.0 ** -DIGITS[self.dtype] + 2 * n * 2.0 ** -min(24, DIGITS[self.dtype])
        if self.dtype is torch.float64:
            roundings = (3 + 2 * n) * 2.0**-53
        scale = np.abs(stacked)
        bound = scale.prod(0) if self.op == "PRODUCT" else scale.sum(0)
        tiny = torch.finfo(self.dtype).smallest_normal * 2.0 ** -DIGITS[self.dtype] * 4
        error = (got.double() - expected).abs()
        return (
            "" if bool((error <= torch.from_numpy(bound) * roundings + tiny).all()) else "far off"
        )


def _all_reduce(case: Case) -> str:
    tensor = case.given(case.me)
    dist.all_reduce(tensor, case.reduce_op, case.group)
    return case.check_folded(tensor) + _differs_between_ranks(case, tensor)


def _differs_between_ranks(case: Case, tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
    digests: list[Any] = [None] * len(case.ranks)
    dist.all_gather_object(digests, digest, case.group)
    return "" if len(set(digests)) == 1 else " other bits on other ranks"


def _reduce(case: Case) -> str:
    tensor = case.given(case.me)
    dist.reduce(tensor, case.root, case.reduce_op, case.group)
    return case.check_folded(tensor) if case.ranks[case.me] == case.root else ""


def _broadcast(case: Case) -> str:
    tensor = case.given(case.me)
    dist.broadcast(tensor, case.root, case.group)
    return case.check(tensor, case.given(case.ranks.index(case.root)))


def _all_gather(case: Case) -> str:
    outputs = [case.empty() for _ in case.ranks]
    dist.all_gather(outputs, case.given(case.me), case.group)
    return case.check(torch.cat(outputs), torch.cat(case.all()))


def _all_gather_into(case: Case) -> str:
    output = torch.empty(case.size * len(case.ranks), dtype=case.dtype)
    dist.all_gather_into_tensor(output, case.given(case.me), case.group)
    return case.check(output, torch.cat(case.all()))


def _reduce_scatter(case: Case) -> str:
    output, n = case.empty(), len(case.ranks)
    inputs = [case.given(case.me, part) for part in range(n)]
    dist.reduce_scatter(output, inputs, case.reduce_op, case.group)
    return case.check_folded(output, case.me)


def _reduce_scatter_tensor(case: Case) -> str:
    output, n = case.empty(), len(case.ranks)
    inputs = torch.cat([case.given(case.me, part) for part in range(n)])
    dist.reduce_scatter_tensor(output, inputs, case.reduce_op, case.group)
    return case.check_folded(output, case.me)


def _gather(case: Case) -> str:
    is_root = case.ranks[case.me] == case.root
    outputs = [case.empty() for _ in case.ranks] if is_root else None
    dist.gather(case.given(case.me), outputs, case.root, case.group)
    return case.check(torch.cat(outputs), torch.cat(case.all())) if outputs else ""


def _scatter(case: Case) -> str:
    output, n = case.empty(), len(case.ranks)
    place = case.ranks.index(case.root)
    inputs = [case.given(place, part) for part in range(n)] if case.me == place else None
    dist.scatter(output, inputs, case.root, case.group)
    return case.check(output, case.given(place, case.me))


def _all_to_all(case: Case) -> str:
    n = len(case.ranks)
    outputs = [case.empty() for _ in range(n)]
    dist.all_to_all(outputs, [case.given(case.me, part) for part in range(n)], case.group)
    return case.check(torch.cat(outputs), torch.cat([case.given(p, case.me) for p in range(n)]))


def _all_to_all_single(case: Case) -> str:
    """Parts have sizes of their own: that from rank a to rank b has rows(a, b) elements."""
    n = len(case.ranks)

    def rows(giver: int, taker: int) -> int:
        return min(case.size, (3 * giver + 5 * taker + case.size) % 7 * 500)

    given = [case.given(case.me, part)[: rows(case.me, part)] for part in range(n)]
    expected = [case.given(giver, case.me)[: rows(giver, case.me)] for giver in range(n)]
    sizes = [len(part) for part in expected]
    output = torch.empty(sum(sizes), dtype=case.dtype)
    dist.all_to_all_single(
        output, torch.cat(given), sizes, [len(part) for part in given], group=case.group
    )
    return case.check(output, torch.cat(expected))


def _ring(case: Case) -> str:
    """Everybody sends to the next rank, twice, and receives the second message first."""
    n = len(case.ranks)
    if n == 1:
        return ""  # torch refuses to send to oneself
    after, before = (case.me + 1) % n, (case.me - 1) % n
    sent = [
        dist.isend(case.given(case.me, tag), case.ranks[after], case.group, tag) for tag in (0, 1)
    ]
    got = [case.empty(), case.empty()]
    for tag in (1, 0):
        dist.recv(got[tag], case.ranks[before] if tag == 0 else None, case.group, tag)
    for work in sent:
        work.wait()
    return case.check(torch.cat(got), torch.cat([case.given(before, tag) for tag in (0, 1)]))


def _barrier(case: Case) -> str:
    dist.barrier(case.group)
    return ""


KINDS: dict[str, Callable[[Case], str]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "ring": _ring,
    "barrier": _barrier,
}
