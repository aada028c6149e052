"""`thalweg bench optim` runs an optimizer step over parameters of a given number, type and cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg import optim
from thalweg_bench.foreach_lamb import ForeachLamb
from thalweg_bench.lab_case import run_alternating
from thalweg_bench.mixed_optim import MixedStep
from thalweg_bench.mixed_sequence import MixedSequence
from thalweg_bench.rows import BenchError, Row, count, make_row

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MASTERS = "torch-masters"  # makes moments of half-precision parameters float32 in torch
_LR, _DECAY = 1e-3, 1e-2
_STATES = {"sgd": 1, "adam": 2, "adamw": 2, "lamb": 2}


@dataclass(frozen=True)
class OptimCase:
    optimizer: str
    dtype: str  # of parameters and gradients
    numel: int  # in all tensors
    tensors: int
    peers: tuple[str, ...]
    repeats: int
    device: str = "cpu"
    max_grad_norm: float | None = None  # for SGD, Adam and AdamW; LAMB always clips to 1
    mixed: bool = False  # O2: parameters and gradients float16, masters float32; `dtype` is fp32

    @property
    def name(self) -> str:
        cut = count(self.tensors, "tensor")
        clipped = "" if self.max_grad_norm is None else f", clipped to {self.max_grad_norm:g}"
        where = "" if self.device == "cpu" else f" on {self.device}"
        dtype = "O2" if self.mixed else self.dtype
        return f"{self.optimizer} {dtype}, {self.numel:,} in {cut}{clipped}{where}"

    @property
    def bytes_moved(self) -> int:
        """Returns the least bytes: each array read once, and written once if it changes.

        Clipping reads gradients once more, for their norm. LAMB does so, and does not write
        parameters before it has read them and the moments once more, for the trust ratio: 44 bytes
        in float32. O2 reads gradients twice as well, to check whether they are finite, but both
        times in float16, and stores parameters in float16 beside their masters.
        """
        if self.mixed:
            lamb = 12 if self.optimizer == "lamb" else 0
            return (2 * 2 + 8 + 8 * _STATES[self.optimizer] + 2 + lamb) * self.numel
        width = TYPES[self.dtype].itemsize
        per_element = 3 * width + 8 * _STATES[self.optimizer]
        if self.optimizer == "lamb":
            per_element += 2 * width + 8
        elif self.max_grad_norm is not None:
            per_element += width
        return per_element * self.numel


def run(case: OptimCase) -> list[Row]:
    """Runs the case. Raises BenchError."""
    device = torch.device(case.device)
    systems = {"thalweg": _open(case, "thalweg")}
    for peer in case.peers:
        systems[peer] = _open(case, peer)
    triad = _Triad(case.numel, device)

    def once(system: str, _: int) -> float:
        step: Callable[[], object] = triad.run if system == "triad" else systems[system].step
        _finish(device)
        start = time.perf_counter()
        step()
        _finish(device)
        return time.perf_counter() - start

    times = run_alternating((*systems, "triad"), case.repeats, once)
    for peer in case.peers:
        _check(case, peer, systems["thalweg"].params, systems[peer].params)
    return make_rows(case, times, triad.bytes_moved)


def _finish(device: torch.device) -> None:
    """Waits for work queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_rows(case: OptimCase, times: Mapping[str, Sequence[float]], triad_bytes: int) -> list[Row]:
    """Makes rows. The bound is the bytes of a step at the rate of the fastest triad."""
    bound = case.bytes_moved * min(times["triad"]) / triad_bytes
    return [
        make_row(
            case.name,
            system,
            triad_bytes if system == "triad" else case.bytes_moved,
            seconds,
            None if system == "triad" else bound,
        )
        for system, seconds in times.items()
    ]


class _Triad:
    """a = a + s·b in float32: two reads and one write, of cached lines."""

    def __init__(self, numel: int, device: torch.device) -> None:
        # The arrays exceed any cache, so that small cases have the same memory bound.
        elements = max(numel, 1 << 24)
        self._a = torch.zeros(elements, device=device)
        self._b = torch.ones(elements, device=device)
        self.bytes_moved = 12 * elements

    def run(self) -> None:
        self._a.add_(self._b, alpha=1e-3)


