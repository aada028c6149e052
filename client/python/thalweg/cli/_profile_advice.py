"""Says what would shorten the steps of a training, from what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from thalweg.cli._local_advice import LOST, exchange_seconds, least_every
from thalweg.cli._profile_exchange import Exchange
from thalweg.codecs import FP16, FP32, Codec, Int8, PowerSGD

# Seconds that a sidecar computes for each byte of gradients, on one core
# (docs/measurements/compression.md).
_COMPUTE = {"fp32": 0.1e-9, "fp16": 0.1e-9, "int8": 0.26e-9, "powersgd": 0.5e-9}
_INT8_RATIO = 0.256  # of fp32, scales included
_CANDIDATES: Mapping[str, Codec] = {
    "fp32 through Thalweg": FP32(),
    "fp16": FP16(),
    "int8": Int8(),
    "powersgd rank 4": PowerSGD(rank=4),
}
_WORTHWHILE = 0.05  # of a step
_DATA_IS_LATE = 0.05
_TOO_SLOW = 0.25  # of a step: a wait that is worth another way of training


@dataclass(frozen=True)
class Tensor:
    """A gradient: its shape, and the bytes of an element."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Measured:
    """A training as it was measured, on all workers."""

    phases: Mapping[str, float]  # seconds per step, mean over the workers
    straggling: float  # seconds per step for which the mean worker waits for the slowest
    gradients: Sequence[Tensor]
    workers: int
    nodes: int
    rate: float | None  # of a node's link, bits per second; None: there is one node
    exchange: Exchange
    sent_bytes: float  # per step and node, by Thalweg
    optimizers: Sequence[str]
    fused_update: float | None = None  # seconds of a fused step; None: they cannot be fused

    @property
    def step(self) -> float:
        return sum(self.phases.values())

    def share(self, phase: str) -> float:
        return self.phases[phase] / self.step


def at_rate(measured: Measured, rate: float) -> Measured:
    """Returns what would be measured with links of that rate, if backward() hides all it can; only
    the rate differs where no gradients are averaged.
    """
    if not measured.exchange.averages:
        return replace(measured, rate=rate)
    exchange = link_bytes(measured) * 8 / rate
    wait = measured.straggling + max(0.0, exchange - measured.phases["backward"])
    return replace(measured, phases={**measured.phases, "wait": wait}, rate=rate)


def wire_bytes(codec: Codec, gradients: Sequence[Tensor]) -> float:
    """Returns the bytes to which a codec encodes the gradients of one node."""
    if isinstance(codec, PowerSGD):
        return sum(_factor_bytes(codec, gradient) for gradient in gradients)
    if isinstance(codec, Int8):
        return _INT8_RATIO * 4 * sum(math.prod(g.shape) for g in gradients)
    if isinstance(codec, FP16):
        return 2.0 * sum(math.prod(g.shape) for g in gradients)
    return float(sum(gradient.bytes for gradient in gradients))


def link_bytes(measured: Measured) -> float:
    """Returns the bytes that a node's link carries now in each step and direction."""
    if measured.exchange.codec or not measured.exchange.averages:
        return measured.sent_bytes
    ring = 2 * (measured.workers - 1) / measured.workers
    return ring * sum(gradient.bytes for gradient in measured.gradients)


def predicted_wait(measured: Measured, codec: Codec) -> float:
    """Returns the seconds for which a step would wait for gradients.

    It waits as long as now for slow workers, and for what the link does not explain. What
    backward() hides of the exchange now, it hides then, but not the time for which the codec
    computes.
    """
    assert measured.rate is not None
    now = link_bytes(measured) * 8 / measured.rate
    exposed = measured.phases["wait"] - measured.straggling
    hidden, unexplained = max(0.0, now - exposed), max(0.0, exposed - now)
    # The nodes' sidecars host the shards.
    encoded = wire_bytes(codec, measured.gradients)
    exchange = 2 * (measured.nodes - 1) / measured.nodes * encoded * 8 / measured.rate
    compute = _COMPUTE[codec.name] * sum(gradient.bytes for gradient in measured.gradients)
    return measured.straggling + unexplained + compute + max(0.0, exchange - hidden)


