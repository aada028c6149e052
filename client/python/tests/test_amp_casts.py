"""Tests O1: the types that torch's functions compute in, and that the functions are restored."""

import pytest
import torch
import torch.nn.functional as F
from amp_models import ROUNDOFF, casts_off_afterwards
from torch import nn, optim

from thalweg import amp
from thalweg.amp import _casts, lists
from thalweg.amp._casts import casting

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def clean():
    with casts_off_afterwards():
        yield


def names(table):
    owners = lists.namespaces()
    return [(owners[key], name) for key, text in table.items() for name in text.split()]


def test_lists_name_functions_of_this_torch_and_none_twice():
    tables = (lists.HALF, lists.FLOAT, lists.PROMOTE, lists.IN_PLACE, lists.IN_PLACE_FLOAT)
    every = [entry for table in tables for entry in names(table)]
    assert len(every) == len(set(every))
    missing = {name for owner, name in every if not hasattr(owner, name)}
    # These are functions of torch whose methods have no counterpart, or of other releases.
    assert missing <= {"conv_tbc"}, missing


def test_everything_is_put_back():
    watched = [*names(lists.HALF), *names(lists.FLOAT), *names(lists.IN_PLACE_FLOAT)]
    before = [getattr(owner, name) for owner, name in watched]
    own = set(vars(torch.Tensor))
    handle = amp.init()
    assert F.linear is not before[watched.index((F, "linear"))]
    handle._deactivate()
    after = [getattr(owner, name) for owner, name in watched]
    assert all(a is b or a == b for a, b in zip(after, before, strict=True))
    assert set(vars(torch.Tensor)) == own


X, W = torch.randn(4, 4), torch.randn(4, 4)
IMAGE, KERNEL = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
MATRICES = {
    "linear": lambda x: F.linear(x, W),
    "matmul": lambda x: x @ W,
    "rmatmul": lambda x: W @ x,
    "mm": lambda x: torch.mm(x, W),
    "bmm": lambda x: torch.bmm(x[None], W[None]),
    "addmm": lambda x: torch.addmm(W, x, W),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, W),
    "conv2d": lambda x: F.conv2d(IMAGE.to(x.dtype), KERNEL),
    "conv_transpose2d": lambda x: F.conv_transpose2d(IMAGE.to(x.dtype), KERNEL),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], W[None], W[None]),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", MATRICES)
def test_products_are_computed_in_half(name, half):
    expected = MATRICES[name](X)
    amp.init(half_dtype=half)
    for given in (X, X.to(half)):
        result = MATRICES[name](given)
        assert result.dtype is half
        # At most 18 products of factors below 4 are added, with three roundings each.
        atol = 18 * 4 * 3 * ROUNDOFF[half]
        torch.testing.assert_close(result.float(), expected, rtol=0, atol=atol)


