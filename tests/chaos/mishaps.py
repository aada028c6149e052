"""What chaos.py does to a fleet, and a schedule of it that a seed determines."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chaos_worker import TIMEOUT
from fleet import PORT, RECONNECT, Fleet, Member
from network import Network

SLOW = "tbf rate 5mbit burst 64kb limit 256kb"
LOSSY = "netem delay 20ms 5ms loss 1%"
GAP = (0.5, 2.0)  # seconds in which the job trains undisturbed between two mishaps
TWO_AT_ONCE = 0.2

_AT_ONCE, _BRIEF, _LONG = (0.0, 0.0), (0.5, 3.0), (RECONNECT + 1.0, TIMEOUT + 3.0)

Undo = Callable[[], None]


@dataclass(frozen=True)
class Mishap:
    what: str
    member: Member
    seconds: float

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.what} {self.member.name}{lasting}"


def _kill(fleet: Fleet, network: Network, member: Member) -> Undo:
    if fleet.is_running(member):
        member.signal(signal.SIGKILL)
    return lambda: None


def _restart(fleet: Fleet, network: Network, member: Member) -> Undo:
    fleet.lose(member)
    return lambda: fleet.restart(member)


def _stop(fleet: Fleet, network: Network, member: Member) -> Undo:
    if fleet.is_running(member):
        member.signal(signal.SIGSTOP)

    def go_on() -> None:
        if fleet.is_running(member):
            member.signal(signal.SIGCONT)

    return go_on


def _reset(fleet: Fleet, network: Network, member: Member) -> Undo:
    network.reset(member.host, PORT)
    return lambda: None


def _half_open(fleet: Fleet, network: Network, member: Member) -> Undo:
    """Kills a process whose end nobody can notice."""
    undo = network.cut(member.host)
    _kill(fleet, network, member)
    return undo


def _cut(fleet: Fleet, network: Network, member: Member) -> Undo:
    return network.cut(member.host)


def _cut_one_way(fleet: Fleet, network: Network, member: Member) -> Undo:
    return network.cut_one_way(member.host)


def _slow_down(fleet: Fleet, network: Network, member: Member) -> Undo:
    return network.shape(member.host, SLOW)


def _lose(fleet: Fleet, network: Network, member: Member) -> Undo:
    return network.shape(member.host, LOSSY)


@dataclass(frozen=True)
class _Kind:
    act: Callable[[Fleet, Network, Member], Undo]
    concerned: tuple[str, ...]  # kinds of members
    seconds: tuple[float, float]
    is_harmless: bool  # True if a job must go on, as long as nothing else happens


_ALL, _SERVERS = ("worker", "sidecar", "shard"), ("sidecar", "shard")
_KINDS = {
    "SIGKILL": _Kind(_kill, _ALL, _AT_ONCE, is_harmless=False),
    "SIGKILL and restart": _Kind(_restart, ("shard",), _BRIEF, is_harmless=True),
    "SIGSTOP": _Kind(_stop, _ALL, _BRIEF, is_harmless=True),
    "long SIGSTOP": _Kind(_stop, _ALL, _LONG, is_harmless=False),
    "reset": _Kind(_reset, _SERVERS, _AT_ONCE, is_harmless=True),
    "cut": _Kind(_cut, _SERVERS, _BRIEF, is_harmless=True),
    "long cut": _Kind(_cut, _SERVERS, _LONG, is_harmless=False),
    "one-way cut": _Kind(_cut_one_way, _SERVERS, _BRIEF, is_harmless=True),
    "long one-way cut": _Kind(_cut_one_way, _SERVERS, _LONG, is_harmless=False),
    "SIGKILL behind a cut": _Kind(_half_open, _SERVERS, _BRIEF, is_harmless=False),
    "slow link": _Kind(_slow_down, _SERVERS, _BRIEF, is_harmless=True),
    "lossy link": _Kind(_lose, _SERVERS, _BRIEF, is_harmless=True),
}


def are_harmless(planned: list[Mishap]) -> bool:
    """Returns whether a job must go on. Two mishaps may last too long together."""
    return len(planned) == 1 and _KINDS[planned[0].what].is_harmless


def begin(mishap: Mishap, fleet: Fleet, network: Network) -> Undo:
    """Does it; returns what ends it."""
    return _KINDS[mishap.what].act(fleet, network, mishap.member)


def possible(fleet: Fleet, *, without: set[str]) -> list[str]:
    """Returns what can be done to members of the fleet."""
    concerned = {member.kind for member in fleet.members}
    return [
        name
        for name, kind in _KINDS.items()
        if name not in without and not concerned.isdisjoint(kind.concerned)
    ]


def schedule(seed: int, fleet: Fleet, *, without: set[str]) -> Iterator[tuple[float, list[Mishap]]]:
    """Gives, without end, the seconds until the next mishaps, and one or two at different hosts.

    Everything that is possible comes first, each alone.
    """
    rng = random.Random(seed)
    kinds = possible(fleet, without=without)
    for what in rng.sample(kinds, len(kinds)):
        yield rng.uniform(*GAP), [_draw(rng, fleet, what, taken=set())]
    while True:
        mishaps: list[Mishap] = []
        for _ in range(2 if rng.random() < TWO_AT_ONCE else 1):
            taken = {mishap.member.host for mishap in mishaps}
            mishaps.append(_draw(rng, fleet, rng.choice(kinds), taken))
        yield rng.uniform(*GAP), mishaps


def _draw(rng: random.Random, fleet: Fleet, what: str, taken: set[str]) -> Mishap:
    """Chooses whom it concerns, at a host that is not taken, and for how long."""
    kind = _KINDS[what]
    members = [m for m in fleet.members if m.kind in kind.concerned and m.host not in taken]
    return Mishap(what, rng.choice(members), rng.uniform(*kind.seconds))
