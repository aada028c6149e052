"""Tests what workers with the codec Sparse send of their changes."""

import math
from collections.abc import Iterable

import pytest
import torch

from thalweg import codecs, policy
from thalweg.codecs import OF_WORKERS
from thalweg.ps import Signs, Sparse
from thalweg.ps._entries import Entries

SIZES = [[1], [7, 1, 3000, 6400], [1 << 17], [5, 5, 5]]


def made(sizes: Iterable[int], ratio: float) -> Entries:
    return Entries([torch.Size([size]) for size in sizes], Sparse(ratio))


def dense(coder: Entries, payload: torch.Tensor) -> torch.Tensor:
    places, _ = coder.decode(payload)
    assert len(set(places.tolist())) == len(places)
    result = torch.zeros(coder.elements)
    coder.add(payload, 0, result)
    return result


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ratio", [0.001, 0.02, 0.3, 1.0])
def test_what_is_sent_and_what_is_left_are_the_changes(sizes, ratio):
    torch.manual_seed(0)
    coder = made(sizes, ratio)
    sizes_of_payloads = set()
    for turn in range(3):
        changes = torch.randn(coder.elements)
        before = changes.clone()
        payload, rest = coder.encode(changes, turn)
        assert torch.equal(changes, before)
        assert payload.dtype == torch.uint8
        sizes_of_payloads.add(len(payload))
        sent = dense(coder, payload)
        assert torch.equal(changes - sent, rest)
        counts = [(part != 0).sum().item() for part in sent.split(sizes)]
        assert counts == [math.ceil(ratio * size) for size in sizes]
    assert len(sizes_of_payloads) == 1


@pytest.mark.parametrize("at", [slice(0, 20), slice(980, 1000), slice(0, 1000, 50)])
def test_largest_are_sent_wherever_they_are(at):
    changes = torch.full((1000,), 0.5)
    changes[at] = torch.tensor([2.0, -2.0, 3.0, -5.0]).repeat(5)
    coder = made([1000], 0.02)
    payload, _ = coder.encode(changes, 0)
    # The mean magnitude is 3: 5 is above it, and 2, 2 and 3 are not.
    levels = torch.tensor([7 / 3, -7 / 3, 7 / 3, -5.0]).repeat(5)
    expected = torch.zeros(1000)
    expected[at] = levels
    assert torch.allclose(dense(coder, payload), expected, rtol=1e-6, atol=0)


def test_equal_magnitudes_arrive_although_their_mean_is_rounded():
    magnitude, sizes = 0.7, range(2, 40)
    assert any((part > part.mean()).all() for part in (torch.full((n,), magnitude) for n in sizes))
    for size in sizes:
        coder = made([size], 1.0)
        changes = torch.full((size,), magnitude)
        got = dense(coder, coder.encode(changes, 0)[0])
        # A sum rounds once for each element, and the division once.
        assert torch.allclose(got, changes, rtol=(size + 1) * 2.0**-24, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tensor_with_an_element_that_is_not_finite_becomes_nan_and_the_others_do_not(bad):
    coder = made([100, 100], 0.02)
    changes = torch.linspace(1, 2, 200)
    changes[17] = bad
    payload, rest = coder.encode(changes, 0)
    first, second = dense(coder, payload).split(100)
    assert first.isnan().sum() == 2
    assert second.isfinite().all()
    assert rest[:100].isnan().sum() == 2
    assert rest[100:].isfinite().all()


def test_cut_payload_is_refused():
    coder = made([1000], 0.02)
    payload, _ = coder.encode(torch.randn(1000), 0)
    payload[-20:] = 0
    with pytest.raises(RuntimeError, match=r"have \d+ entries, expected 20"):
        coder.decode(payload)


@pytest.mark.parametrize(
    ("text", "codec", "whole"),
    [("sparse:0.1", Sparse(0.1), "sparse:ratio=0.1"), ("signs", Signs(), "signs:parts=4")],
)
def test_texts_are_for_local_updates_alone(text, codec, whole):
    assert codecs.parse(text, also=OF_WORKERS) == codec
    assert codec.spec() == whole
    with pytest.raises(ValueError, match=f"codec is '{text}', expected .*LocalOptimizer"):
        policy.parse(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sparse:2", "ratio is '2', expected a number above 0, at most 1"),
        ("signs:0", "parts is '0', expected a whole number from 1 to 256"),
    ],
)
def test_wrong_texts_are_refused(text, fault):
    with pytest.raises(ValueError, match=fault):
        codecs.parse(text, also=OF_WORKERS)
