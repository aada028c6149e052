"""Measures training steps of two workers that share a GPU, as one JSON.

Mixed precision (O2) with Adam, gradients averaged by Thalweg's hook, or by DDP alone over Gloo:
NCCL refuses two workers on one GPU. Needs torch, torchvision and Thalweg. With --device cpu it
shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WORKERS = 2
WARMUPS = 5
AVERAGED_BY = ("Thalweg", "DDP over Gloo")


class Gpt(nn.Module):
    """The layers of a GPT-2 of 124 million parameters, without its embeddings."""

    def __init__(self, layers: int = 12, width: int = 768) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def resnet50(device: torch.device, scale: int) -> tuple[nn.Module, Tensor]:
    import torchvision

    images = torch.randn(max(32 // scale, 1), 3, 224 // scale, 224 // scale, device=device)
    return torchvision.models.resnet50(), images


def gpt(device: torch.device, scale: int) -> tuple[nn.Module, Tensor]:
    return Gpt(), torch.randn(max(8 // scale, 1), 512 // scale, 768, device=device)


MODELS = {"ResNet-50": resnet50, "GPT-2": gpt}


def work(
    rank: int, model_name: str, averaged_by: str, folder: Path, options: argparse.Namespace
) -> None:
    """Runs a worker; that of rank 0 writes its row into the folder."""
    import thalweg.ddp
    from thalweg import amp
    from thalweg.optim import FusedAdam

    device = torch.device(options.device)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS
    )
    module, x = MODELS[model_name](device, 8 if device.type == "cpu" else 1)
    module.to(device)
    optimizer = FusedAdam(module.parameters(), lr=1e-4)
    module, optimizer = amp.initialize(module, optimizer, opt_level="O2", verbosity=0)
    model = DistributedDataParallel(module)
    state = thalweg.ddp.attach(model, "fp16") if averaged_by == "Thalweg" else None

    def step() -> None:
        loss = model(x).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = step_times(step, device, options.repetitions)
    gradients = sum(parameter.numel() for parameter in model.parameters())
    row = {
        "case": f"{model_name} O2, {averaged_by}",
        "elems": gradients,
        "ms": statistics.median(times),
        "path": state.path if state else "gloo",
    }
    if state is not None:
        state.close()
    if rank == 0:
        (folder / "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def step_times(step: Callable[[], None], device: torch.device, repetitions: int) -> list[float]:
    """Returns the milliseconds of each step, until the device is done."""
    times = []
    for _ in range(WARMUPS + repetitions):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return times[WARMUPS:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=21, help="default: %(default)s")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} finds no GPU it can use", file=sys.stderr)
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for model in options.models.split(","):
        for averaged_by in AVERAGED_BY:
            with tempfile.TemporaryDirectory() as name:
                arguments = (model, averaged_by, Path(name), options)
                mp.spawn(work, arguments, nprocs=WORKERS)
                rows.append(json.loads((Path(name) / "row.json").read_text()))
    print(
        json.dumps({"torch": torch.__version__, "repetitions": options.repetitions, "rows": rows})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
