"""Runs a script as one worker of `thalweg profile`, and reports together with the others."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from thalweg._job import _topology
from thalweg._settings._config import Config, ConfigError
from thalweg.cli import _command, _profile_exchange, _profile_report, _script
from thalweg.cli._profile_advice import Measured, Tensor, advise, at_rate
from thalweg.cli._profile_clock import PHASES, Clock
from thalweg.cli._profile_exchange import Exchange
from thalweg.cli._profile_update import fused_seconds

_LEAST_STEPS = 3
_PROBE_BYTES = 8 << 20


class _Worker(NamedTuple):
    """What a worker tells the first one."""

    node: tuple[str, str]
    phases: dict[str, float]  # seconds per step
    steps: int
    gradients: tuple[Tensor, ...]
    exchange: Exchange
    sent_bytes: float  # per step, by its node
    optimizers: tuple[str, ...]
    fused_update: float | None  # seconds per step; None: not all can be fused


def run(args: argparse.Namespace) -> int:
    """Runs the script, and on rank 0 prints the report. Raises ConfigError if the script ends
    before enough steps.
    """
    command, sent = _command.of(args), [0.0]

    def note_sent() -> None:
        sent[0] = _profile_exchange.sent_bytes(clock.ddp_modules, clock.optimizers)

    clock = Clock(args.steps, args.skip, note_sent)
    with clock.installed(), contextlib.suppress(_script.Done):
        _script.run(command)
    if len(clock.steps) < _LEAST_STEPS:
        raise ConfigError(
            f"{' '.join(command)} has made {len(clock.steps)} optimizer steps after the first "
            f"{args.skip}, expected {_LEAST_STEPS} at least: give it more to do, or lower --skip"
        )
    _report(args, _describe(clock, sent[0]))
    clock.ddp_modules.clear()
    clock.optimizers.clear()
    gc.collect()  # DDP's modules, which are in cycles, keep Gloo's threads
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _describe(clock: Clock, sent_before: float) -> _Worker:
    count = len(clock.steps)
    fused = [fused_seconds(optimizer) for optimizer in clock.optimizers]
    sent = _profile_exchange.sent_bytes(clock.ddp_modules, clock.optimizers)
    gradients = tuple(
        Tensor(tuple(parameter.shape), parameter.element_size())
        for module in clock.ddp_modules
        for parameter in module.parameters()
        if parameter.requires_grad
    )
    return _Worker(
        node=(_topology.host_id(), Config.from_env().sidecar),
        phases={phase: sum(step[phase] for step in clock.steps) / count for phase in PHASES},
        steps=count,
        gradients=gradients,
        exchange=_profile_exchange.find(clock.ddp_modules, clock.optimizers),
        sent_bytes=(sent - sent_before) / count,
        optimizers=tuple(sorted({_name(type(each)) for each in clock.optimizers})),
        fused_update=None if None in fused else sum(filter(None, fused)),
    )


def _report(args: argparse.Namespace, worker: _Worker) -> None:
    """All workers call it together; if the script has ended their group, each is alone."""
    everyone, rate = [worker], None
    if dist.is_initialized() and dist.get_world_size() > 1:
        group = dist.new_group(backend="gloo")
        gathered: list[_Worker | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, worker, group=group)
        everyone = [entry for entry in gathered if entry is not None]
        rate = _measure_links([entry.node for entry in everyone])
        if dist.get_rank() != 0:
            return
    by_worker = [entry.phases for entry in everyone]
    phases = {phase: sum(p[phase] for p in by_worker) / len(by_worker) for phase in PHASES}
    busy = [sum(p.values()) - p["wait"] for p in by_worker]
    measured = Measured(
        phases=phases,
        straggling=min(phases["wait"], max(busy) - sum(busy) / len(busy)),
        gradients=worker.gradients,
        workers=len(everyone),
        nodes=len({entry.node for entry in everyone}),
        rate=rate,
        exchange=worker.exchange,
        sent_bytes=worker.sent_bytes,
        optimizers=worker.optimizers,
        fused_update=_mean([entry.fused_update for entry in everyone]),
    )
    judged = at_rate(measured, args.rate) if args.rate and rate else measured
    advice = [*advise(judged), *_no_links(args.rate, rate)]
    _profile_report.show(args.out, measured, by_worker, worker.steps, advice)


def _no_links(asked: float | None, measured: float | None) -> list[str]:
    """Says that a rate which was asked for has no effect, if that is so."""
    if not asked or measured:
        return []
    return ["--rate has no effect: one node takes part, or the script has ended its process group"]


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None if one of them is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) / len(values) if len(known) == len(values) else None


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _measure_links(nodes: Sequence[tuple[str, str]]) -> float | None:
    """Returns the bits per second of the slowest node's link; None: there is one node.

    The first workers of the nodes reduce a tensor in a ring, to which each link carries
    2 (n - 1) / n times its bytes in each direction.
    """
    leaders = [nodes.index(node) for node in dict.fromkeys(nodes)]
    if len(leaders) == 1:
        return None
    group = dist.new_group(leaders, backend="gloo")
    rate = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() in leaders:
        for size in (_PROBE_BYTES // 32, _PROBE_BYTES):  # the first opens connections
            probe = torch.zeros(size // 4)
            dist.barrier(group)
            began = time.perf_counter()
            dist.all_reduce(probe, group=group)
            seconds = time.perf_counter() - began
        n = len(leaders)
        rate[0] = 2 * (n - 1) / n * _PROBE_BYTES * 8 / seconds
        dist.all_reduce(rate, dist.ReduceOp.MIN, group=group)
    return float(rate)
