"""What models need that torch shards, FullyShardedDataParallel (FSDP1) or fully_shard() (FSDP2):
whole state on rank 0 and back, names of checkpoints, whether bfloat16 is of use here, and codecs.

    state = thalweg.fsdp.full_state_dict(model)  # on all ranks; {} on all but rank 0
    thalweg.fsdp.compress(model, "int8")  # of fully_shard()
    thalweg.fsdp.save(model, thalweg.fsdp.checkpoint_path("checkpoints", "t5", started, epoch))

docs/fsdp.md has the rest.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from thalweg._sharded._compression import compress, state_of
from thalweg._sharded._state import Compression

__all__ = [
    "Compression",
    "Readiness",
    "bf16_ready",
    "checkpoint_path",
    "compress",
    "full_state_dict",
    "load_full_state_dict",
    "save",
    "state_of",
    "write",
]

_MIN_CUDA = (11, 0)
_MIN_NCCL = (2, 10)


@dataclass(frozen=True)
class Readiness:
    """A Readiness says whether something is to be had, and why; it is true or false itself."""

    ready: bool
    remarks: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.ready

    def __str__(self) -> str:
        return "; ".join(self.remarks)


def bf16_ready(device: torch.device | str | None = None) -> Readiness:
    """Returns whether mixed precision in bfloat16 works on this rank, with what speaks for it or
    against it.

    `device`: default is the current GPU where there is one, otherwise the CPU. A GPU needs CUDA 11,
    the type in hardware, and NCCL 2.10. Every CPU has the type, computed in float32 where it has no
    instructions for it: what that saves there is bytes, not time.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return Readiness(True, (_cpu_remark(), *_group_remarks()))
    if device.type != "cuda":
        return Readiness(False, (f"nothing is known about bfloat16 on {device.type}",))
    if not torch.cuda.is_available():
        return Readiness(False, ("there is no GPU here that torch can use",))
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    nccl: tuple[int, ...] = torch.cuda.nccl.version() if dist.is_nccl_available() else (0, 0)
    with torch.cuda.device(device):
        in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)
    lacks = [
        f"{what} {_dotted(has)} is older than {_dotted(needs)}"
        for what, has, needs in (("CUDA", cuda, _MIN_CUDA), ("NCCL", nccl[:2], _MIN_NCCL))
        if has < needs
    ]
    if not in_hardware:
        lacks.append(f"{torch.cuda.get_device_name(device)} has no bfloat16 in hardware")
    has = f"CUDA {_dotted(cuda)}, NCCL {_dotted(nccl)}, bfloat16 in hardware"
    return Readiness(not lacks, tuple(lacks) or (has,))


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the whole model's state_dict() on rank 0, in CPU memory, and {} on the others.

    All ranks call it. `model` is sharded by FSDP1 or FSDP2; any other model is its own state. The
    values are copies, of the parameters' own types. Parameters are gathered unit by unit (FSDP1) or
    one by one (FSDP2), so that no rank but the first ever holds them all.

    FSDP1 on the CPU does not take torch's `offload_to_cpu=True`, which fails there in torch 2.11
    whatever the back end, and need not: what it gathers is in CPU memory.
    """
    if not _has_fsdp1(model):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        return _copied(state) if dist.get_rank() == 0 else {}
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    config = FullStateDictConfig(offload_to_cpu=not on_cpu, rank0_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of state_dict_type(), for which see above
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
    return state if dist.get_rank() == 0 else {}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads what full_state_dict() returned into a model that may be sharded in another way.

    All ranks call it; only rank 0's `state` counts, and reaches the others tensor by tensor. Every
    rank holds one whole copy meanwhile (FSDP1), or one whole tensor (FSDP2). Raises RuntimeError on
    rank 0 if a name is missing, or one is there that the model does not have.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state) if dist.get_rank() == 0 else {}, options=options)


def checkpoint_path(folder: str | Path, name: str, started: datetime, epoch: int) -> Path:
    """Returns `folder/<name>-<time of run>-<epoch>.pt`, with `started` as the time of the run.

    Where all ranks write, they must agree on that: clocks differ.
    """
    return Path(folder) / f"{name}-{started:%Y-%m-%d-%H.%M.%S}-{epoch}.pt"


def save(model: nn.Module, path: str | Path, **more: object) -> None:
    """Writes {"model": full_state_dict(model), **more} to `path`. All ranks call it; rank 0 writes.

    What is at `path` is whole at any time: the file takes its name when all of it is on the disk.
    Its folders are made. OSError: they cannot be, or the disk is full (on rank 0 only).
    """
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        write(Path(path), {"model": state, **more})


def write(path: Path, content: object) -> None:
    """Does torch.save() in such a way that a file that is there is whole.

    A process that is killed meanwhile leaves a hidden file beside it, whose name ends with ".part".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies tensors that may be the model's own, as those are that nothing had to be gathered for.

    torch hands these out themselves where the model is on the CPU.
    """
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _cpu_remark() -> str:
    has = torch.cpu.get_capabilities()
    names = [name for name in ("amx_bf16", "avx512_bf16") if has.get(name)]
    if names:
        return f"this CPU has instructions for bfloat16: {', '.join(names)}"
    return "this CPU computes bfloat16 in float32: it saves bytes, not time"


def _group_remarks() -> tuple[str, ...]:
    """Returns how the default process group sums bfloat16 on the CPU, where there is such a group
    and this is known.
    """
    if not dist.is_initialized():
        return ()
    try:
        name = dist.get_backend(dist.group.WORLD)
    except (RuntimeError, ValueError):
        return ()
    how = {
        "thalweg": 'the back end "thalweg" sums it in float32 and rounds once',
        "gloo": "Gloo rounds to it after each addition",
    }
    return (how[name],) if name in how else ()
