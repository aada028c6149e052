"""Defines rates of links, and the token bucket that produces them."""

from __future__ import annotations

import re

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MIN_RATE, _MAX_RATE = 10**6, 100 * 10**9

# Bridge, bucket and timers cost the cores, which a real link would leave to its ends, for each
# packet that the kernel has not yet cut into MTU-sized ones. At high rates packets may therefore be
# larger than the usual 64 KiB, up to 0.8 ms of the link: 4 links of 2 Gbit/s, full in both
# directions, take 0.96 instead of 1.55 cores.
_MIN_PACKET_BYTES = 64 << 10
_MAX_PACKET_BYTES = 192 << 10
_PACKET_SECONDS = 0.0008
# A packet larger than the bucket is cut into MTU-sized ones, which loses the advantage of GSO: two
# must fit, so that one can be sent while the next one's tokens arrive.
_BURST_PACKETS = 2
# A late timer on busy cores may lose this much. tbf has a timer of its own, so rate/HZ is not
# needed.
_BURST_SECONDS = 0.001
# The queue is that of a cheap switch's port: long enough for flows that meet there to keep it busy.
_QUEUE_SECONDS = 0.040
_MIN_QUEUE_BYTES = 640 << 10  # ten GSO packets


def parse_rate(text: str) -> int | None:
    """Returns the bits per second of "250mbit" or "1gbit"; None for "none". Raises ValueError."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text)
    rate = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise ValueError(
            f"the rate is {text!r}, expected 'none' or a number with kbit, mbit or gbit, "
            "from 1mbit to 100gbit"
        )
    return rate


def format_rate(rate: int | None) -> str:
    """Formats a rate as parse_rate() reads it."""
    if rate is None:
        return "none"
    unit = max((u for u, bits in _UNITS.items() if rate % bits == 0), key=_UNITS.__getitem__)
    return f"{rate // _UNITS[unit]}{unit}"


def packet_bytes(rate: int) -> int:
    """Returns the largest packet on a link of `rate` before it is cut into MTU-sized ones."""
    return min(max(_MIN_PACKET_BYTES, round(rate / 8 * _PACKET_SECONDS)), _MAX_PACKET_BYTES)


def tbf_arguments(rate: int, packet: int) -> list[str]:
    """Returns arguments for `tc qdisc add … root`; `packet` is the largest packet in bytes."""
    burst = max(_BURST_PACKETS * packet, round(rate / 8 * _BURST_SECONDS))
    queue = max(_MIN_QUEUE_BYTES, round(rate / 8 * _QUEUE_SECONDS))
    return ["tbf", "rate", f"{rate}bit", "burst", str(burst), "limit", str(burst + queue)]
