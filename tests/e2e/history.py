"""Checks histories of pushes and pulls: what workers of apart_jobs.py and shards have recorded.

A shard's trace says in which order it has updated each chunk of weights, and by which push of which
node. The checker computes the weights again from what the workers have pushed, in that order, and
demands that each push has been applied once, that nobody has been given other weights than these,
and that no gradient was computed with older ones than it may be.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from thalweg import optim
from thalweg.timeline import files

Key = tuple[int, int]  # bucket and chunk


@dataclasses.dataclass(frozen=True)
class Update:
    """What a shard has done to a chunk."""

    version: int  # of the weights after it
    round: int
    node: int  # whose push it was; -1: all have pushed
    elements: int
    pushes: tuple[tuple[int, int], ...] = ()  # of a quorum: node and step of each


@dataclasses.dataclass
class Worker:
    """The only worker of a node, in elements of a chunk."""

    pushed: dict[int, np.ndarray]  # by step
    got: dict[int, np.ndarray]


class Sgd:
    """SGD with momentum as docs/optim.md has it: each sum of a product is rounded once."""

    def __init__(self, weights: np.ndarray, lr: float, momentum: float) -> None:
        self.weights = weights.copy()
        self._lr, self._momentum = lr, np.float32(momentum)
        self._buffer: np.ndarray | None = None

    def add(self, gradient: np.ndarray, staleness: int = 0) -> None:
        """Takes a step, whose rate is divided by the staleness if that is above 1."""
        buffer = self._buffer
        self._buffer = gradient if buffer is None else _fma(buffer, self._momentum, gradient)
        rate = np.float32(self._lr / max(staleness, 1))
        self.weights = _fma(self._buffer, -rate, self.weights)


class AdamW:
    """The fused AdamW of a worker."""

    def __init__(self, weights: np.ndarray, **options: float) -> None:
        self._tensor = torch.nn.Parameter(torch.from_numpy(weights.copy()))
        self._optimizer = optim.FusedAdamW([self._tensor], **options)

    def add(self, gradient: np.ndarray, staleness: int = 0) -> None:
        assert not staleness
        self._tensor.grad = torch.from_numpy(gradient.copy())
        self._optimizer.step()

    @property
    def weights(self) -> np.ndarray:
        return self._tensor.detach().numpy().copy()


def _fma(a: np.ndarray, b: np.float32, c: np.ndarray) -> np.ndarray:
    wide = np.longdouble
    return (a.astype(wide) * wide(b) + c.astype(wide)).astype(np.float32)


def check(
    begin: np.ndarray,
    workers: Sequence[Worker],
    updates: Sequence[Update],
    fold: Sgd | AdamW,
    *,
    ahead: int | None,
    delay_aware: bool = False,
) -> list[str]:
    """Returns what is wrong with the history of a chunk whose nodes could be so many steps `ahead`;
    None: each push is an update, which counts less the staler it is if `delay_aware`.
    """
    updates = sorted(updates, key=lambda update: update.version)
    problems = [
        f"update {number} makes version {update.version}"
        for number, update in enumerate(updates, start=1)
        if update.version != number
    ]
    versions = [begin]
    of_push: dict[tuple[int, int], int] = {}
    for update, stale in zip(updates, staleness(updates), strict=True):
        gradients = []
        for node, step in _pushes_of(update, ahead, len(workers)):
            if (node, step) in of_push:
                problems.append(f"step {step} of node {node} is applied twice")
            of_push[node, step] = update.version
            if step not in workers[node].pushed:
                return [*problems, f"node {node} has not pushed step {step}"]
            gradients.append(workers[node].pushed[step])
        mean = sum(gradients[1:], gradients[0]) / np.float32(len(gradients))
        fold.add(mean, stale if delay_aware else 0)
        versions.append(fold.weights)
    for node, worker in enumerate(workers):
        if any(update.pushes for update in updates):
            problems += _check_quorum(node, worker, versions, of_push)
        else:
            problems += _check_gotten(node, worker, versions, of_push, ahead)
    return problems


def _check_quorum(
    node: int,
    worker: Worker,
    versions: Sequence[np.ndarray],
    of_push: Mapping[tuple[int, int], int],
) -> Iterator[str]:
    """A node gets the weights of the update that has its push, or older ones, if it came late; but
    none that are older than what it had.
    """
    last = 0
    for step, got in sorted(worker.got.items()):
        most = of_push.get((node, step), len(versions) - 1)
        found = [v for v in range(last, most + 1) if np.array_equal(versions[v], got)]
        if not found:
            yield f"node {node} got weights in step {step} that no update from {last} to {most} has"
            continue
        last = found[-1]


def _pushes_of(update: Update, ahead: int | None, world: int) -> Sequence[tuple[int, int]]:
    """Returns the node and the step of each push that the update has, in the order of nodes."""
    if update.pushes or ahead is None:
        return update.pushes or [(update.node, update.round)]
    return [(node, update.round) for node in range(world)]


def _check_gotten(
    node: int,
    worker: Worker,
    versions: Sequence[np.ndarray],
    of_push: Mapping[tuple[int, int], int],
    ahead: int | None,
) -> Iterator[str]:
    last = 0
    for step, got in sorted(worker.got.items()):
        version = of_push.get((node, step), -1)
        if ahead is None and version < 0:
            yield f"step {step} of node {node} is not applied"
            continue
        candidates = [version] if ahead is None else range(last, len(versions))
        found = [v for v in candidates if v < len(versions) and np.array_equal(versions[v], got)]
        if not found:
            yield f"node {node} got weights in step {step} that no fold of pushes has"
            continue
        if found[0] < last:
            yield f"node {node} got older weights in step {step}"
        last = found[0]
        if ahead is not None and step - last > ahead:
            yield f"node {node} was {step - last} steps ahead in step {step}"


def staleness(updates: Sequence[Update]) -> list[int]:
    """Returns how many updates by others lie between each push and its node's one before."""
    last: dict[int, int] = {}
    stale = []
    for update in sorted(updates, key=lambda each: each.version):
        stale.append(update.version - 1 - last.get(update.node, 0))
        last[update.node] = update.version
    return stale


