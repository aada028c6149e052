"""Tests the bytes in which sharded models send parameters and gradients."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg._sharded._codecs import BLOCK, SMALL, Blocks, Cast, Parts, Piece

# The shards of 2 rows are a small tensor, one that ends within a block, one of whole blocks, and
# an empty one.
PIECES = [Piece(100, 200), Piece(700, 1400), Piece(1024, 2048), Piece(0, 2000)]
ELEMENTS = sum(piece.elements for piece in PIECES)


def values(seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, ELEMENTS, generator=source) * torch.logspace(-6, 2, ELEMENTS)


def decoded(codec, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty(len(rows), codec.elements)
    payload = codec.encode(rows, residual)
    assert payload.shape == (len(rows), codec.row_bytes)
    codec.decode(payload, out)
    return out


def by_numpy(block: np.ndarray) -> np.ndarray:
    """Returns what a block decodes to, by the formula of its docstring."""
    scale = np.float32(np.abs(block).max() / np.float32(125))
    if scale < np.finfo(np.float32).tiny:
        return np.zeros_like(block)
    inverse = np.float32(1) / scale
    # The product of two float32 is exact in float64.
    return np.round(block.astype(np.float64) * inverse).astype(np.float32) * scale


def test_blocks_of_each_tensor_are_those_of_numpy_and_small_tensors_are_kept():
    rows = values()
    result = decoded(Blocks(PIECES), rows)
    assert torch.equal(result[:, :100], rows[:, :100])
    for row, got in zip(rows.numpy(), result.numpy(), strict=True):
        for first, last in ((100, 800), (800, 1824)):
            for start in range(first, last, BLOCK):
                part = slice(start, min(start + BLOCK, last))
                np.testing.assert_array_equal(got[part], by_numpy(row[part]))


def test_a_block_is_its_scale_and_a_byte_for_each_element():
    rows = torch.zeros(1, BLOCK)
    rows[0, :4] = torch.tensor([125.0, -125.0, 0.5, 2.5])
    payload = Blocks([Piece(BLOCK, SMALL)]).encode(rows)[0]
    assert payload[:8].tolist() == [0, 0, 0x80, 0x3F, 125, 256 - 125, 0, 2]
    assert len(payload) == 260


def test_large_tensors_take_a_quarter_of_the_bytes():
    codec = Blocks([Piece(1 << 20, 1 << 22)])
    assert codec.row_bytes / (4 * codec.elements) == 260 / 1024


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_arrives_as_such_and_leaves_what_was_held_back(poison):
    codec, rows = Blocks(PIECES), values()
    residual = torch.zeros(2, codec.residual_elements)
    decoded(codec, rows, residual)
    before = residual.clone()
    rows[1, 810] = poison
    result = decoded(codec, rows, residual)
    torch.testing.assert_close(result[1, 810], torch.tensor(poison), equal_nan=True)
    assert result.isfinite().sum() == result.numel() - 1
    place = 3 * BLOCK + 10  # the second tensor's blocks come first
    assert residual[1, place] == before[1, place]
    assert residual.isfinite().all()
    assert not torch.equal(residual, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_operations_give_the_bits_of_the_kernel(dtype):
    codec = Blocks(PIECES)
    residuals = [torch.zeros(2, codec.residual_elements) for _ in range(2)]
    size = 260 * codec.residual_elements // BLOCK
    for seed in range(4):
        rows = values(seed).to(dtype)
        rows[0, 1000:1004] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-38])
        rows[1, 800:1312] *= 0
        bytes_of_kernel = codec.encode(rows, residuals[0])[:, -size:]
        bytes_of_torch = torch.empty_like(bytes_of_kernel)
        codec.encode_by_torch(rows, residuals[1], bytes_of_torch)
        assert torch.equal(bytes_of_torch, bytes_of_kernel)
        assert torch.equal(*residuals)
        # Bytes that no encoder writes decode alike as well.
        blocks = torch.cat([bytes_of_kernel, torch.randint(256, (2, size), dtype=torch.uint8)])
        by_kernel, by_torch = (torch.zeros(4, ELEMENTS, dtype=dtype) for _ in range(2))
        codec._kernel.decode(blocks, by_kernel)
        codec.decode_by_torch(blocks, by_torch)
        torch.testing.assert_close(by_torch, by_kernel, rtol=0, atol=0, equal_nan=True)


class Divisors(TorchDispatchMode):
    """Keeps what is divided by."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def test_torchs_operations_divide_by_tensors_as_gpus_multiply_instead_of_dividing_by_numbers():
    codec, rows = Blocks(PIECES), values()
    blocks = torch.empty(2, 260 * codec.residual_elements // BLOCK, dtype=torch.uint8)
    with Divisors() as divisors:
        codec.encode_by_torch(rows, None, blocks)
    assert [type(each) for each in divisors.found] == [torch.Tensor]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_gives_the_bits_of_the_kernel():
    codec = Blocks(PIECES)
    for seed in range(20):
        rows = values(seed)
        assert torch.equal(codec.encode(rows.cuda()).cpu(), codec.encode(rows))


def test_large_tensors_are_encoded_in_spans_with_the_same_bytes():
    elements = 3 * 65536 + 300
    rows = torch.randn(2, elements, generator=torch.Generator().manual_seed(5))
    codec = Blocks([Piece(elements, 2 * elements)])
    payload = codec.encode(rows)
    expected = torch.empty_like(payload)
    codec.encode_by_torch(rows, None, expected)
    assert torch.equal(payload, expected)


def test_bytes_of_another_size_are_refused():
    codec = Blocks(PIECES)
    with pytest.raises(RuntimeError, match="bytes of blocks do not fit"):
        codec._kernel.encode(values(), None, torch.empty(2, 7, dtype=torch.uint8))


def test_what_is_delivered_and_what_is_held_back_is_what_was_given():
    codec = Blocks(PIECES)
    residual = torch.zeros(2, codec.residual_elements)
    given, got = torch.zeros(2, ELEMENTS).double(), torch.zeros(2, ELEMENTS).double()
    for step in range(10):
        rows = values(step)
        given += rows
        got += decoded(codec, rows, residual)
    held = torch.cat([residual[:, :700], residual[:, 768:]], dim=1)
    # Each step rounds twice in float32: value + residual, and the residual.
    bound = 10 * 2 * 2.0**-24 * 2 * given.abs().max()
    assert (given[:, 100:] - got[:, 100:] - held).abs().max() <= bound
    assert not residual[:, 700:768].any()  # what fills up the block


def test_zeros_and_numbers_too_small_for_a_scale_become_zeros():
    rows = torch.full((1, BLOCK), 1e-39)
    codec = Blocks([Piece(BLOCK, SMALL)])
    assert not decoded(codec, rows).any()
    assert not decoded(codec, torch.zeros(1, BLOCK)).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_round_once_and_keep_what_is_not_finite(dtype):
    rows = values()
    rows[0, :3] = torch.tensor([float("nan"), float("inf"), 1e30])
    codec = Cast(dtype, PIECES)
    assert codec.row_bytes == 2 * ELEMENTS
    torch.testing.assert_close(
        decoded(codec, rows), rows.to(dtype).float(), rtol=0, atol=0, equal_nan=True
    )


def test_values_of_a_shorter_type_are_encoded_and_decoded_as_well():
    codec, rows = Blocks(PIECES), values().bfloat16()
    out = torch.empty_like(rows)
    codec.decode(codec.encode(rows), out)
    assert torch.equal(out, decoded(codec, rows.float()).bfloat16())


def test_units_of_small_tensors_alone_are_sent_as_they_are():
    rows = values()[:, :200]
    codec = Blocks([Piece(150, 300), Piece(50, 100)])
    assert codec.row_bytes == 800
    assert torch.equal(decoded(codec, rows, torch.zeros(2, 0)), rows)


@pytest.mark.parametrize(
    ("part", "groups"), [(1 << 20, [4]), (1111, [4]), (1110, [2, 2]), (1, [2, 2])]
)
def test_parts_together_make_the_bytes_and_residuals_of_the_whole(part, groups, monkeypatch):
    monkeypatch.setattr(Parts, "PART", part)
    whole, parts = Blocks(PIECES), Parts(Blocks, PIECES)
    assert len(parts.codecs) == len(groups)
    assert [len(codec._sizes) for codec in parts.codecs] == groups
    residuals = [torch.zeros(2, whole.residual_elements) for _ in range(2)]
    for seed in range(2):
        rows, out = values(seed), torch.empty(2, ELEMENTS)
        expected = decoded(whole, rows, residuals[0])
        columns = parts.split(rows), parts.split(out), parts.split_residual(residuals[1])
        for codec, mine, result, held in zip(parts.codecs, *columns, strict=True):
            codec.decode(codec.encode(mine, held), result)
        assert torch.equal(out, expected)
        assert torch.equal(*residuals)
        assert residuals[0].any()


def test_parts_of_a_cast_know_what_an_element_takes():
    assert Parts(lambda pieces: Cast(torch.float16, pieces), PIECES).itemsize == 2
    assert Parts(Blocks, PIECES).itemsize == 0


def test_large_rows_have_four_parts_of_about_equal_size():
    parts = Parts(Blocks, [Piece(1 << 18, 1 << 20)] * 12)
    assert [codec.elements for codec in parts.codecs] == [3 << 18] * 4
