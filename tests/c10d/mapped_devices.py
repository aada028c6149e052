"""Lets torch's own tests for several GPUs run on the CPU, as far as that can be: install()."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_APEX = Path(__file__).parents[1] / "apex"


class _Numbers(TorchFunctionMode):
    """Lets the number of a device be that of a GPU, as it is for torch with CUDA."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_number(kwargs.get("device")):
            kwargs["device"] = "cuda"
        if func is torch.Tensor.to and len(args) > 1 and _is_number(args[1]):
            args = (args[0], "cuda", *args[2:])
        return func(*args, **kwargs)


def install(gpus: int) -> None:
    """Makes this process believe in so many GPUs, once torch's suite has been loaded.

    It is the mapping of apex's tests, which knows one GPU and has no numbers of devices.
    """
    sys.path.insert(0, str(_APEX))
    mapping: Any = importlib.import_module("cuda_on_cpu")  # replaces parts of torch by that alone
    named = mapping._is_cuda
    mapping._is_cuda = lambda device: _is_number(device) or named(device)
    vars(torch.cuda)["device_count"] = lambda: gpus
    numbers: Any = _Numbers()
    numbers.__enter__()
    harness: Any = importlib.import_module("torch.testing._internal.common_distributed")
    harness.TEST_CUDA = True
    utils: Any = importlib.import_module("torch.testing._internal.common_utils")
    utils.CudaNonDefaultStream = contextlib.nullcontext


def _is_number(device: Any) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)
