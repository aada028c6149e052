"""Jobs that check lossy codecs on tensors of many sizes: `lossy_jobs.py NAME OUT`."""

from typing import Any

import torch
import torch.distributed as dist
from cast_jobs import TINY, UNIT, mean
from jobs import job, main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

CODECS = ("int8:start=0", "onebit:start=0")
# Small tensors with small gradients, each between large ones with large gradients.
SHAPES = {
    "large0": (3000,),
    "one": (1,),
    "large1": (70, 31),
    "scalar": (),
    "large2": (1025,),
    "bias": (63,),
    "large3": (64, 64),
    "most": (1023,),
}
SMALL = ("one", "scalar", "bias", "most")
QUIET = ("large2", *SMALL)  # have gradients a million times smaller than the others'


class Given(nn.Module):
    """A model with parameters of SHAPES whose gradients are the tensors of `gradients`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: torch.zeros(size) for name, size in SHAPES.items()})

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        products = [(self.parts[name] * value).sum() for name, value in gradients.items()]
        return torch.stack(products).sum()


def measure(codec: str) -> dict[str, dict[str, float]]:
    """Returns each tensor's largest error in units of what fp16 and what int8 allows.

    Both round each node's gradient and then the mean. For fp16 see cast_jobs. int8 rounds to a
    whole multiple of the largest magnitude of a block divided by 125, which is at most that of the
    tensor; a hundredth covers what the first rounding adds to the second, and float32.
    """
    data = torch.Generator().manual_seed(dist.get_rank())
    gradients = {
        name: (1e-3 if name in QUIET else 1e3) * torch.randn(shape, generator=data)
        for name, shape in SHAPES.items()
    }
    model = DistributedDataParallel(Given())
    state = thalweg.ddp.attach(model, codec=codec)
    model(gradients).backward()
    errors: dict[str, dict[str, float]] = {}
    for name, own in gradients.items():
        averaged = model.module.parts[name].grad.double()
        error = (averaged - mean(own.double())).abs()
        by_fp16 = 1.01 * 2 * (UNIT["fp16"] * mean(own.double().abs()) + TINY["fp16"])
        by_int8 = 1.01 * 2 * mean(own.double().abs().max()) / 250
        errors[name] = {
            "fp16": (error / by_fp16).max().item(),
            "int8": (error / by_int8).max().item(),
        }
    state.close()
    return errors


@job
def one_step() -> dict[str, Any]:
    """Returns what `measure` does for each codec: as it is, and with a rule for small tensors."""
    return {
        codec: {"plain": measure(codec), "with rule": measure(f"{codec};elems<1024={codec}")}
        for codec in CODECS
    }


if __name__ == "__main__":
    main()