def advise(measured: Measured) -> list[str]:
    """Returns advice, the most effective first; what helps with less than 5 % is left out."""
    advice = _about_data(measured)
    if measured.exchange.averages:
        advice += [*_about_communication(measured), *_about_update(measured)]
        advice.sort(reverse=True)
        advice += _about_local_updates(measured)
    if not advice:
        largest = max(measured.phases, key=lambda phase: measured.phases[phase])
        more = "" if measured.exchange.averages else " more"
        return [
            f"{largest} {measured.share(largest):.0%}: nothing{more} that Thalweg does would help"
        ]
    return [text for _, text in advice]


def _about_communication(measured: Measured) -> list[tuple[float, str]]:
    share = measured.share("wait")
    if share < _WORTHWHILE or measured.workers == 1:
        return []
    if measured.rate is None:
        text = f"communication {share:.0%}: all workers are on one node, where no codec helps"
        return [(0.0, text)]
    savings = {
        name: (measured.phases["wait"] - predicted_wait(measured, codec)) / measured.step
        for name, codec in _CANDIDATES.items()
        if codec.name != measured.exchange.codec.partition(":")[0]
    }
    best = max(savings, key=lambda name: savings[name])
    rate = f"{measured.rate / 1e6:.3g} Mbit/s"
    if savings[best] < _WORTHWHILE:
        text = f"communication {share:.0%}: no other codec would save 5 % at {rate}"
        return [(0.0, text)]
    text = f"communication {share:.0%}: {best} would save {savings[best]:.0%} at {rate}"
    # A codec that changes less is worth a mention where it saves almost as much.
    for name, saving in savings.items():
        if name != best and saving > 0.8 * savings[best]:
            text += f" ({name}: {saving:.0%})"
            break
    return [(savings[best], text)]


def _about_local_updates(measured: Measured) -> list[tuple[float, str]]:
    """Speaks of exchanges every so many steps where no codec makes one in each fast enough."""
    if measured.rate is None or not measured.gradients:
        return []
    codecs = [wire_bytes(codec, measured.gradients) for codec in _CANDIDATES.values()]
    fastest = min(exchange_seconds(one, one, measured.nodes, measured.rate) for one in codecs)
    left = max(0.0, fastest - measured.phases["backward"])
    busy = measured.step - measured.phases["wait"] + measured.straggling
    if left < _TOO_SLOW * (busy + left):
        return []
    model = sum(gradient.bytes for gradient in measured.gradients)
    every = least_every(exchange_seconds(model, model, measured.nodes, measured.rate), busy)
    text = (
        f"no codec leaves less than {left / (busy + left):.0%} of a step to communication: "
        f"thalweg.ps.LocalOptimizer with every={every} leaves {LOST:.0%}, by training differently "
        "(docs/parameter-server.md)"
    )
    return [(0.0, text)]


def _about_data(measured: Measured) -> list[tuple[float, str]]:
    share = measured.share("data")
    if share < _DATA_IS_LATE:
        return []
    return [
        (
            share,
            f"data {share:.0%}: more num_workers of the DataLoader, and "
            f"thalweg.data.DevicePrefetcher, would save up to {share:.0%}",
        )
    ]


def _about_update(measured: Measured) -> list[tuple[float, str]]:
    if measured.fused_update is None:
        return []
    saving = (measured.phases["optimizer"] - measured.fused_update) / measured.step
    if saving < _WORTHWHILE:
        return []
    text = (
        f"optimizer {measured.share('optimizer'):.0%}: THALWEG_FUSED_OPTIMIZER=1, which runs "
        f"torch's SGD, Adam and AdamW in one pass, would save {saving:.0%}"
    )
    return [(saving, text)]


def _factor_bytes(codec: PowerSGD, gradient: Tensor) -> int:
    """Returns the bytes of a gradient's factors, or of itself where they would be too large."""
    if len(gradient.shape) > 1:
        rows, columns = gradient.shape[0], math.prod(gradient.shape[1:])
        rank = min(rows, columns, codec.rank)
        if (rows + columns) * rank * codec.min_compression_rate < rows * columns:
            return 4 * (rows + columns) * rank
    return gradient.bytes
