"""Tests how gradients reach the memory that a session takes them from."""

import pytest
import torch

from thalweg.ps._staging import Staging, flattened, on_cpu


class FakeStream:
    """Counts how often somebody has waited for it."""

    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


def on_gpu(values, device):
    """Returns a tensor that says it is on a GPU; copies from it are those of the CPU."""
    tensor = torch.Tensor._make_subclass(OnGpu, torch.tensor(values))
    tensor.told = device
    return tensor


class OnGpu(torch.Tensor):
    is_cuda = True

    @property
    def device(self):
        return self.told


def test_gradients_of_a_gpu_are_there_once_every_stream_with_copies_has_been_waited_for(
    monkeypatch,
):
    streams = {"cuda:0": FakeStream(), "cuda:1": FakeStream()}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device])
    staging = Staging(6, torch.float32, from_gpu=False)
    first, second, third = staging.flat.split([2, 2, 2])
    staging.fill(first, on_gpu([1.0, 2.0], "cuda:0"))
    staging.fill(second, on_gpu([3.0, 4.0], "cuda:1"))
    staging.fill(third, on_gpu([5.0, 6.0], "cuda:0"))
    assert [stream.waits for stream in streams.values()] == [0, 0]
    assert staging.settled().tolist() == [1, 2, 3, 4, 5, 6]
    assert [stream.waits for stream in streams.values()] == [1, 1]
    staging.settled()
    assert [stream.waits for stream in streams.values()] == [1, 1]  # nothing is queued any more


def test_gradients_of_the_cpu_wait_for_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    staging = Staging(2, torch.bfloat16, from_gpu=False)
    staging.fill(staging.flat, torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert staging.settled().tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_flattened_in_float32(dtype):
    tensors = [torch.tensor([[1.0, 2.0]], dtype=dtype), torch.tensor(3.0, dtype=dtype)]
    flat = flattened(tensors)
    assert flat.dtype == torch.float32
    assert flat.tolist() == [1, 2, 3]


def test_layouts_of_other_devices_are_those_of_the_tensors():
    elsewhere = torch.empty(2, 3, dtype=torch.float16, device="meta")
    assert (on_cpu(elsewhere).shape, on_cpu(elsewhere).dtype) == (elsewhere.shape, torch.float16)
    assert on_cpu(elsewhere).is_cpu
    here = torch.zeros(2)
    assert on_cpu(here) is here
