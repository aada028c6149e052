"""Tests apex's normalization, reparameterization and RNN on torch's, in float64."""

import copy

import pytest
import torch
from amp_models import ROUNDOFF, casts_off_afterwards, setup
from torch import nn, optim

from thalweg import amp
from thalweg.compat import _apex_normalization as norms
from thalweg.compat import _apex_rnn as rnn
from thalweg.compat._apex_weight_norm import apply_weight_norm, remove_weight_norm

pytestmark = pytest.mark.numeric

HALF = torch.float16
LAYER, RMS = norms.FusedLayerNorm, norms.FusedRMSNorm
MIXED = (norms.MixedFusedLayerNorm, norms.MixedFusedRMSNorm)


def reference_norm(x, weight, bias, *, rms):
    dims = (-2, -1)
    if not rms:
        x = x - x.mean(dims, keepdim=True)
    result = x / (x.square().mean(dims, keepdim=True) + 1e-5).sqrt()
    return result * weight + (0 if bias is None else bias)


@pytest.mark.parametrize("kind", [LAYER, RMS, *MIXED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF, torch.bfloat16])
def test_norms_and_their_gradients_follow_float64(kind, dtype):
    torch.manual_seed(0)
    module = kind([4, 6])
    rms = kind in (RMS, norms.MixedFusedRMSNorm)
    params = dict(module.named_parameters())
    assert params.keys() == ({"weight"} if rms else {"weight", "bias"})
    with torch.no_grad():
        for param in params.values():
            param.add_(torch.randn_like(param))
    if kind in (LAYER, RMS):
        module.to(dtype)
    x = torch.randn(5, 4, 6, dtype=torch.float64).to(dtype).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, module.weight)]
    bias = None if rms else module.bias.detach().double()
    found = module(x)
    expected = reference_norm(*wide, bias, rms=rms)
    assert found.dtype is (module.weight.dtype if kind in MIXED else dtype)
    found.sum().backward()
    expected.sum().backward()
    # Results are rounded to the type; float32 sums of 24 terms err by some tens of roundings.
    unit = ROUNDOFF.get(dtype, 2.0**-24)
    for ours, exact in (
        (found, expected),
        (x.grad, wide[0].grad),
        (module.weight.grad, wide[1].grad),
    ):
        assert (ours.double() - exact).abs().max() <= 50 * unit * exact.abs().max().clamp(min=1)


def test_norms_without_weights_have_no_parameters_and_mixed_ones_refuse():
    x = torch.randn(3, 4)
    module = LAYER(4, elementwise_affine=False)
    assert not list(module.parameters())
    torch.testing.assert_close(module(x), nn.functional.layer_norm(x, [4]))
    torch.testing.assert_close(norms.fused_rms_norm(x, 4), nn.functional.rms_norm(x, [4], eps=1e-6))
    with pytest.raises(RuntimeError, match="elementwise_affine=False"):
        norms.MixedFusedLayerNorm(4, elementwise_affine=False)
    assert LAYER(4).load_state_dict(nn.LayerNorm(4).state_dict())


@pytest.mark.parametrize("kind", [LAYER, RMS])
def test_norms_give_autocasts_type_and_what_o1_computes_in_float32(kind):
    module, x = kind(4), 100 * torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype is torch.bfloat16
    with casts_off_afterwards():
        setup(module, None, "O1")
        # The squares of 300 overflow float16.
        assert module(300 * torch.ones(3, 4, dtype=HALF)).isfinite().all()


def test_weight_norm_is_torchs_and_can_be_removed():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Conv1d(3, 2, 2), nn.Embedding(3, 2))
    model = apply_weight_norm(copy.deepcopy(plain))
    names = set(dict(model.named_parameters()))
    part = "parametrizations.weight.original"
    assert {f"0.{part}0", f"0.{part}1", f"1.{part}0", "0.bias", "2.weight"} <= names
    assert model[0].parametrizations.weight.original0.shape == (3, 1)
    torch.testing.assert_close(model[0].weight, plain[0].weight)
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(2)
    torch.testing.assert_close(model[0].weight, 2 * plain[0].weight)
    remove_weight_norm(model, "0.weight")
    torch.testing.assert_close(model[0].weight, 2 * plain[0].weight)
    with pytest.raises(ValueError, match=r"0.weight has no weight normalisation"):
        remove_weight_norm(model, "0.weight")
    remove_weight_norm(model)
    assert set(dict(model.named_parameters())) == set(dict(plain.named_parameters()))


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_weight_norm_follows_float64_also_in_half(dim):
    torch.manual_seed(0)
    layer = apply_weight_norm(nn.Linear(300, 3), "weight", dim).half()
    parts = layer.parametrizations.weight
    v, g = parts.original1.double(), parts.original0.double()
    size = v.norm() if dim is None else v.norm(dim=1 - dim % 2, keepdim=True)
    # One rounding of the result, and that of the product in float32.
    torch.testing.assert_close(layer.weight.double(), g * v / size, rtol=2.0**-10, atol=2.0**-24)


