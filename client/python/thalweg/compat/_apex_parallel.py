"""Offers torch's DistributedDataParallel as that of `apex.parallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, on the device of the module's parameters.

    Args:
        module: with all its parameters on one device, this worker's.
        delay_allreduce: a parameter may have no gradient, as torch's find_unused_parameters says.
        message_size, allreduce_trigger_params, num_allreduce_streams, prof: accepted as apex does;
            torch decides by itself when which bucket is averaged, and profiles differently.
        gradient_predivide_factor: accepted as well; it guards sums of half precision from overflow,
            which no mean here does: torch divides before it sums, Thalweg sums in float32.
        shared_param, retain_allreduce_buffers, allreduce_always_fp32, allreduce_communicators,
            gradient_average, gradient_average_split_factor: only apex's defaults.

    Raises:
        ValueError: for an option that apex has and this class does not.
    """

    def __init__(  # noqa: PLR0917 - apex's order
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Any = None,  # noqa: ANN401
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,  # noqa: ANN401
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        asked = {
            "shared_param": (shared_param is not None, "share parameters between modules instead"),
            "retain_allreduce_buffers": (retain_allreduce_buffers, "read .grad instead"),
            "allreduce_always_fp32": (
                allreduce_always_fp32 and _has_half(module),
                "Thalweg sums gradients in float32 always: leave the option out",
            ),
            "allreduce_communicators": (
                allreduce_communicators is not None,
                "torch chooses its communicators",
            ),
            "gradient_average=False": (
                not gradient_average,
                "multiply the loss by the number of workers instead",
            ),
            "gradient_average_split_factor": (
                gradient_average_split_factor is not None,
                "leave it out, as apex asks too",
            ),
        }
        for option, (is_asked, instead) in asked.items():
            if is_asked:
                raise ValueError(
                    f"thalweg: apex's DistributedDataParallel({option}) is not supported: {instead}"
                )
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        super().__init__(
            module,
            device_ids=None if device.type == "cpu" else [device],
            find_unused_parameters=delay_allreduce,
        )


def _has_half(module: nn.Module) -> bool:
    return any(param.dtype in (torch.float16, torch.bfloat16) for param in module.parameters())
