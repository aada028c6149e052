"""Tests what thalweg.fsdp does without servers."""

import contextlib
from datetime import datetime
from pathlib import Path

import pytest
import torch

from thalweg import fsdp


class Unwritable:
    """Cannot be pickled."""

    def __reduce__(self):
        raise RuntimeError("the disk is full")


def test_failed_write_leaves_the_file_that_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "saved" / "t5.pt"
    fsdp.write(path, {"epoch": 1})
    with pytest.raises(RuntimeError, match="the disk is full"):
        fsdp.write(path, {"weights": torch.ones(1000), "epoch": Unwritable()})
    assert torch.load(path) == {"epoch": 1}
    assert [file.name for file in path.parent.iterdir()] == ["t5.pt"]


def test_checkpoint_has_the_name_the_time_of_the_run_and_the_epoch():
    path = fsdp.checkpoint_path("out", "t5-small", datetime(2026, 11, 5, 14, 3, 9), 2)
    assert path == Path("out/t5-small-2026-11-05-14.03.09-2.pt")


def test_bf16_is_ready_on_the_cpu_and_says_whether_that_saves_time():
    readiness = fsdp.bf16_ready("cpu")
    assert readiness
    has = torch.cpu.get_capabilities()
    fast = any(has.get(name) for name in ("amx_bf16", "avx512_bf16"))
    assert ("has instructions" in str(readiness)) == bool(fast)
    assert ("saves bytes, not time" in str(readiness)) != bool(fast)


def test_bf16_is_not_ready_on_devices_of_which_nothing_is_known():
    readiness = fsdp.bf16_ready("meta")
    assert not readiness
    assert "nothing is known about bfloat16 on meta" in str(readiness)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bf16_is_not_ready_on_a_gpu_that_is_not_there():
    assert not fsdp.bf16_ready("cuda")


@pytest.mark.parametrize(
    ("cuda", "nccl", "hardware", "lacks"),
    [
        ("12.4", (2, 21, 5), True, ""),
        ("11.0", (2, 10, 0), True, ""),
        ("10.2", (2, 21, 5), True, "CUDA 10.2 is older than 11.0"),
        ("12.4", (2, 9, 6), True, "NCCL 2.9 is older than 2.10"),
        ("12.4", (2, 21, 5), False, "has no bfloat16 in hardware"),
    ],
)
def test_bf16_on_a_gpu_needs_cuda_nccl_and_hardware(cuda, nccl, hardware, lacks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: hardware)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    readiness = fsdp.bf16_ready("cuda")
    assert bool(readiness) == (not lacks)
    assert lacks in str(readiness)