def test_weight_norm_takes_the_names_of_apexs_checkpoints():
    layer = apply_weight_norm(nn.Linear(2, 2))
    saved = {"weight_g": torch.ones(2, 1), "weight_v": 3 * torch.eye(2), "bias": torch.zeros(2)}
    layer.load_state_dict(saved)
    assert torch.equal(layer.weight, torch.eye(2))


def test_weight_norm_has_masters_of_its_parts_and_trains():
    torch.manual_seed(0)
    model = apply_weight_norm(nn.Linear(4, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    setup(model, optimizer, "O2", loss_scale=16.0)
    inputs = torch.randn(8, 4)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :2]).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(optimizer._amp_stash.all_fp16_params) == 3


TORCHS = {
    "LSTM": (rnn.LSTM, nn.LSTM, {}),
    "GRU": (rnn.GRU, nn.GRU, {}),
    "ReLU": (rnn.ReLU, nn.RNN, {"nonlinearity": "relu"}),
    "Tanh": (rnn.Tanh, nn.RNN, {}),
}


def copied(ours, theirs, layers, suffix=""):
    """Gives torch's network our parameters."""
    for layer in range(layers):
        for name, param in ours.rnns[layer].named_parameters():
            kind, _, which = name.partition("_")
            full = {"w": "weight", "b": "bias"}[kind]
            theirs.get_parameter(f"{full}_{which}_l{layer}{suffix}").data.copy_(param)


@pytest.mark.parametrize("kind", TORCHS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_networks_are_torchs_in_float64(kind, bidirectional):
    torch.manual_seed(0)
    build, torchs, options = TORCHS[kind]
    layers = 1 if bidirectional else 2  # apex's stacks meet only after the last layer
    ours = build(3, 4, layers, bidirectional=bidirectional).double()
    theirs = torchs(3, 4, layers, bidirectional=bidirectional, **options).double()
    if bidirectional:
        copied(ours.fwd, theirs, layers)
        copied(ours.bckwrd, theirs, layers, "_reverse")
    else:
        copied(ours, theirs, layers)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    found, hidden = ours(x)
    expected, last = theirs(x)
    torch.testing.assert_close(found, expected)
    last = last if isinstance(last, tuple) else (last,)
    for state, other in zip(hidden, last, strict=True):
        if bidirectional:
            torch.testing.assert_close(state, torch.cat(list(other), -1)[None])
        else:
            torch.testing.assert_close(state, other)


def test_multiplicative_lstm_follows_its_formulas():
    torch.manual_seed(0)
    network = rnn.mLSTM(3, 4, 1, output_size=2).double()
    (cell,) = network.rnns
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    h, c = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    for value in x:
        m = (value @ cell.w_mih.T) * (h @ cell.w_mhh.T)
        gates = value @ cell.w_ih.T + cell.b_ih + m @ cell.w_hh.T + cell.b_hh
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = (o.sigmoid() * c.tanh()) @ cell.w_ho.T
    found, hidden = network(x, collect_hidden=True)
    torch.testing.assert_close(found[-1], h)
    torch.testing.assert_close(hidden[1][-1][0], c)


def test_hidden_states_stay_until_they_are_reset():
    network = rnn.LSTM(3, 4, 1, bias=False)
    x = torch.randn(6, 2, 3)
    with pytest.raises(RuntimeError, match="without a hidden state"):
        network.detach_hidden()
    whole, _ = network(x)
    network.reset_hidden(2)
    first, _ = network(x[:3])
    network.detach_hidden()
    second, _ = network(x[3:])
    torch.testing.assert_close(torch.cat([first, second]), whole)
    second.sum().backward()
    with casts_off_afterwards():
        setup(network, None, "O1")
        network.reset_hidden(2)
        # Products are rounded to float16, states below 1 are kept in float32.
        torch.testing.assert_close(network(x)[0], whole, rtol=0, atol=20 * 2.0**-11)
