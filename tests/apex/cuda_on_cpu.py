"""Maps CUDA to the CPU, so that tests and scripts written for a GPU run without one.

A tensor that a script moves to a GPU stays in memory of the host and carries a mark. `is_cuda` and
`type()` report the mark, and results of functions inherit it. It is a pytest plugin: `-p
cuda_on_cpu` installs the mapping before tests are collected.
"""

import contextlib
import sys
import types
import unittest
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MARK = "_mapped_cuda"


def is_marked(tensor: torch.Tensor) -> bool:
    """Returns whether the script believes the tensor to be on a GPU."""
    return _MARK in getattr(tensor, "__dict__", {})


def mark(value: Any, marked: bool = True) -> Any:
    """Sets or removes the mark of a tensor, or of those in a tuple or list."""
    if isinstance(value, torch.Tensor):
        if marked:
            value.__dict__[_MARK] = True
        else:
            value.__dict__.pop(_MARK, None)
    elif isinstance(value, tuple | list):
        for item in value:
            mark(item, marked)
    return value


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


class CudaOnCpu(TorchFunctionMode):
    """Sends functions to the CPU that ask for a CUDA device, and sets the mark of their results."""

    default_marked = False  # set_default_tensor_type() asked for a CUDA type

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            # Thalweg must see the host, where it computes.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return is_marked(args[0]) and not caller.startswith("thalweg")
        if func is torch.Tensor.cuda:
            return mark(args[0] if is_marked(args[0]) else args[0].view_as(args[0]))
        if func == torch.Tensor.data.__set__ and is_marked(args[1]):
            mark(args[0])
        placed: bool | None = None  # where the function is told to put its result
        if func is torch.Tensor.cpu:
            placed = False
        elif func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
            placed = args[1].startswith("torch.cuda.")
            args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        if "device" in kwargs and kwargs["device"] is not None:
            placed = _is_cuda(kwargs["device"])
            kwargs["device"] = "cpu" if placed else kwargs["device"]
        elif func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            placed = _is_cuda(args[1])
            args = (args[0], "cpu" if placed else args[1], *args[2:])
        result = func(*args, **kwargs)
        if isinstance(result, str) and func is torch.Tensor.type and is_marked(args[0]):
            return result.replace("torch.", "torch.cuda.")
        return self._placed(result, list(_tensors((args, kwargs))), placed)

    def _placed(self, result: Any, inputs: list[torch.Tensor], placed: bool | None) -> Any:
        """Sets the mark of a result; `placed`: None: where the inputs are."""
        if not isinstance(result, torch.Tensor | tuple | list):
            return result
        if isinstance(result, torch.Tensor) and any(result is item for item in inputs):
            if placed in (None, is_marked(result)):
                return result  # written in place, or already there
            return mark(result.view_as(result), placed)  # the input itself keeps its mark
        if placed is None:
            placed = any(map(is_marked, inputs)) if inputs else self.default_marked
        return mark(result) if placed else result


class _Nothing:
    """A stream or an event, whose calls do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Types(dict[str, Any]):
    """Makes the constructors of `torch.cuda.FloatTensor` and the like."""

    def __missing__(self, name: str) -> Any:
        original = getattr(torch, name)
        self[name] = made = type(name, (), {"__new__": lambda _, *args: mark(original(*args))})
        made.original = original
        return made


_mode = CudaOnCpu()
_types = _Types()


def install() -> None:
    """Puts the mapping in place for the rest of the process."""
    if "expecttest" not in sys.modules:  # torch.testing._internal needs the name only
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    _replace_cuda()
    _replace_autocast()
    build = torch.nn.Parameter.__new__

    def build_marked(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        return mark(build(cls, data, requires_grad), is_marked(data))

    torch.nn.Parameter.__new__ = build_marked
    torch.nn.Module.cuda = lambda self, device=None: self.to("cuda")
    torch.nn.Module.to = _module_to(torch.nn.Module.to)
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend=None, *args, **options: start(
        "gloo" if backend == "nccl" else backend, *args, **options
    )
    _replace_ddp()
    torch.set_default_tensor_type = _set_default_tensor_type
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    torch.accelerator.is_available = lambda: False
    _mode.__enter__()


def _replace_ddp() -> None:
    """Leaves out the devices, which DistributedDataParallel refuses for a module on the host."""
    ddp = torch.nn.parallel.DistributedDataParallel
    build = ddp.__init__

    def build_on_host(self: Any, module: Any, *args: Any, **options: Any) -> None:
        options.pop("device_ids", None)
        options.pop("output_device", None)
        build(self, module, None, None, *args[2:], **options)

    ddp.__init__ = build_on_host


def _module_to(original: Any) -> Any:
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        cuda = any(_is_cuda(value) for value in (*args, *kwargs.values()))
        args = tuple("cpu" if _is_cuda(value) else value for value in args)
        kwargs = {k: "cpu" if _is_cuda(value) else value for k, value in kwargs.items()}
        original(self, *args, **kwargs)
        if cuda:
            mark([*self.parameters(), *self.buffers()])
        return self

    return to


def _set_default_tensor_type(kind: Any) -> None:
    name = kind if isinstance(kind, str) else kind.__name__
    CudaOnCpu.default_marked = hasattr(kind, "original") or "cuda" in name
    plain = getattr(torch, name.split(".")[-1])
    torch._C._set_default_tensor_type(plain)


def _replace_cuda() -> None:
    answers: dict[str, Any] = {
        "is_available": True,
        "is_bf16_supported": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (8, 0),
        "get_device_name": "the host",
        "mem_get_info": (0, 0),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        **dict.fromkeys(("synchronize", "set_device", "init", "empty_cache", "_lazy_init")),
        **dict.fromkeys(("manual_seed_all", "reset_peak_memory_stats", "_sleep")),
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    properties = types.SimpleNamespace(
        name="the host", major=8, minor=0, total_memory=0, multi_processor_count=1
    )
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.current_stream = torch.cuda.default_stream = _Nothing
    torch.UntypedStorage.cuda = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda *_: None
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.cuda.memory.mem_get_info = torch.cuda.mem_get_info
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.device = lambda *_, **__: contextlib.nullcontext()
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    for name in ("Float", "Half", "Double", "Int", "Long", "Byte", "BFloat16", "Bool"):
        setattr(torch.cuda, f"{name}Tensor", _types[f"{name}Tensor"])


def _replace_autocast() -> None:
    autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler
    build_autocast, build_scaler = autocast.__init__, scaler.__init__

    def new_autocast(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        build_autocast(self, device_type, dtype, **options)

    def new_scaler(self: Any, device: str = "cuda", *args: Any, **options: Any) -> None:
        build_scaler(self, "cpu" if device == "cuda" else device, *args, **options)

    autocast.__init__ = new_autocast
    scaler.__init__ = new_scaler


def pytest_collection_modifyitems() -> None:
    """Is pytest's hook: torch's own test classes run each test on a stream of a GPU."""
    common = sys.modules.get("torch.testing._internal.common_utils")
    if common is not None:
        common.CudaNonDefaultStream = contextlib.nullcontext


def pytest_runtest_setup() -> None:
    """Is pytest's hook: tests that draw numbers without a seed get one.

    `test_loss_scale_decrease` draws one number that must not be near 0, or nothing overflows.
    """
    torch.manual_seed(0)


install()
