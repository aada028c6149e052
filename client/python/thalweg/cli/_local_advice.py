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
