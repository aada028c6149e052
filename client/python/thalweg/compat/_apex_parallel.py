"""Offers torch's DistributedDataParallel and SyncBatchNorm as `apex.parallel`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import SyncBatchNorm

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, on the device of the module's parameters.

    Args:
        module: with all its parameters on one device, this worker's.
        message_size, delay_allreduce, options: accepted as apex does; torch decides by itself when
            which bucket is averaged.
    """

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:  # noqa: ANN401
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        super().__init__(module, device_ids=None if device.type == "cpu" else [device])


def convert_syncbn_model(
    module: nn.Module,
    process_group: Any = None,  # noqa: ANN401
    channel_last: bool = False,
) -> nn.Module:
    """Replaces batch normalisation by SyncBatchNorm; `channel_last` is torch's.

    Args:
        module: of any kind.
        process_group: the workers that share statistics; None: all.
    """
    converted: nn.Module = SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted
