"""Reads what codecs hold back for later from the state that a checkpoint has of them."""

import struct

import numpy as np
import torch
from torch import Tensor

import thalweg.ddp


def held_back(state: thalweg.ddp.State, prefix: str = "") -> dict[str, tuple[Tensor, Tensor]]:
    """Returns what a node and, on one node, the shards have left out of each parameter so far, but
    for parameters of which they have left out nothing.

    The format is that of server/sidecar/codec/parameter_states.h.
    """
    [saved] = [value for key, value in state.state_dict().items() if key.startswith("node")]
    held = {}
    magic, count = struct.unpack_from("<4sI", saved)
    assert magic == b"TWS3"
    at = 8
    for _ in range(count):
        (length,) = struct.unpack_from("<I", saved, at)
        name = saved[at + 4 : at + 4 + length].decode()
        at += 4 + length
        _, *sizes = struct.unpack_from("<4Q", saved, at)
        at += 32
        arrays = []
        for size in sizes:
            values = np.frombuffer(saved, np.float32, size, at)
            arrays.append(torch.from_numpy(values.astype(np.float64)))
            at += 4 * size
        _, residual, of_shards = arrays
        elems = max(residual.numel(), of_shards.numel())
        if elems:
            held[name.removeprefix(prefix)] = tuple(
                values if values.numel() else torch.zeros(elems, dtype=torch.float64)
                for values in (residual, of_shards)
            )
    return held
