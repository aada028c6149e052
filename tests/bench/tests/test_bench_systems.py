"""Tests the inputs of `thalweg bench` and the checks of their results."""

import pytest
import torch
import torch.distributed as dist

from thalweg_bench import step
from thalweg_bench.codec_torch import end_process_group
from thalweg_bench.collectives import KINDS, MEAN, Collective, make_pattern
from thalweg_bench.place import Place
from thalweg_bench.rows import BenchError


def place(rank=0, nodes=4, codec="fp32"):
    return Place(rank=rank, nodes=nodes, workers=1, sidecar="", job="job", codec=codec)


def begun(kind=MEAN, dtype="fp32"):
    """Returns four workers' parts of 2000 bytes, and what they give."""
    pattern = make_pattern(2000, dtype)
    everyone = [Collective(kind, None, pattern, place(rank)) for rank in range(4)]
    for one in everyone:
        one.prepare(repeat=3)
    return everyone, torch.stack([one.given for one in everyone])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("kind", "times"), [(MEAN, 1), (KINDS["all_reduce"], 4)])
def test_right_sums_pass(dtype, kind, times):
    everyone, inputs = begun(kind, dtype)
    assert inputs[0].nbytes == 2000
    everyone[2].got.copy_(inputs.double().mean(0) * times)
    everyone[2].check()


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("all_gather", lambda x: x.view(4, 4, -1)[range(4), range(4)].flatten()),
        ("reduce_scatter", lambda x: x.sum(0).chunk(4)[2]),
        ("all_to_all", lambda x: torch.cat([row.chunk(4)[2] for row in x])),
        ("broadcast", lambda x: x[0]),
    ],
)
def test_only_the_right_parts_pass(name, right):
    everyone, inputs = begun(KINDS[name])
    everyone[2].got.copy_(right(inputs))
    everyone[2].check()
    everyone[2].got.copy_(right(inputs.roll(1, dims=1)))
    with pytest.raises(BenchError, match="the result is wrong"):
        everyone[2].check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda x: x.roll(1),
        lambda x: x.roll(128),
        lambda x: x * 0,
        lambda x: x + torch.nn.functional.one_hot(torch.tensor(7), len(x)),
        lambda x: x.index_fill(0, torch.tensor(3), float("nan")),
    ],
)
def test_wrong_result_is_refused(damage):
    everyone, inputs = begun()
    everyone[0].got.copy_(damage(inputs.mean(0)))
    with pytest.raises(BenchError, match="the result is wrong"):
        everyone[0].check()


def test_missing_contribution_is_refused():
    everyone, inputs = begun()
    everyone[0].got.copy_(inputs[:3].mean(0))
    with pytest.raises(BenchError):
        everyone[0].check()


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    end_process_group()


@pytest.mark.parametrize("system", ["ddp", "torch-fp16", "torch-powersgd", "local"])
def test_step_writes_every_gradient(alone, system):
    shapes = [(30, 50), (7,), (2, 2, 2)]
    one = step.factories(shapes)[system](place(nodes=1, codec="powersgd:rank=3,start=2"))
    one.prepare(5)
    one.run()
    one.check()
    gradients = [parameter.grad for parameter in one.module.parameters()]
    assert [tuple(gradient.shape) for gradient in gradients] == shapes
    assert [float(gradient.mean()) for gradient in gradients] == pytest.approx([5, 6, 0], abs=1e-4)
    gradients[1][3] += 1
    with pytest.raises(BenchError, match="the gradient of parameter 1 is wrong"):
        one.check()
