"""Tests the inputs of `thalweg bench` and the checks of their results."""

import pytest
import torch
import torch.distributed as dist

from thalweg_bench import allreduce, step
from thalweg_bench.codec_torch import end_process_group
from thalweg_bench.place import Place
from thalweg_bench.rows import BenchError


def place(rank=0, nodes=4, codec="fp32"):
    return Place(rank=rank, nodes=nodes, workers=1, sidecar="", job="job", codec=codec)


def reducers(dtype):
    pattern = allreduce.make_pattern(4000, dtype)
    return [allreduce._Reduce(pattern, place(rank), 2000) for rank in range(4)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("times", [1, 4])
def test_right_result_passes(dtype, times):
    everyone = reducers(dtype)
    for reduce in everyone:
        reduce.prepare(repeat=3)
    inputs = torch.stack([reduce.tensor.double() for reduce in everyone])
    assert inputs.shape[1] * everyone[0].tensor.itemsize == 2000
    everyone[2].compare((inputs.mean(0) * times).to(everyone[0].tensor.dtype), times)


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
    everyone = reducers("fp32")
    for reduce in everyone:
        reduce.prepare(repeat=1)
    mean = torch.stack([reduce.tensor for reduce in everyone]).mean(0)
    with pytest.raises(BenchError, match="the result is wrong"):
        everyone[0].compare(damage(mean), 1)


def test_missing_contribution_is_refused():
    everyone = reducers("fp32")
    for reduce in everyone:
        reduce.prepare(repeat=1)
    mean = torch.stack([reduce.tensor for reduce in everyone[:3]]).mean(0)
    with pytest.raises(BenchError):
        everyone[0].compare(mean, 1)


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
