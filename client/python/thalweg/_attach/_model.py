"""Inspects a DistributedDataParallel module and decides whether Thalweg can serve it."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from thalweg import _C, policy
from thalweg._job import _topology
from thalweg._settings._config import ConfigError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# torch.compile and activation checkpointing put a module of their own around another.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def parameters(ddp_model: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters whose gradients DistributedDataParallel averages, by name.

    They are those that required gradients when it was built: the script may have frozen some since,
    or put others in their place, which then have no name in the module.
    """
    reducer = getattr(ddp_model, "reducer", None)
    if reducer is None:  # why_not() refuses such a module
        return []
    named = ddp_model.module.named_parameters()
    names = {id(parameter): _plain_name(name) for name, parameter in named}
    return [
        (names.get(id(parameter), f"(parameter {index}, replaced)"), parameter)
        for index, parameter in enumerate(_C.reducer_parameters(reducer))
    ]


def _plain_name(name: str) -> str:
    """Returns the name that a parameter has without the modules that torch puts around others."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def delayed(ddp_model: DistributedDataParallel) -> list[str]:
    """Returns the names of the parameters that torch averages by itself, in no hook."""
    own = {id(parameter) for parameter in ddp_model._delay_all_reduce_params}
    named = ddp_model.module.named_parameters()
    return [_plain_name(name) for name, parameter in named if id(parameter) in own]


def describe(ddp_model: DistributedDataParallel) -> tuple[_topology.Tensor, ...]:
    return tuple(
        _topology.Tensor(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
        for name, parameter in parameters(ddp_model)
    )


def hook_of(ddp_model: DistributedDataParallel) -> str:
    """Returns the name of the communication hook that torch knows of; empty: none.

    A third party's hook in C++ is not seen; torch then refuses a second hook.
    """
    return str(ddp_model._get_ddp_logging_data().get("comm_hook", ""))


def why_not(ddp_model: DistributedDataParallel, min_nodes: int) -> str:
    """Returns why the module cannot be served; empty if it can. `min_nodes` is that of attach()."""
    if ddp_model._delay_all_reduce_all_params or ddp_model._use_python_reducer:
        return "the module has no reducer in C++ that a communication hook could belong to"
    if ddp_model.mixed_precision is not None:
        return "DistributedDataParallel(mixed_precision=…) is not supported: use torch.autocast"
    if hook_of(ddp_model):
        return "the module has another communication hook: attach() must be the only one"
    if min_nodes and ddp_model.find_unused_parameters and not ddp_model.static_graph:
        return (
            "the job is to go on when a node is lost (THALWEG_MIN_NODES), but with "
            "find_unused_parameters=True torch sums over the process group which parameters are "
            "used, in each backward pass: build DistributedDataParallel without it, or with "
            "static_graph=True if each step uses the same parameters, or leave min_nodes out"
        )
    for name, parameter in parameters(ddp_model):
        if parameter.dtype not in _DTYPES:
            return f"{name} is {parameter.dtype}, expected one of {', '.join(map(str, _DTYPES))}"
    return _why_not_there(ddp_model)


def _why_not_there(ddp_model: DistributedDataParallel) -> str:
    """Returns why the module cannot be served on its device; empty if it can."""
    devices: dict[torch.device, str] = {}
    for name, parameter in parameters(ddp_model):
        devices.setdefault(parameter.device, name)
    for device, name in devices.items():
        if device.type not in ("cpu", "cuda"):
            return f"{name} is on {device}, expected the CPU or a CUDA device"
    if len(devices) > 1:
        places = " and ".join(f"{device} ({name})" for device, name in devices.items())
        return f"parameters are on {places}, expected one device: move the module to one"
    number = cuda_device(ddp_model)
    return "" if number is None else _C.cuda_problem(number)


def cuda_device(ddp_model: DistributedDataParallel) -> int | None:
    """Returns the number of the GPU that holds the parameters; None: they are on the CPU."""
    for _, parameter in parameters(ddp_model):
        return parameter.device.index if parameter.device.type == "cuda" else None
    return None


def add_exceptions(ddp_model: DistributedDataParallel, codec: str) -> str:
    """Returns the policy `codec` with rules for what its default should not compress.

    These are embeddings where it makes factors, and small tensors where it is lossy. Raises
    ConfigError.
    """
    tables = {
        id(module.weight)
        for module in ddp_model.module.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
    }
    named = parameters(ddp_model)
    embeddings = [(name, p.shape) for name, p in named if id(p) in tables]
    try:
        chosen = policy.except_embeddings(policy.parse(codec), embeddings)
        return policy.except_small_tensors(chosen, [(name, p.shape) for name, p in named]).spec()
    except ValueError as error:
        raise ConfigError(f"with the rules for embeddings and small tensors, {error}") from None


def sparse_module(ddp_model: DistributedDataParallel) -> str:
    """Returns the name of a module whose gradients will be sparse; empty: none is known to be."""
    for name, module in ddp_model.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            return name or type(module).__name__
    return ""
