"""Lets torch's own tests of fully_shard() run on the CPU, over a back end by its name.

They are not in the wheel: test/distributed/_composable/fsdp of torch's repository, for GPUs. Their
harness asks how many there are, and for NCCL; their "cuda" becomes "cpu" here.
"""

from __future__ import annotations

import importlib
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_harness
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

_INTERNAL = "torch.testing._internal"
THREADS = "its ranks are threads, on a back end of torch's own"


class _OnCpu(TorchFunctionMode):
    """Takes the CPU wherever a function is given a GPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _placed(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _placed(args[1]), *args[2:])
        return func(*args, **kwargs)


def install(world_size: int, seconds: float) -> None:
    """Makes this process and its children believe in so many devices, all of them the CPU.

    A test ends its workers after `seconds`. The process must have no other threads.
    """
    _count_devices(world_size)
    _place_on_cpu()
    harness = torch_harness.fork_workers(seconds)
    harness.skip_if_lt_x_gpu = lambda x, **_: unittest.skipIf(
        x > world_size, f"it needs {x} workers"
    )
    common: Any = importlib.import_module(f"{_INTERNAL}.common_fsdp")
    common.DEVICE_COUNT = common.FSDPTestContinuous.world_size = world_size
    common.TEST_CUDA = False


def use(backend: str) -> None:
    """From now on tests run over this back end."""
    common: Any = importlib.import_module(f"{_INTERNAL}.common_fsdp")
    common.DISTRIBUTED_BACKEND = backend


def load(path: Path) -> list[type[unittest.TestCase]]:
    """Returns the test cases of a file that have tests. Raises what loading it raises."""
    return torch_harness.cases(torch_harness.load(path))


def why_not(case: type[unittest.TestCase]) -> str:
    """Returns why a back end has no part in the tests of a case; empty: it has one."""
    names = {base.__name__ for base in case.__mro__}
    return "" if names & set(torch_harness.STARTS_PROCESSES) else THREADS


def _placed(device: Any) -> Any:
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return "cpu" if isinstance(device, str) and device.split(":")[0] == "cuda" else device


def _count_devices(count: int) -> None:
    cpu = torch.device("cpu")
    for module in (torch.cuda, torch.cpu, torch.accelerator):
        vars(module)["device_count"] = lambda: count
    vars(torch.accelerator)["current_accelerator"] = lambda *_, **__: cpu
    vars(torch.accelerator)["set_device_index"] = lambda *_: None
    vars(torch.cuda)["set_device"] = lambda *_: None
    # With PYTORCH_NVML_BASED_CUDA_CHECK, which importing Lightning sets, torch infers it from the
    # number of devices.
    vars(torch.cuda)["is_available"] = lambda: False


def _place_on_cpu() -> None:
    mode: Any = _OnCpu()
    mode.__enter__()
    move = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        kwargs = {name: _placed(value) for name, value in kwargs.items()}
        return move(self, *map(_placed, args), **kwargs)

    module: Any = torch.nn.Module
    module.to = to
    module.cuda = lambda self, device=None: self
    make = device_mesh.init_device_mesh

    def on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make(_placed(device_type), *args, **kwargs)

    vars(device_mesh)["init_device_mesh"] = vars(dist)["init_device_mesh"] = on_cpu
    _leave_out_devices()


def _leave_out_devices() -> None:
    """Leaves out the numbers of devices, which are refused for modules and groups of the CPU."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    build, barrier = ddp.__init__, dist.barrier

    def on_cpu(self: Any, module: Any, device_ids: Any = None, *rest: Any, **named: Any) -> None:
        build(self, module, None, *rest, **named)

    def of_cpus(*args: Any, device_ids: Any = None, **rest: Any) -> Any:
        return barrier(*args, **rest)

    ddp.__init__ = on_cpu
    vars(dist)["barrier"] = vars(dist.distributed_c10d)["barrier"] = of_cpus
