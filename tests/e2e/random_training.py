"""Trains modules as a plan says (random_plans.py), plainly or through Thalweg."""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from held_back import held_back
from random_plans import Plan, Script
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

Key = tuple[int, str]

WORDS = 50
BATCH = 6


class Net(nn.Module):
    def __init__(self, script: Script, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width) if script.table else None
        self.blocks = nn.ModuleList()
        for plan in script.blocks:
            block = nn.Module()
            dtype = getattr(torch, plan.dtype)
            if plan.shares is None:
                block.a = nn.Parameter(torch.randn(width, plan.hidden).div(width**0.5).to(dtype))
            else:
                block.a = self.blocks[plan.shares].a
            block.b = nn.Parameter(torch.randn(plan.hidden, width).div(plan.hidden).to(dtype))
            block.bias = nn.Parameter(torch.zeros(width, dtype=dtype))
            self.blocks.append(block)
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(script.heads))

    def forward(self, x: Tensor, heads: tuple[int, ...]) -> Tensor:
        if self.table is not None:
            x = self.table((x.abs() * WORDS).long() % WORDS).mean(1)
        for block in self.blocks:
            inner = torch.tanh(x.to(block.a.dtype) @ block.a)
            x = x + (inner @ block.b + block.bias).to(x.dtype)
        return torch.stack([self.heads[head](x) for head in heads]).sum(0)


