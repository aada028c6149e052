"""`thalweg bench lab` runs one allreduce through a whole cluster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thalweg_bench import iperf
from thalweg_bench.cluster import Cluster, Shape
from thalweg_bench.rows import Row, count, hosted_bound, make_row, ring_bound, say
from thalweg_bench.torch_import import import_torch

# iperf3 comes first: its rate is that of the following rounds.
_ORDER = ("iperf3", "thalweg", "gloo", "memcpy")
_ROWS = ("thalweg", "gloo", "iperf3", "memcpy")
_TRAINING = ("thalweg", "gloo")  # systems that a job would use, so their cost on a node counts


@dataclass(frozen=True)
class LabCase:
    shape: Shape
    size: int  # bytes of the tensor
    dtype: str
    peers: tuple[str, ...]
    repeats: int

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.dtype}"


@dataclass(frozen=True)
class Outcome:
    rows: list[Row]
    resources: list[dict[str, object]]


def run(case: LabCase) -> Outcome:
    """Runs the case. Raises BenchError, LabError or ServerError."""
    with Cluster(case.shape) as cluster:
        start_workers(cluster, case)
        return measure(cluster, case)


def start_workers(cluster: Cluster, largest: LabCase) -> None:
    """Starts workers that can reduce up to as many bytes as `largest` has."""
    say(f"{count(len(cluster.shards), 'aggregator')}, {count(len(cluster.nodes), 'sidecar')} ready")
    import_torch()
    from thalweg_bench.allreduce import factories, make_pattern
    from thalweg_bench.worker import Worker

    systems = factories(make_pattern(largest.size, largest.dtype))
    cluster.fork(lambda rank: Worker(cluster.lab, cluster.place(rank), systems))
    if "gloo" in largest.peers:
        cluster.call("start_gloo")


def open_systems(cluster: Cluster, case: LabCase) -> None:
    say(f"{case.name}, {case.size} bytes")
    for system in ("thalweg", *case.peers):
        if system != "iperf3":
            cluster.open(system, case.size)


def measure(cluster: Cluster, case: LabCase) -> Outcome:
    open_systems(cluster, case)
    bound = slowest_bound(case)
    order = sorted(("thalweg", *case.peers), key=_ORDER.index)
    usages = {system: cluster.usage() for system in order if system in _TRAINING}

    def once(system: str, repeat: int) -> float:
        if system == "iperf3":
            return measure_iperf3(cluster, case.size)
        return cluster.measure(system, repeat, bound, usages.get(system) if repeat > 0 else None)

    times = run_alternating(order, case.repeats, once)
    cluster.call("close")
    used = usages["thalweg"].report(case.name, round_bytes(case))
    for system, usage in usages.items():
        used.append(usage.per_node(case.name, system, case.size, case.shape.nodes))
    return Outcome(make_rows(case, times), used)


def measure_iperf3(cluster: Cluster, size: int) -> float:
    """Returns how long `size` bytes take from a node to an aggregator, or to the next node."""
    target = (cluster.shards or cluster.nodes[1:])[0]
    goodput = iperf.measure_goodput(cluster.lab, cluster.nodes[0], target)
    return size * 8 / goodput


def run_alternating(
    systems: Sequence[str], repeats: int, measure: Callable[[str, int], float]
) -> dict[str, list[float]]:
    """Measures each system once to warm up, then `repeats` times for its list, in turns."""
    results: dict[str, list[float]] = {system: [] for system in systems}
    for repeat in range(repeats + 1):
        for system in systems:
            seconds = measure(system, repeat)
            turn = f"{repeat}/{repeats}" if repeat else "warm-up"
            say(f"{turn} {system}: {seconds * 1e3:.3f} ms")
            if repeat > 0:
                results[system].append(seconds)
    return results


def slowest_bound(case: LabCase) -> float | None:
    """Returns the slowest bound of all systems at the nominal rate, for the watchdog."""
    bounds = _bounds(case, case.shape.rate).values()
    return max((bound for bound in bounds if bound is not None), default=None)


def make_rows(case: LabCase, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Makes rows. Bounds come from iperf3's rate, else from the nominal one."""
    rate: float | None = case.shape.rate
    if times.get("iperf3"):
        rate = case.size * 8 / statistics.median(times["iperf3"])
    bounds = _bounds(case, rate)
    order = [system for system in _ROWS if system in times]
    return [make_row(case.name, s, case.size, times[s], bounds[s]) for s in order]


def _bounds(case: LabCase, rate: float | None) -> dict[str, float | None]:
    shape = case.shape
    return {
        "thalweg": shape.exchange_bound(case.size, rate),
        "gloo": ring_bound(case.size, rate, shape.ranks, shape.nodes),
        "iperf3": None if shape.rate is None else case.size * 8 / shape.rate,
        "memcpy": None,
    }


def round_bytes(case: LabCase) -> dict[str, float]:
    """Returns the payload in and out of one process in one round."""
    shape = case.shape
    if shape.local:
        # At one byte per second the bound in seconds is what the busiest node carries in bytes.
        carried = hosted_bound(case.size, 8, shape.nodes, shape.shards) or 0.0
        return {"aggregator": 2 * carried, "sidecar": 2 * carried, "worker": 2 * case.size}
    return {
        # Every node sends its share of the wire bytes to each shard and receives as many.
        "aggregator": 2 * shape.nodes * case.size / max(1, shape.shards),
        # In embedded mode nothing leaves the sidecar: what its workers submit and receive counts.
        "sidecar": 2 * (case.size if shape.shards else case.size * shape.workers),
        "worker": 2 * case.size,
    }
