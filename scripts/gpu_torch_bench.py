"""Measures torch on a GPU for comparison with Thalweg's GPU benchmarks, as one JSON.

Gloo's allreduce among processes that share the GPU; torch's PowerSGD hook on one bucket with all
matrices of a model, on one rank; and steps of optimizers: torch's fused AdamW, and the sequences
that mixed precision (O2) takes in torch's operations. Needs torch, not Thalweg. With --device cpu
it shows that it works.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

try:
    from foreach_lamb import ForeachLamb  # in a bundle
    from mixed_sequence import MixedSequence
except ImportError:
    from thalweg_bench.foreach_lamb import ForeachLamb
    from thalweg_bench.mixed_sequence import MixedSequence

WARMUPS = 3
RANK = 4
# These are the matrices of the encoder and the pooler, as gpu_powersgd_bench has them.
BERT_LARGE = [(1024, 1024)] * 97 + [(4096, 1024)] * 24 + [(1024, 4096)] * 24
_RESNET50_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


def resnet50() -> list[tuple[int, int]]:
    """Returns its convolutions and its classifier, as PowerSGD sees them."""
    matrices, inputs = [(64, 3 * 7 * 7)], 64
    for width, blocks in _RESNET50_STAGES:
        for block in range(blocks):
            matrices += [(width, inputs), (width, width * 9), (4 * width, width)]
            if block == 0:
                matrices.append((4 * width, inputs))
            inputs = 4 * width
    return [*matrices, (1000, inputs)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    times = []
    for _ in range(WARMUPS + repetitions):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[WARMUPS:])


def start(backend: str, folder: Path, rank: int, workers: int) -> None:
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store{workers}", rank=rank, world_size=workers
    )


def reduce_by_gloo(rank: int, workers: int, folder: Path, options: argparse.Namespace) -> None:
    """Runs a worker; that of rank 0 writes the rows into the folder."""
    start("gloo", folder, rank, workers)
    device = torch.device(options.device)
    rows = []
    for mib in options.mib:
        gradient = torch.ones((mib << 20) // 4, device=device)
        milliseconds = median_ms(partial(dist.all_reduce, gradient), device, options.repetitions)
        case = f"Gloo, {workers} workers, {mib} MiB"
        rows.append({"case": case, "bytes": gradient.nbytes, "ms": milliseconds})
    if rank == 0:
        (folder / f"gloo{workers}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def bench_gloo(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for workers in options.workers:
        mp.spawn(reduce_by_gloo, (workers, folder, options), nprocs=workers)
        rows += json.loads((folder / f"gloo{workers}.json").read_text())
    return rows


class Gradients(nn.Module):
    """Matrices whose gradients are fixed random numbers."""

    def __init__(self, matrices: list[tuple[int, int]], device: torch.device) -> None:
        super().__init__()
        self._gradients = [torch.randn(shape, device=device) for shape in matrices]
        self._weights = nn.ParameterList(torch.zeros(shape, device=device) for shape in matrices)

    def forward(self) -> torch.Tensor:
        pairs = zip(self._weights, self._gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def time_powersgd(matrices: list[tuple[int, int]], device: torch.device, repetitions: int) -> float:
    """Returns the milliseconds of torch's hook alone, until the GPU is done."""
    total_mib = math.ceil(4 * sum(rows * columns for rows, columns in matrices) / (1 << 20))
    model = DistributedDataParallel(Gradients(matrices, device), bucket_cap_mb=total_mib + 1)
    state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
    times: list[float] = []

    def hook(state: powerSGD_hook.PowerSGDState, bucket: Any) -> Any:  # noqa: ANN401 - torch's
        synchronize(device)
        begin = time.perf_counter()
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
        return future

    hook.__annotations__ = {}  # DDP refuses annotations that are text
    model.register_comm_hook(state, hook)
    steps = WARMUPS + repetitions
    for _ in range(steps):
        model.zero_grad()
        model().backward()
    if len(times) != steps:
        raise SystemExit(f"error: {len(times)} buckets in {steps} steps, expected one in each")
    return statistics.median(times[WARMUPS:])


def bench_powersgd(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    device = torch.device(options.device)
    # Gloo would copy the factors through the host's memory.
    start("nccl" if device.type == "cuda" else "gloo", folder, 0, 1)
    rows = []
    for name, matrices in (("ResNet-50", resnet50()), ("BERT-large", BERT_LARGE)):
        if name not in options.models:
            continue
        size = 4 * sum(rows * columns for rows, columns in matrices)
        milliseconds = time_powersgd(matrices, device, options.repetitions)
        rows.append({"case": f"torch's PowerSGD hook, {name}", "bytes": size, "ms": milliseconds})
    dist.destroy_process_group()
    return rows


def parameter(numel: int, device: torch.device) -> nn.Parameter:
    """Returns a parameter with a gradient."""
    param = nn.Parameter(torch.randn(numel, device=device))
    param.grad = torch.randn(numel, device=device) * 1e-3
    return param


def adamw(param: nn.Parameter) -> Callable[[], object]:
    return torch.optim.AdamW([param], lr=1e-3, fused=True).step


def lamb(param: nn.Parameter) -> Callable[[], object]:
    return ForeachLamb([param], lr=1e-3, weight_decay=0.01).step


def bench_optimizers(options: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(options.device)
    rows = []
    for case, make, mixed in (
        ("torch's fused AdamW, fp32", adamw, False),
        ("torch's sequence for AdamW, O2", adamw, True),
        ("torch's sequence for LAMB, O2", lamb, True),
    ):
        param = parameter(options.numel, device)
        step = make(param)
        if mixed:
            step = MixedSequence([param], step, half=torch.float16, is_scaled=True).step
        milliseconds = median_ms(step, device, options.repetitions)
        rows.append({"case": case, "elems": options.numel, "ms": milliseconds})
    return rows


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    parser.add_argument("--workers", type=numbers, default=[2, 4], help="default: 2,4")
    parser.add_argument("--mib", type=numbers, default=[1, 25, 256], help="default: 1,25,256")
    parser.add_argument("--models", default="ResNet-50,BERT-large", help="default: %(default)s")
    parser.add_argument(
        "--numel", type=int, default=64 << 20, help="parameters of optimizers (%(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=21, help="default: %(default)s")
    options = parser.parse_args()
    options.models = options.models.split(",")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} finds no GPU it can use", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = bench_gloo(options, folder)
        rows += bench_powersgd(options, folder / "powersgd")
    rows += bench_optimizers(options)
    result = {"torch": torch.__version__, "repetitions": options.repetitions, "rows": rows}
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