WIDE = {
    "softmax": lambda x: F.softmax(x, -1),
    "method": lambda x: x.softmax(-1),
    "exp": lambda x: torch.exp(input=x),
    "pow": lambda x: x**2,
    "sum": lambda x: x.sum(),
    "norm": lambda x: x.norm(),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "gelu": lambda x: F.gelu(x, approximate="none"),
    "cpu": lambda x: x.cpu(),
    "linalg": lambda x: torch.linalg.vector_norm(x, 2),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", WIDE)
def test_sums_and_exponentials_are_computed_in_float32(name, half):
    given = X.to(half)
    expected = WIDE[name](given.float())
    amp.init(half_dtype=half)
    result = WIDE[name](given)
    assert result.dtype is torch.float32
    assert torch.equal(result, expected)


def test_torch_promotes_by_itself_what_is_on_no_list():
    wide, half = torch.ones(2), torch.ones(2, dtype=torch.float16)
    results = [
        wide + half, half - wide, half * wide, half / wide, torch.cat([half, wide]),
        torch.stack([half, wide]), torch.addcmul(half, wide, half), torch.atan2(half, wide),
        torch.where(wide > half, wide, half), torch.addcdiv(half, wide, half),
    ]  # fmt: skip
    assert {result.dtype for result in results} == {torch.float32}


def test_mixed_arguments_are_promoted_where_torch_refuses_them():
    wide, half = torch.ones(3), torch.ones(3, dtype=torch.float16)
    with pytest.raises(RuntimeError):
        torch.dot(wide, half)
    amp.init()
    assert torch.dot(wide, half).dtype is torch.float32
    assert torch.dot(half, half).dtype is torch.float16
    bilinear = F.bilinear(wide[None], half[None], torch.ones(1, 3, 3))
    assert bilinear.dtype is torch.float32


def test_in_place_functions_follow_their_target_or_are_refused():
    half = torch.ones(2, 2, dtype=torch.float16)
    amp.init()
    assert half.addmm_(W[:2, :2], W[:2, :2]).dtype is torch.float16
    with pytest.raises(NotImplementedError, match="exp_ was given a half-precision tensor"):
        half.exp_()
    with pytest.raises(NotImplementedError, match="__ipow__"):
        half **= 2
    assert torch.ones(2).exp_().dtype is torch.float32


def test_binary_cross_entropy_is_refused_in_half_unless_allowed():
    half = torch.full((2,), 0.5, dtype=torch.float16)
    amp.init()
    with pytest.raises(NotImplementedError, match="Use binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(half, half)
    assert F.binary_cross_entropy(half.float(), half.float()).dtype is torch.float32
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(half, half).dtype is torch.float32


def test_float64_and_integers_stay_what_they_are():
    amp.init()
    double = torch.ones(2, 2, dtype=torch.float64)
    assert (double @ double).dtype is torch.float64
    assert torch.ones(2, 2, dtype=torch.int64).sum().dtype is torch.int64


def test_casts_reach_into_functions_made_of_others():
    """F.multi_head_attention_forward calls linear; a mode of torch would see only the former."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    seen = []
    original = F.linear
    F.linear = lambda *args: seen.append(original(*args)) or seen[-1]
    try:
        amp.init()
        layer(torch.randn(2, 3, 8)).sum().backward()
    finally:
        amp.init(enabled=False)
        F.linear = original
    assert seen
    assert {tensor.dtype for tensor in seen} == {torch.float16}
    assert layer.linear1.weight.grad.dtype is torch.float32


def test_disable_casts_may_be_nested():
    amp.init()
    with amp.disable_casts():
        with amp.disable_casts():
            assert (X @ W).dtype is torch.float32
        assert (X @ W).dtype is torch.float32
    assert (X @ W).dtype is torch.float16


def test_optimizers_compute_without_casts():
    class Multiplying(optim.SGD):
        def step(self, closure=None):
            seen.append((X @ W).dtype)

    seen = []
    model = nn.Linear(2, 2)
    optimizer = Multiplying(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.step()
    assert seen == [torch.float32]
    assert (X @ W).dtype is torch.float16


def test_parameters_are_cast_once_until_somebody_writes_into_them(capsys):
    layer = nn.Linear(4, 4, bias=False)
    amp.init(verbose=True)
    first, second = layer(X), layer(X)
    assert torch.equal(first, second)
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["Float->Half (linear)"] * 3  # two of X, one of the weight
    with torch.no_grad():
        layer.weight.mul_(2.0)
    assert torch.equal(layer(X), first * 2)
    (first.sum() + second.sum()).backward()
    assert layer.weight.grad.dtype is torch.float32


def test_cache_tells_evaluation_from_training():
    layer = nn.Linear(4, 4)
    handle = amp.init()
    with torch.no_grad():
        layer(X)
    layer(X).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight in handle.cache
    handle.remove_cache(layer.weight)
    assert layer.weight not in handle.cache
    handle._clear_cache()
    assert len(handle.cache) == 0


def test_copies_made_for_a_cuda_graph_are_not_kept_and_kept_ones_not_used(monkeypatch):
    layer = nn.Linear(4, 4)
    handle = amp.init()
    kept = layer(X)
    copy = handle.cache[layer.weight]
    monkeypatch.setattr(_casts, "_is_captured", lambda _: True)
    captured = layer(X)
    assert torch.equal(captured, kept)
    assert handle.cache[layer.weight] is copy
    handle._clear_cache()
    layer(X)
    assert len(handle.cache) == 0


def test_cache_may_be_switched_off():
    layer = nn.Linear(4, 4)
    handle = amp.init(enable_caching=False)
    layer(X)
    assert not handle.has_cache
    assert len(handle.cache) == 0


RECURRENT = [nn.LSTM, nn.GRU, nn.RNN]


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_networks_compute_in_half(kind):
    layer = kind(4, 3, num_layers=2)
    inputs = torch.randn(5, 2, 4)
    expected, _ = layer(inputs)
    packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([5, 3]))
    amp.init()
    result, _ = layer(inputs)
    assert result.dtype is torch.float16
    # Values are below 1 after ten steps, each with roundings of 2⁻¹¹ that tanh does not magnify.
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=40 * 2.0**-11)
    assert layer(packed)[0].data.dtype is torch.float16
    result.float().sum().backward()
    assert layer.weight_ih_l0.grad.dtype is torch.float32


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_compute_in_half(kind):
    amp.init()
    result = kind(4, 3)(torch.randn(2, 4))
    assert (result[0] if kind is nn.LSTMCell else result).dtype is torch.float16


@pytest.mark.parametrize("half", ROUNDOFF)
@pytest.mark.parametrize("layers", [0, 2])
def test_transformers_compute_in_half_in_evaluation(layers, half):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    if layers:
        model = nn.TransformerEncoder(model, layers)
    model.eval()
    inputs = torch.randn(2, 3, 8)
    with torch.inference_mode():
        expected = model(inputs)
        amp.init(half_dtype=half)
        result = model(inputs)
        with amp.disable_casts():
            assert torch.equal(model(inputs), expected)
        attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        assert attention(*[inputs] * 3)[0].dtype is half
    # Outputs are normalised: magnitudes of 1, of which each layer rounds a few times.
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=16 * ROUNDOFF[half])


def test_tensors_of_the_host_are_left_alone_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    amp.init()
    assert not casting.host
    assert (X @ W).dtype is torch.float32


@pytest.mark.parametrize(
    "function",
    [
        lambda out: torch.mm(X, W, out=out),
        lambda out: torch.addmm(W, X, W, out=out),
        lambda out: torch.exp(X.half(), out=out),
        lambda out: F.normalize(X.half(), out=out),
        lambda out: torch.addcmul(X, X, W.half(), out=out),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_out_gets_the_result_that_there_is_without_it(function, dtype):
    amp.init()
    out = torch.zeros(2, dtype=dtype)  # torch gives it the shape of the result
    assert function(out) is out
    assert torch.equal(out, function(None).to(dtype))
    assert out.any()


@pytest.mark.parametrize("write", ["data", "vector"])
def test_evaluation_computes_with_what_was_written_through_data(write):
    amp.init()
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer(X)
        if write == "data":
            layer.weight.data.zero_()
        else:
            nn.utils.vector_to_parameters(torch.zeros(16), layer.parameters())
        assert not layer(X).any()


def test_training_computes_with_the_memory_that_a_parameter_was_given():
    amp.init()
    layer = nn.Linear(4, 4, bias=False)
    layer(X)
    layer.weight.data = torch.zeros(4, 4)
    assert not layer(X).any()
