"""Compares the optimizers on a GPU with those on the CPU."""

import pytest
import torch
from optim_cases import CASES, DTYPES, make_params, set_grads, train_mixed, train_with_skips

from thalweg.optim import FusedAdamW, FusedLAMB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_gpu_and_cpu_have_the_same_bits(kind, options, dtype):
    params = make_params(dtype)
    expected = train_with_skips(params, kind, options, "cpu")
    on_gpu = train_with_skips(params, kind, options, "cuda")
    assert len(on_gpu) == len(expected) >= len(params)
    for ours, theirs in zip(on_gpu, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_mixed_precision_has_the_bits_of_the_cpu(kind, options):
    expected = train_mixed(kind, options, "cpu")
    on_gpu = train_mixed(kind, options, "cuda")
    assert len(on_gpu) == len(expected)
    for ours, theirs in zip(on_gpu, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "options"), [(FusedAdamW, {}), (FusedAdamW, {"max_grad_norm": 1.0}), (FusedLAMB, {})]
)
def test_steps_do_not_wait_for_the_gpu(kind, options):
    sources = make_params()
    set_grads(0, sources)
    params = [torch.nn.Parameter(p.detach().cuda()) for p in sources]
    for source, param in zip(sources, params, strict=True):
        param.grad = source.grad.cuda()
    optimizer = kind(params, weight_decay=0.1, **options)
    optimizer.step()  # makes the state
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.grad_scale = torch.full((1,), 8.0, device="cuda")
            optimizer.found_inf = torch.zeros((), device="cuda")
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_grad_scaler_skips_and_goes_on():
    param = torch.nn.Parameter(torch.ones(5, device="cuda"))
    optimizer = FusedAdamW([param], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for factor, steps in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        before = param.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.state[param]["step"].item() == steps
        assert torch.equal(before, param) == (factor != 1.0)
    assert scaler.get_scale() == 2.0
