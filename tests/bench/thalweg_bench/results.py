"""Defines what a suite has measured, and its targets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from thalweg_bench.rows import BenchError, Row

NODES = (2, 4, 8, 16)  # of the cases that show how time grows with them
RESNET_BYTES = 102_228_128  # of its gradients in fp32
MEMORY_NODES, WINDOW_CHUNKS, CHUNK_BYTES = 4, 16, 256 << 10  # of the case `memory`
_BASE_MB = 64.0  # for a server that holds no gradients
_EQUAL_SENT = 1.02  # acknowledgements and heartbeats are sent separately

Measured = tuple[str, bool | None]  # the text, and whether the target is met; None: only reported
# A case, its target, and what measures it; that raises LookupError where rows are missing.
Target = tuple[str, str, "Callable[[Results], Measured]"]


@dataclass
class Results:
    """Rows and resources by the suite's cases; cases not measured are missing."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    resources: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, names: Sequence[str]) -> Results:
        """Reads what a suite left in a folder. Raises BenchError."""
        found = cls()
        for name in names:
            path, used = folder / f"{name}.json", folder / f"{name}.resources.json"
            try:
                if path.exists():
                    entries = json.loads(path.read_text(encoding="utf-8"))
                    found.rows[name] = [Row(**entry) for entry in entries]
                if used.exists():
                    found.resources[name] = list(json.loads(used.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise BenchError(f"{name} is not what a suite left: {error}; delete it") from None
        return found

    def row(self, name: str, system: str, ending: str = "") -> Row:
        """Returns the first row of a system whose case has that ending. Raises LookupError."""
        for row in self.rows[name]:
            if row.system == system and row.case.endswith(ending):
                return row
        raise LookupError(f"{name} has no row of {system} … {ending}")

    def used(self, name: str, process: str, key: str, ending: str = "") -> float:
        """Returns a figure of a process, such as "aggregator max", whose case has that ending.
        Raises LookupError.
        """
        for entry in self.resources[name]:
            if entry["process"] == process and str(entry["case"]).endswith(ending):
                return float(entry[key])
        raise LookupError(f"{name} has no entry of {process} … {ending}")


def of_bound(name: str, least: float, found: Results) -> Measured:
    row = found.row(name, "thalweg")
    share = (row.bound_s or 0.0) / row.median_s
    return f"{share:.3f}", share >= least


def versus(name: str, peer: str, least: float, found: Results, ending: str = "") -> Measured:
    times = found.row(name, peer, ending).median_s / found.row(name, "thalweg", ending).median_s
    return f"{times:.2f}x", times >= least


def fold(program: str, benchmark: str, memcpy: str, found: Results) -> Measured:
    """Compares bytes per second, read and written."""
    ours = found.row("micro", "thalweg", f"{program}/{benchmark}")
    copy = found.row("micro", "memcpy", f"{program}/{memcpy}")
    share = (ours.bytes / ours.median_s) / (copy.bytes / copy.median_s)
    return f"{share:.2f}", share >= 0.7


def latency(percentile: str, most: float | None, found: Results) -> Measured:
    ours, gloo = (found.row("latency", s, percentile).median_s for s in ("thalweg", "gloo"))
    text = f"{ours * 1e3:.2f} ms (Gloo {gloo * 1e3:.2f} ms)"
    return text, None if most is None else ours <= most


def bytes_leaving(found: Results) -> Measured:
    two = found.used("allreduce-4x2workers-250mbit", "sidecar max", "sent_mb")
    one = found.used("allreduce-4x250mbit", "sidecar max", "sent_mb")
    text = f"{two:.1f} MB with 2 workers, {one:.1f} MB with 1"
    return text, max(one / two, two / one) <= _EQUAL_SENT


def flat(found: Results) -> Measured:
    medians = [found.row(f"scale-{nodes}", "thalweg").median_s for nodes in NODES]
    listed = ", ".join(f"{median:.3f}" for median in medians)
    ratio = max(medians) / min(medians)
    return f"{ratio:.3f}x ({listed} s)", ratio <= 1.10


def shard_cpu(found: Results) -> Measured:
    used = found.used("fp16-4x1gbit", "aggregator max", "cpu_s_per_gb")
    return f"{used:.2f}", used <= 1.5


def memory(process: str, most: float, found: Results) -> Measured:
    used = found.used("memory", process, "rss_mb")
    return f"{used:.1f} MB", used <= most


def growth(process: str, found: Results) -> Measured:
    steps = ("steps 1 to 1000", "steps 1001 to 10000")
    early, late = (found.used("soak", process, "rss_mb", ending) for ending in steps)
    return f"{late / early:.3f}x ({early:.1f} → {late:.1f} MB)", late / early <= 1.05


def targets() -> list[Target]:
    found: list[Target] = []
    for name, rate, nodes, share, gloo in (
        ("allreduce-4x250mbit", "250 Mbit/s", 4, 0.95, 1.42),
        ("allreduce-4x500mbit", "500 Mbit/s", 4, 0.95, 1.42),
        ("allreduce-4x1gbit", "1 Gbit/s", 4, 0.95, 1.42),
        ("allreduce-4x2gbit", "2 Gbit/s", 4, 0.85, None),
        ("allreduce-8x100mbit", "100 Mbit/s", 8, 0.93, 1.63),
    ):
        case = f"102 MB fp32 allreduce, {nodes} nodes + {nodes} shards, {rate}"
        found.append((case, f"≥ {share} of size/rate", partial(of_bound, name, share)))
        if gloo is not None:
            found.append((case, f"≥ {gloo}x Gloo", partial(versus, name, "gloo", gloo)))
    step, apart = (
        "communication of a DDP step of ResNet-50",
        partial(versus, ending="communication"),
    )
    fp16, fp32 = ("step-resnet50", "torch-fp16", 1.4), ("step-4x2workers-fp32", "ddp", 1.6)
    two, four = (partial(versus, f"local-{workers}workers", "gloo") for workers in (2, 4))
    of_copy = "≥ 0.7 of memcpy's bytes/s"
    in_memory = partial(fold, "reduce_bench", "BM_FoldMean/fp16/4/8388608", "BM_Memcpy/33554432")
    in_cache = partial(fold, "codec_bench", "BM_FoldPayloads/fp16/4/8192", "BM_Memcpy")
    found += [
        (f"{step}, fp16, 4 nodes", "≥ 1.4x torch's fp16 hook over Gloo", partial(apart, *fp16)),
        (f"{step}, fp32, 4 nodes x 2 workers", "≥ 1.6x DDP over Gloo", partial(apart, *fp32)),
        ("bytes leaving a node in an allreduce of 102 MB", "as with 1 worker", bytes_leaving),
        ("102 MB, one machine, 2 workers", "≥ 1.0x Gloo", partial(two, 1.0)),
        ("102 MB, one machine, 4 workers", "≥ 1.3x Gloo", partial(four, 1.3)),
        ("fold of 4 inputs fp16 → fp32 → fp16, one core, in memory", of_copy, in_memory),
        ("the same in cache, as pieces of 8 KiB", of_copy, in_cache),
        ("CPU-seconds per GB at a shard, fp16, 1 Gbit/s", "≤ 1.5", shard_cpu),
        ("allreduce of 12 MB, 2 to 16 nodes and shards, 50 Mbit/s", "within 1.10x", flat),
        ("4 KiB allreduce, 4 nodes, unshaped, p50", "≤ 1 ms", partial(latency, "p50", 1e-3)),
        ("the same, p99", "reported", partial(latency, "p99", None)),
    ]
    for kind, process, what, megabytes in (
        ("shard", "aggregator max", "N·window·chunk", MEMORY_NODES * WINDOW_CHUNKS * CHUNK_BYTES),
        ("sidecar", "sidecar max", "bytes in flight", 2 * RESNET_BYTES),
    ):
        most = _BASE_MB + megabytes / 1e6
        bound, grows = (
            f"≤ 64 MB + {what} = {most:.1f} MB",
            f"memory of a {kind}, 1 000 to 10 000 steps",
        )
        found += [
            (f"peak resident memory of a {kind}", bound, partial(memory, process, most)),
            (grows, "≤ 1.05x", partial(growth, process)),
        ]
    return found
