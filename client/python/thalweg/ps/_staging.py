"""The way of gradients to the memory of the CPU from which a session takes them."""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Gradients one after the other, in memory of the CPU, which copies fill."""

    def __init__(self, elements: int, dtype: torch.dtype, *, from_gpu: bool) -> None:
        """`from_gpu`: the memory is locked, and copies do not wait for the GPU."""
        self.flat = torch.empty(elements, dtype=dtype, device="cpu", pin_memory=from_gpu)
        self._streams: set[torch.cuda.Stream] = set()  # on which copies have been queued

    def fill(self, place: Tensor, gradient: Tensor) -> None:
        """Copies a gradient to `place`, a view of `flat`. Its memory may be given back at once: the
        allocator gives it to later work of the same stream.
        """
        # A gradient that is to be differentiated again has a graph, which buckets are no part of.
        place.copy_(gradient.detach(), non_blocking=True)
        if gradient.is_cuda:
            self._streams.add(torch.cuda.current_stream(gradient.device))

    def settled(self) -> Tensor:
        """Waits until all copies are done; returns `flat`."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()
        return self.flat


def on_cpu(tensor: Tensor) -> Tensor:
    """Returns the tensor, or one like it on the CPU and contiguous, of whatever values."""
    fits = tensor.is_cpu and tensor.is_contiguous()
    return tensor if fits else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def flattened(tensors: list[Tensor]) -> Tensor:
    """Returns their values one after the other, in float32 on the CPU."""
    return torch.cat([tensor.detach().reshape(-1).float().cpu() for tensor in tensors])