@dataclass(frozen=True)
class _System:
    params: list[Tensor]
    step: Callable[[], object]


def _open(case: OptimCase, system: str) -> _System:
    generator = torch.Generator().manual_seed(1)
    params: list[torch.nn.Parameter] = []
    dtype = torch.float32 if system == MASTERS else TYPES[case.dtype]
    for part in torch.randn(case.numel, generator=generator).tensor_split(case.tensors):
        param = torch.nn.Parameter(part.to(case.device, dtype, copy=True))
        param.grad = torch.roll(param.detach(), 1) * 0.01
        params.append(param)
    return _ours(case, params) if system == "thalweg" else _theirs(case, system, params)


def _ours(case: OptimCase, params: list[torch.nn.Parameter]) -> _System:
    options = _options(case)
    if case.max_grad_norm is not None:
        options["max_grad_norm"] = case.max_grad_norm
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": optim.FusedSGD,
        "adam": optim.FusedAdam,
        "adamw": optim.FusedAdamW,
        "lamb": optim.FusedLAMB,
    }
    optimizer = kinds[case.optimizer](params, **options)
    if not case.mixed:
        return _System([*params], optimizer.step)
    mixed = MixedStep(params, optimizer)
    return _System(mixed.masters, mixed.step)


def _theirs(case: OptimCase, system: str, params: list[torch.nn.Parameter]) -> _System:
    if case.optimizer == "lamb":
        step: Callable[[], object] = ForeachLamb([*params], _LR, _DECAY).step
    else:
        options = _options(case)
        options["foreach" if system == "torch-foreach" else "fused"] = True
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": torch.optim.SGD,
            "adam": torch.optim.Adam,
            "adamw": torch.optim.AdamW,
        }
        step = kinds[case.optimizer](params, **options).step
    if case.mixed:
        step = MixedSequence(params, step, half=torch.float16, is_scaled=True).step
    if system == MASTERS:
        step = MixedSequence(params, step, half=TYPES[case.dtype], is_scaled=False).step
    bound = case.max_grad_norm
    if bound is None:
        return _System([*params], step)

    def clip_and_step() -> None:
        # It writes gradients, and finds them clipped from the second time on, with the same work.
        torch.nn.utils.clip_grad_norm_(params, bound)
        step()

    return _System([*params], clip_and_step)


def _options(case: OptimCase) -> dict[str, Any]:
    options: dict[str, Any] = {"lr": _LR, "weight_decay": _DECAY}
    if case.optimizer == "sgd":
        options["momentum"] = 0.9
    return options


def _check(case: OptimCase, peer: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Compares float32 only: otherwise torch's moments are narrower than ours.

    After n steps of at most about 3·lr each, every one of which may differ by some roundings of its
    own size and one of the parameter's, whose size is at most 6, 1e-6 a step is generous, and a
    wrong formula is off by lr. Clipping hardly shows in Adam, whose steps no factor changes. LAMB's
    steps are as long as three norms say, of gradients, parameters and updates, which torch sums in
    float32; parameters show the error of that sum.
    """
    if case.dtype != "fp32":
        return
    steps = case.repeats + 1
    bound = 1e-6 * steps
    if case.optimizer == "lamb":
        bound += 3 * _LR * steps * 3 * max(map(_norm_error, theirs))
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        difference = (a - b).abs().max().item()
        if not difference <= bound:
            raise BenchError(
                f"{case.name}: tensor {index} differs from {peer} by {difference:.3g}, expected at "
                f"most {bound:.3g}"
            )


def _norm_error(param: Tensor) -> float:
    """Returns the relative error of torch's norm in float32: 2e-3 for 32 million elements."""
    norms = [torch.linalg.vector_norm(param, dtype=t).item() for t in (None, torch.float64)]
    return float(abs(norms[0] / norms[1] - 1))
