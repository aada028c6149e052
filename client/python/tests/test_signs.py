"""Tests what workers with the codec Signs send of their changes."""

import math

import pytest
import torch

from thalweg.ps import Signs
from thalweg.ps._signs import SignBlocks, block_length

SHAPES = [
    [(1,)],
    [(10,), (10, 100), (100,)],
    [(300, 64), (64,), (7, 3, 3, 3), (5000,), (2, 10000)],
]


def made(shapes, parts: int) -> SignBlocks:
    return SignBlocks([torch.Size(shape) for shape in shapes], Signs(parts))


def sent(coder: SignBlocks, payload: torch.Tensor, turn: int) -> torch.Tensor:
    result = torch.zeros(coder.elements)
    coder.add(payload, turn, result)
    return result


def blocks_of(values: torch.Tensor, shapes) -> list[torch.Tensor]:
    """Returns all blocks in their order, one by one."""
    sizes = [math.prod(shape) for shape in shapes]
    pairs = zip(values.split(sizes), shapes, strict=True)
    return [b for part, shape in pairs for b in part.split(block_length(torch.Size(shape)))]


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        *(((100, 64), 64), ((64,), 64), ((3, 4096), 4096), ((32,), 32)),
        *(((64, 3, 3, 3), 2 * 27), ((1000, 1), 32), ((10,), 40)),  # as many rows as it takes
        *(((2, 10000), 3334), ((100000,), 4000)),  # equal parts of a row, rounded up
    ],
)
def test_block_is_a_row_where_that_is_neither_short_nor_long(shape, length):
    assert block_length(torch.Size(shape)) == length


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("parts", [1, 3, 4, 256])
def test_each_block_is_sent_in_its_turn_as_signs_and_its_mean_magnitude(shapes, parts):
    torch.manual_seed(0)
    coder = made(shapes, parts)
    times = [0] * len(blocks_of(torch.zeros(coder.elements), shapes))
    for turn in range(2 * parts):
        changes = torch.randn(coder.elements)
        before = changes.clone()
        payload, rest = coder.encode(changes, turn)
        assert torch.equal(changes, before)
        got = sent(coder, payload, turn)
        assert torch.equal(changes - got, rest)
        pairs = zip(blocks_of(changes, shapes), blocks_of(got, shapes), strict=True)
        bits, blocks = 0, 0
        for number, (block, found) in enumerate(pairs):
            if number % parts != turn % parts:
                assert not found.any()
                continue
            times[number] += 1
            magnitude = block.abs().mean().bfloat16().float()
            assert torch.equal(found, torch.where(block < 0, -magnitude, magnitude))
            bits, blocks = bits + len(block), blocks + 1
        assert payload.dtype == torch.uint8
        assert len(payload) == 4 * (math.ceil(bits / 32) + math.ceil(blocks / 2))
    assert set(times) == {2}


def test_payloads_of_all_workers_are_added():
    coder = made(SHAPES[1], 2)
    torch.manual_seed(1)
    payloads = [coder.encode(torch.randn(coder.elements), 1)[0] for _ in range(3)]
    total = torch.zeros(coder.elements)
    for payload in payloads:
        coder.add(payload, 1, total)
    assert torch.equal(total, sum(sent(coder, payload, 1) for payload in payloads))


def test_changes_that_go_the_same_way_arrive_in_the_end():
    shapes = [(8, 32)]
    coder = made(shapes, 4)
    torch.manual_seed(2)
    each = torch.randn(coder.elements)
    arrived, rest = torch.zeros_like(each), torch.zeros_like(each)
    for turn in range(400):
        payload, rest = coder.encode(rest + each, turn)
        arrived += sent(coder, payload, turn)
    # Nothing is lost: what has not arrived is held. 400 times, sums of at most 400 * 4 are rounded
    # on both sides. What is held does not grow with the turns.
    assert torch.allclose(arrived + rest, 400 * each, rtol=0, atol=2 * 400 * 400 * 4 * 2.0**-24)
    assert (arrived - 400 * each).norm() < 0.1 * (400 * each).norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_block_with_an_element_that_is_not_finite_arrives_as_such_and_others_do_not(bad):
    coder = made([(4, 32)], 1)
    changes = torch.ones(4, 32)
    changes[2, 5] = bad
    payload, rest = coder.encode(changes.flatten(), 0)
    got = sent(coder, payload, 0).view(4, 32)
    assert not got[2].isfinite().any()
    assert got[[0, 1, 3]].isfinite().all()
    assert rest.view(4, 32)[[0, 1, 3]].isfinite().all()
