"""Says how seldom workers have to exchange what they have changed, for a link to hold up nobody."""

from __future__ import annotations

import math

LOST = 0.05  # of the time, for which workers may wait for exchanges


def exchange_seconds(bytes_up: float, bytes_down: float, nodes: int, rate: float) -> float:
    """Returns what an exchange takes: of so many bytes each way, with shards in the sidecars of all
    nodes, whose links carry `rate` bits per second.
    """
    return 8 * (bytes_up + bytes_down) * (nodes - 1) / nodes / rate


def least_every(exchange: float, step: float, lost: float = LOST) -> int:
    """Returns after how many steps of `step` seconds to exchange, so that workers lose at most that
    share of the time.
    """
    return max(1, math.ceil(exchange * (1 - lost) / (lost * step)))


def describe(model_bytes: float, step: float, nodes: int, rate: float) -> str:
    """Returns what exchanges of the whole model mean for steps of so many seconds."""
    if nodes == 1:
        return "all workers are on one node, where no exchange crosses a link"
    exchange = exchange_seconds(model_bytes, model_bytes, nodes, rate)
    text = (
        f"steps took {step:.3g} s here; to exchange {model_bytes / 1e6:.3g} MB takes "
        f"{exchange:.3g} s with {nodes} nodes at {rate / 1e6:.3g} Mbit/s"
    )
    if (every := least_every(exchange, step)) == 1:
        return f"{text}, which every step may do"
    return (
        f"{text}: without a codec that is {exchange / step:.3g} times a step, and local updates "
        f"(thalweg.ps.LocalOptimizer) with every={every} lose {LOST:.0%} of the time"
    )