def updates_in(traces: Path) -> dict[Key, list[Update]]:
    """Returns what the shards' traces say, by chunk."""
    found: dict[Key, list[Update]] = {}
    for path in files.find([traces]):
        for event in files.read(path).events:
            args = event.get("args", {})
            if event.get("name") != "update" or "version" not in args:
                continue
            update = Update(
                *(args["version"], args["part_round"], args.get("last_node", -1)),
                args["raw_bytes"] // 4,
                tuple(tuple(map(int, push.split(":"))) for push in args.get("pushes", "").split()),
            )
            found.setdefault((args["bucket"], args["chunk"]), []).append(update)
    return found


def check_records(
    records: Path, traces: Path, world: int, kind: str, options: Mapping[str, float], **how: int
) -> tuple[list[str], dict[Key, list[Update]]]:
    """Checks all chunks of a job with one worker on each node; returns the problems, and what the
    shards have done. `how` goes to check(); without it, each push is an update.
    """
    updates = updates_in(traces)
    begin = torch.load(records / "0.begin.pt")
    problems = []
    for bucket, names in enumerate(begin["buckets"]):
        before = _flat(begin["weights"], names)
        workers = [_read(records, rank, names) for rank in range(world)]
        chunks = sorted(key for key in updates if key[0] == bucket)
        ends = list(itertools.accumulate(updates[key][0].elements for key in chunks))
        if not ends or ends[-1] != len(before):
            problems.append(f"bucket {bucket} has {len(before)} elements, updates end at {ends}")
            continue
        for key, first, end in zip(chunks, [0, *ends], ends, strict=False):
            part = slice(first, end)
            cut = [_cut(worker, part) for worker in workers]
            fold = (Sgd if kind == "sgd" else AdamW)(before[part], **options)
            found = check(before[part], cut, updates[key], fold, **{"ahead": None} | how)
            problems += [f"bucket {key[0]}, chunk {key[1]}: {each}" for each in found]
    return problems, updates


def _read(records: Path, rank: int, names: Sequence[str]) -> Worker:
    worker = Worker({}, {})
    for path in records.glob(f"{rank}.got*.pt"):
        got = _load(path)
        if got is not None:
            worker.got[int(path.name.split(".")[1][3:])] = _flat(got, names)
    steps = {int(path.name.split(".")[1][6:]) for path in records.glob(f"{rank}.pushed*.pt")}
    for step in steps:
        pushed = [_load(records / f"{rank}.pushed{step}.{name}.pt") for name in names]
        if all(each is not None for each in pushed):
            worker.pushed[step] = _flat(dict(zip(names, pushed, strict=True)), names)
    return worker


def _load(path: Path) -> torch.Tensor | dict[str, torch.Tensor] | None:
    """Returns None for what a worker that was killed has not written to its end."""
    try:
        return torch.load(path)
    except (OSError, RuntimeError, EOFError):
        return None


def _flat(named: Mapping[str, torch.Tensor], names: Sequence[str]) -> np.ndarray:
    return torch.cat([named[name].flatten() for name in names]).numpy()


def _cut(worker: Worker, part: slice) -> Worker:
    return Worker(
        {step: each[part] for step, each in worker.pushed.items()},
        {step: each[part] for step, each in worker.got.items()},
    )
