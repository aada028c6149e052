"""Defines the targets and compares them with the measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from thalweg_bench.results import Results
from thalweg_bench.suite_cases import (
    MEMORY_CHUNK_BYTES,
    MEMORY_NODES,
    MEMORY_WINDOW_CHUNKS,
    MICRO,
    RESNET_BYTES,
)

_BASE_MB = 64.0  # for a server that holds no gradients
_FLAT = 1.10
_EQUAL_SENT = 1.02  # acknowledgements and heartbeats are sent separately
_STABLE = 1.05


@dataclass(frozen=True)
class Measured:
    text: str
    met: bool | None  # None: only reported


@dataclass(frozen=True)
class Target:
    case: str
    target: str
    measure: Callable[[Results], Measured | None]  # None: not measured


def of_bound(results: Results, name: str, least: float) -> Measured | None:
    row = results.find(name, "thalweg")
    if row is None or row.bound_s is None:
        return None
    share = row.bound_s / row.median_s
    return Measured(f"{share:.3f}", share >= least)


def versus(
    results: Results, name: str, peer: str, least: float, ending: str = ""
) -> Measured | None:
    ours, theirs = results.find(name, "thalweg", ending), results.find(name, peer, ending)
    if ours is None or theirs is None:
        return None
    times = theirs.median_s / ours.median_s
    return Measured(f"{times:.2f}x", times >= least)


def bytes_leaving(results: Results) -> Measured | None:
    two = results.used("allreduce-4x2workers-250mbit", "sidecar max")
    one = results.used("allreduce-4x250mbit", "sidecar max")
    if one is None or two is None:
        return None
    ratio = two["sent_mb"] / one["sent_mb"]
    text = f"{two['sent_mb']:.1f} MB with 2 workers, {one['sent_mb']:.1f} MB with 1"
    return Measured(text, max(ratio, 1 / ratio) <= _EQUAL_SENT)


def fold(results: Results, benchmark: str, memcpy: str, least: float) -> Measured | None:
    """Returns bytes per second, read and written."""
    ours = results.find(MICRO, "thalweg", benchmark)
    copy = results.find(MICRO, "memcpy", memcpy)
    if ours is None or copy is None:
        return None
    share = (ours.bytes / ours.median_s) / (copy.bytes / copy.median_s)
    return Measured(f"{share:.2f}", share >= least)


def shard_cpu(results: Results, most: float) -> Measured | None:
    used = results.used("fp16-4x1gbit", "aggregator max")
    if used is None:
        return None
    return Measured(f"{used['cpu_s_per_gb']:.2f}", used["cpu_s_per_gb"] <= most)


def flat(results: Results) -> Measured | None:
    rows = [row for row in results.rows.get("scale", ()) if row.system == "thalweg"]
    if not rows:
        return None
    medians = [row.median_s for row in rows]
    listed = ", ".join(f"{row.median_s:.3f}" for row in rows)
    ratio = max(medians) / min(medians)
    return Measured(f"{ratio:.3f}x ({listed} s)", ratio <= _FLAT)


def latency(results: Results, percentile: str, most: float | None) -> Measured | None:
    ours = results.find("latency", "thalweg", percentile)
    gloo = results.find("latency", "gloo", percentile)
    if ours is None or gloo is None:
        return None
    text = f"{ours.median_s * 1e3:.2f} ms (Gloo {gloo.median_s * 1e3:.2f} ms)"
    return Measured(text, None if most is None else ours.median_s <= most)


def shard_memory_mb() -> float:
    """Returns 64 MB + N·window·chunk."""
    return _BASE_MB + MEMORY_NODES * MEMORY_WINDOW_CHUNKS * MEMORY_CHUNK_BYTES / 1e6


def sidecar_memory_mb() -> float:
    """Returns 64 MB + what its worker has submitted and receives."""
    return _BASE_MB + 2 * RESNET_BYTES / 1e6


def memory(results: Results, process: str, most: float) -> Measured | None:
    used = results.used("memory", process)
    return None if used is None else Measured(f"{used['rss_mb']:.1f} MB", used["rss_mb"] <= most)


def growth(results: Results, process: str) -> Measured | None:
    early = results.used("soak", process, "steps 1 to 1000")
    late = results.used("soak", process, "steps 1001 to 10000")
    if early is None or late is None:
        return None
    ratio = late["rss_mb"] / early["rss_mb"]
    text = f"{ratio:.3f}x ({early['rss_mb']:.1f} → {late['rss_mb']:.1f} MB)"
    return Measured(text, ratio <= _STABLE)


def _allreduce(name: str, where: str, share: float, gloo: float | None) -> list[Target]:
    case = f"102 MB fp32 allreduce, {where}"
    targets = [Target(case, f"≥ {share} of size/rate", partial(of_bound, name=name, least=share))]
    if gloo is not None:
        measure = partial(versus, name=name, peer="gloo", least=gloo)
        targets.append(Target(case, f"≥ {gloo}x Gloo", measure))
    return targets


def _step(name: str, where: str, peer: str, said: str, least: float) -> Target:
    measure = partial(versus, name=name, peer=peer, least=least, ending=" communication")
    return Target(f"communication of a DDP step, {where}", f"≥ {least}x {said}", measure)


def _local(workers: int, least: float) -> Target:
    measure = partial(versus, name=f"local-{workers}workers", peer="gloo", least=least)
    return Target(f"102 MB, one machine, {workers} workers", f"≥ {least}x Gloo", measure)


def _fold(where: str, program: str, benchmark: str, memcpy: str) -> Target:
    ours, copy = f"{program}/{benchmark}", f"{program}/{memcpy}"
    measure = partial(fold, benchmark=ours, memcpy=copy, least=0.7)
    case = f"fold of 4 inputs fp16 → fp32 → fp16, one core, {where}"
    return Target(case, "≥ 0.7 of memcpy's bytes/s there", measure)


def targets() -> list[Target]:
    return [*_exchange_targets(), *_machine_targets(), *_memory_targets()]


def _exchange_targets() -> list[Target]:
    return [
        *_allreduce("allreduce-4x250mbit", "4 nodes + 4 shards, 250 Mbit/s", 0.95, 1.42),
        *_allreduce("allreduce-4x500mbit", "4 nodes + 4 shards, 500 Mbit/s", 0.95, 1.42),
        *_allreduce("allreduce-4x1gbit", "4 nodes + 4 shards, 1 Gbit/s", 0.95, 1.42),
        *_allreduce("allreduce-4x2gbit", "4 nodes + 4 shards, 2 Gbit/s", 0.85, None),
        *_allreduce("allreduce-8x100mbit", "8 nodes + 8 shards, 100 Mbit/s", 0.93, 1.63),
        _step(
            "step-resnet50",
            "ResNet-50 shapes, fp16, 4 nodes, 250 Mbit/s",
            "torch-fp16",
            "torch's fp16 hook over Gloo",
            1.4,
        ),
        _step(
            "step-4x2workers-fp32",
            "ResNet-50 shapes, fp32, 4 nodes x 2 workers, 250 Mbit/s",
            "ddp",
            "DDP over Gloo",
            1.6,
        ),
        Target(
            "bytes leaving a node in one allreduce of 102 MB", "as with 1 worker", bytes_leaving
        ),
    ]


def _machine_targets() -> list[Target]:
    return [
        _local(2, 1.0),
        _local(4, 1.3),
        _fold("in memory", "reduce_bench", "BM_FoldMean/fp16/4/8388608", "BM_Memcpy/33554432"),
        _fold(
            "in cache, as pieces of 8 KiB",
            "codec_bench",
            "BM_FoldPayloads/fp16/4/8192",
            "BM_Memcpy",
        ),
        Target(
            "CPU-seconds per GB at a shard, fp16, 1 Gbit/s", "≤ 1.5", partial(shard_cpu, most=1.5)
        ),
        Target("allreduce of 12 MB, 2 to 16 nodes and shards, 50 Mbit/s", "within 1.10x", flat),
        Target(
            "4 KiB allreduce, 4 nodes, unshaped, p50",
            "≤ 1 ms",
            partial(latency, percentile="p50", most=1e-3),
        ),
        Target("the same, p99", "reported", partial(latency, percentile="p99", most=None)),
    ]


def _memory_targets() -> list[Target]:
    shard, sidecar = shard_memory_mb(), sidecar_memory_mb()
    return [
        Target(
            "peak resident memory of a shard",
            f"≤ 64 MB + N·window·chunk = {shard:.1f} MB",
            partial(memory, process="aggregator max", most=shard),
        ),
        Target(
            "peak resident memory of a sidecar",
            f"≤ 64 MB + bytes in flight = {sidecar:.1f} MB",
            partial(memory, process="sidecar max", most=sidecar),
        ),
        Target(
            "memory of a shard from 1 000 to 10 000 steps",
            "≤ 1.05x",
            partial(growth, process="aggregator max"),
        ),
        Target(
            "memory of a sidecar from 1 000 to 10 000 steps",
            "≤ 1.05x",
            partial(growth, process="sidecar max"),
        ),
    ]