@dataclass
class Record:
    """What a run of a plan gave."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)  # losses and a digest, by step
    # By module and parameter: the sum of gradients over the steps, that of their norms, that of the
    # norms of this rank's own, and what is held back at the end, by the node and by the shards.
    sums: dict[Key, Tensor] = field(default_factory=dict)
    applied: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    local: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    held: dict[Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    types: dict[Key, torch.dtype] = field(default_factory=dict)


class Trainee:
    """A module in training."""

    def __init__(self, plan: Plan, number: int, codec: str | None, lr: float) -> None:
        self.plan, self.number, self.codec, self.lr = plan, number, codec, lr
        self.script = plan.scripts[number]
        self.frozen: tuple[int, ...] = self.script.frozen_at_first
        self.late = {step.adds_group for step in self.script.steps} - {None}
        self.scaler = None if plan.scale is None else self._new_scaler()
        self.state: thalweg.ddp.State | None = None
        self._build()
        late = [p for head in self.late for p in self.net.heads[head].parameters()]
        first = [p for p in self.net.parameters() if p.requires_grad]
        names = {id(p): name for name, p in self.net.named_parameters()}
        without = {id(p) for p in late}
        self.groups = [[names[id(p)] for p in first if id(p) not in without]]
        self.optimizer = self._new_optimizer()

    def _build(self) -> None:
        torch.manual_seed(self.plan.seed)
        self.net = Net(self.script, self.plan.width)
        self.module = torch.compile(self.net, backend="eager") if self.script.compiled else self.net
        self._wrap()

    def _wrap(self) -> None:
        self._freeze(())
        self.ddp = DistributedDataParallel(self.module, **self.script.options)
        if self.codec is not None:
            chunk_bytes = self.script.chunk_bytes
            self.state = thalweg.ddp.attach(self.ddp, self.codec, chunk_bytes=chunk_bytes)

    def _freeze(self, more: tuple[int, ...]) -> None:
        self.net.requires_grad_(True)
        for block in (*self.frozen, *more):
            self.net.blocks[block].requires_grad_(False)

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=self.plan.scale, growth_interval=3)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        named = dict(self.net.named_parameters())
        groups = [{"params": [named[name] for name in names]} for names in self.groups]
        kind, lr = self.script.optimizer, self.lr
        if kind == "sgd" or lr == 0:
            return torch.optim.SGD(groups, lr=lr, momentum=0.9)
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](groups, lr=lr / 10)

    def _add_group(self, module: nn.Module) -> None:
        known = {name for group in self.groups for name in group}
        added = {id(parameter) for parameter in module.parameters()}
        named = [
            (n, p) for n, p in self.net.named_parameters() if id(p) in added and n not in known
        ]
        if named:
            self.groups.append([name for name, _ in named])
            self.optimizer.add_param_group({"params": [parameter for _, parameter in named]})

    def _resume(self) -> None:
        saved = [self.net.state_dict(), self.optimizer.state_dict()]
        codec_state = None if self.state is None else self.state.state_dict()
        scale = None if self.scaler is None else self.scaler.state_dict()
        self.close()
        self._build()
        self.optimizer = self._new_optimizer()
        self.net.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        if codec_state is not None:
            self.state.load_state_dict(codec_state)
        if scale is not None:
            self.scaler = self._new_scaler()
            self.scaler.load_state_dict(scale)

    def close(self) -> None:
        if self.state is not None:
            self.state.close()

    def step(self, number: int, through: Trainee | None, record: Record) -> None:
        step, rank = self.script.steps[number], dist.get_rank()
        if step.resumes:
            self._resume()
        if step.rewraps is not None:
            self.frozen = tuple(block for block in self.frozen if block not in step.rewraps)
            held = None if self.state is None else self.state.state_dict()
            self._wrap()
            if held is not None:
                self.state.load_state_dict(held)
            for block in step.rewraps:
                self._add_group(self.net.blocks[block])
        if step.adds_group is not None:
            self._add_group(self.net.heads[step.adds_group])
        self._freeze(step.frozen[rank])
        self.ddp.zero_grad(set_to_none=self.script.set_to_none)
        data = torch.Generator().manual_seed(1000 * self.plan.seed + 10 * number + 2 * rank)
        losses = []
        passes = len(step.heads) // 2
        with self._noting(record) if self.lr == 0 else contextlib.nullcontext():
            for index in range(passes):
                last = index == passes - 1
                x = torch.randn(BATCH, self.plan.width, generator=data)
                with contextlib.nullcontext() if last else self.ddp.no_sync():
                    output = self.ddp(x, step.heads[2 * index + rank])
                    if through is not None:
                        output = through.ddp(output, tuple(range(through.script.heads)))
                    loss = (output - x).square().mean()
                    losses.append(loss.detach().clone())
                    if last and step.infinite == rank:
                        loss = loss * float("inf")
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._update(record)
        record.steps.append((*(loss.item().hex() for loss in losses), digest(self.net)))

    @contextlib.contextmanager
    def _noting(self, record: Record) -> Iterator[None]:
        """Adds the norms of this rank's gradients, before they are averaged."""
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()

        def note(name: str) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                record.local[self.number, name] += gradient.double().norm().item() / scale

            return hook

        handles = [
            parameter.register_hook(note(name))
            for name, parameter in self.net.named_parameters()
            if parameter.requires_grad
        ]
        yield
        for handle in handles:
            handle.remove()

    def _sum(self, record: Record) -> None:
        scaled = 1.0 if self.scaler is None else self.scaler.get_scale()
        unscaled = {name for group in self.groups for name in group}
        for name, parameter in self.net.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.double() / (1.0 if name in unscaled else scaled)
            key = self.number, name
            record.types[key] = parameter.dtype
            record.sums[key] = record.sums.get(key, 0.0) + gradient
            record.applied[key] += gradient.norm().item()

    def _update(self, record: Record) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.lr == 0:
            self._sum(record)
        if self.script.clip is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), self.script.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def run(plan: Plan, codec: str | None, lr: float) -> Record:
    """Runs a plan under a codec, or plainly (None). With `lr` 0 gradients depend on no others."""
    record = Record()
    trainees = [Trainee(plan, number, codec, lr) for number in range(len(plan.scripts))]
    for number in range(len(plan.scripts[0].steps)):
        for trainee in trainees:
            through = None
            if plan.adversaries and trainee.number == 0:
                through = trainees[1]
                through.net.requires_grad_(False)
            trainee.step(number, through, record)
    for trainee in trainees:
        if trainee.state is not None:
            held = held_back(trainee.state)
            record.held |= {(trainee.number, name): both for name, both in held.items()}
        trainee.close()
    del trainees
    gc.collect()
    return record
