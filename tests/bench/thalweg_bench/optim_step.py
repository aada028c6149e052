"""Runs the optimizer steps of `thalweg bench optim`, and compares what they make."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thalweg import amp, optim
from thalweg_bench.case import run_alternating
from thalweg_bench.foreach_lamb import ForeachLamb
from thalweg_bench.mixed_sequence import MixedSequence, grad_of
from thalweg_bench.optim_case import MASTERS, OptimCase
from thalweg_bench.rows import BenchError

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lamb": "LAMB"}
_LR, _DECAY = 1e-3, 1e-2
_TRIAD = 1 << 24  # elements at least: more than any cache has


@dataclass(frozen=True)
class System:
    params: list[Tensor]  # that steps change; of mixed precision the masters
    step: Callable[[], object]


def measure(case: OptimCase) -> tuple[dict[str, list[float]], int]:
    """Returns the seconds of each system's steps and of a triad, and the bytes that a triad moves.

    Raises BenchError when a peer's results differ.
    """
    systems = {name: open_system(case, name) for name in ("thalweg", *case.peers)}
    elements = max(case.numel, _TRIAD)
    a, b = torch.zeros(elements), torch.ones(elements)

    def once(system: str, _: int) -> float:
        start = time.perf_counter()
        if system == "triad":
            a.add_(b, alpha=1e-3)  # two reads and one write
        else:
            systems[system].step()
        return time.perf_counter() - start

    times = run_alternating((*systems, "triad"), case.repeats, once)
    for peer in case.peers:
        _check(case, peer, systems["thalweg"].params, systems[peer].params)
    return times, 12 * elements


def open_system(case: OptimCase, system: str) -> System:
    generator = torch.Generator().manual_seed(1)
    params: list[nn.Parameter] = []
    dtype = torch.float32 if system == MASTERS else _TYPES[case.param_dtype]
    for part in torch.randn(case.numel, generator=generator).tensor_split(case.tensors):
        param = nn.Parameter(part.to(dtype, copy=True))
        param.grad = torch.roll(param.detach(), 1) * 0.01
        params.append(param)
    return _ours(case, params) if system == "thalweg" else _theirs(case, system, params)


def _ours(case: OptimCase, params: list[nn.Parameter]) -> System:
    options = _options(case)
    if case.max_grad_norm is not None:
        options["max_grad_norm"] = case.max_grad_norm
    optimizer = getattr(optim, f"Fused{_CLASSES[case.optimizer]}")(params, **options)
    return _mixed(params, optimizer) if case.mixed else System([*params], optimizer.step)


def _mixed(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> System:
    """thalweg.amp's O2 around a fused optimizer. Only one may exist: its scale is apex's."""
    grads = [grad_of(param).half() for param in params]
    loss = torch.zeros(())
    amp.initialize(nn.ParameterList(params), optimizer, opt_level="O2", verbosity=0)

    def step() -> None:
        with amp.scale_loss(loss, optimizer):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        optimizer.step()

    return System(list(amp.master_params(optimizer)), step)


def _theirs(case: OptimCase, system: str, params: list[nn.Parameter]) -> System:
    step: Callable[[], object]
    if case.optimizer == "lamb":
        step = ForeachLamb([*params], _LR, _DECAY).step
    else:
        kind = getattr(torch.optim, _CLASSES[case.optimizer])
        step = kind(params, **_options(case), fused=True).step
    if case.mixed:
        step = MixedSequence(params, step, half=torch.float16, is_scaled=True).step
    if system == MASTERS:
        step = MixedSequence(params, step, half=_TYPES[case.param_dtype], is_scaled=False).step
    bound = case.max_grad_norm
    if bound is None:
        return System([*params], step)

    def clip_and_step() -> None:
        # It writes gradients, and finds them clipped from the second time on, with the same work.
        torch.nn.utils.clip_grad_norm_(params, bound)
        step()

    return System([*params], clip_and_step)


def _options(case: OptimCase) -> dict[str, Any]:
    options: dict[str, Any] = {"lr": _LR, "weight_decay": _DECAY}
    return options | ({"momentum": 0.9} if case.optimizer == "sgd" else {})


def _check(case: OptimCase, peer: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Compares float32 only: otherwise torch's moments are narrower than ours.

    After n steps of at most about 3·lr each, every one of which may differ by some roundings of its
    own size and one of the parameter's, whose size is at most 6, 1e-6 a step is generous, and a
    wrong formula is off by lr. Clipping hardly shows in Adam, whose steps no factor changes. LAMB's
    steps are as long as three norms say, of gradients, parameters and updates, which torch sums in
    float32; parameters show the error of that sum.
    """
    if case.param_dtype != "fp32":
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
