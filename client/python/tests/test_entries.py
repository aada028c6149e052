"""Tests what workers with the codec Sparse send of their changes."""

import math

import pytest
import torch

from thalweg import codecs, policy
from thalweg.ps import Sparse
from thalweg.ps._entries import Entries

SIZES = [[1], [7, 1, 3000, 6400], [1 << 17], [5, 5, 5]]


def dense(coder: Entries, payload: torch.Tensor) -> torch.Tensor:
    places, values = coder.decode(payload)
    assert len(set(places.tolist())) == len(places)
    result = torch.zeros(coder.elements)
    result[places] = values
    return result


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ratio", [0.001, 0.02, 0.3, 1.0])
def test_what_is_sent_and_what_is_held_back_are_the_changes(sizes, ratio):
    torch.manual_seed(0)
    coder = Entries(sizes, Sparse(ratio, 1.0))
    for _ in range(3):
        whole = torch.randn(coder.elements)
        before = coder.held.clone()
        payload = coder.encode(whole)
        assert payload.dtype == torch.uint8
        assert len(payload) == coder.payload_bytes
        sent = dense(coder, payload)
        assert torch.equal(whole + before - sent, coder.held)
        counts = [(part != 0).sum().item() for part in sent.split(sizes)]
        assert counts == [math.ceil(ratio * size) for size in sizes]


@pytest.mark.parametrize("at", [slice(0, 20), slice(980, 1000), slice(0, 1000, 50)])
def test_largest_are_sent_wherever_they_are_in_as_many_bytes(at):
    changes = torch.full((1000,), 0.5)
    changes[at] = torch.tensor([2.0, -2.0, 3.0, -5.0]).repeat(5)
    coder = Entries([1000], Sparse(0.02, 0.0))
    payload = coder.encode(changes)
    assert len(payload) == coder.payload_bytes
    # The mean magnitude is 3: 5 is above it, and 2, 2 and 3 are not.
    levels = torch.tensor([7 / 3, -7 / 3, 7 / 3, -5.0]).repeat(5)
    expected = torch.zeros(1000)
    expected[at] = levels
    assert torch.allclose(dense(coder, payload), expected, rtol=1e-6, atol=0)


def test_part_of_what_is_held_back_comes_with_the_next_changes():
    coder = Entries([4], Sparse(0.25, 0.5))
    assert dense(coder, coder.encode(torch.tensor([8.0, 4.0, 0.0, 0.0]))).tolist() == [8, 0, 0, 0]
    assert dense(coder, coder.encode(torch.tensor([0.0, 0.0, 1.0, 0.0]))).tolist() == [0, 2, 0, 0]
    assert coder.held.tolist() == [0, 0, 1, 0]


def test_equal_magnitudes_arrive_although_their_mean_is_rounded():
    magnitude, sizes = 0.7, range(2, 40)
    assert any((part > part.mean()).all() for part in (torch.full((n,), magnitude) for n in sizes))
    for size in sizes:
        coder = Entries([size], Sparse(1.0, 0.0))
        changes = torch.full((size,), magnitude)
        got = dense(coder, coder.encode(changes))
        # A sum rounds once for each element, and the division once.
        assert torch.allclose(got, changes, rtol=(size + 1) * 2.0**-24, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tensor_with_an_element_that_is_not_finite_becomes_nan_and_the_others_do_not(bad):
    coder = Entries([100, 100], Sparse(0.02, 1.0))
    coder.encode(torch.linspace(1, 2, 200))
    before = coder.held.clone()
    changes = torch.linspace(1, 2, 200)
    changes[17] = bad
    first, second = dense(coder, coder.encode(changes)).split(100)
    assert first.isnan().sum() == 2
    assert second.isfinite().all()
    held, rest = coder.held.split(100)
    assert torch.equal(held, before[:100])
    assert not torch.equal(rest, before[100:])


def test_cut_payload_is_refused():
    coder = Entries([1000], Sparse(0.02))
    payload = coder.encode(torch.randn(1000))
    payload[-20:] = 0
    with pytest.raises(RuntimeError, match=r"have \d+ entries, expected 20"):
        coder.decode(payload)


def test_text_is_for_local_updates_alone():
    codec = codecs.parse("sparse:ratio=0.1", also=[Sparse])
    assert codec == Sparse(ratio=0.1)
    assert codec.spec() == "sparse:ratio=0.1,feedback=0.95"
    with pytest.raises(ValueError, match=r"codec is 'sparse', expected .*LocalOptimizer"):
        policy.parse("sparse")
    with pytest.raises(ValueError, match="ratio is '2', expected a number above 0, at most 1"):
        codecs.parse("sparse:2", also=[Sparse])
