"""Workers agree about a module before any of them does something to it: all or none attach it.

They tell each other over the process group's store: its collectives may need a device that the
script has not chosen, and would hang where a node was started without the variables.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from thalweg._job import _rendezvous
from thalweg._settings._config import ConfigError

_log = logging.getLogger("thalweg")


@dataclass(frozen=True)
class Answer:
    """An Answer says whether one worker attaches a module, and how."""

    codec: str = ""  # empty: the environment leaves the module alone
    error: str = ""
    obstacle: str = ""  # why it must be left alone


def announcement(rank: int) -> str:
    """Returns the key that a worker sets."""
    return f"thalweg/activated/{rank}"


def announce() -> None:
    """Tells the others that this worker's environment activates Thalweg."""
    _rendezvous.default_store().set(announcement(dist.get_rank()), "1")


def decide(answers: Sequence[Answer]) -> str:
    """Why a module is left alone; empty: it is to be attached. ConfigError on all workers alike."""
    for rank, answer in enumerate(answers):
        if answer.error:
            raise ConfigError(f"thalweg: rank {rank}: {answer.error}")
    for rank, answer in enumerate(answers):
        if answer.codec != answers[0].codec:
            raise ConfigError(
                f"thalweg: the environment asks for codec {answers[0].codec or '(none)'} on rank 0 "
                f"but {answer.codec or '(none)'} on rank {rank}: set the same variables everywhere"
            )
    return next((f"rank {r}: {a.obstacle}" for r, a in enumerate(answers) if a.obstacle), "")


def await_announcements(
    shared: Store, ranks: Sequence[int], timeout: float, *, longest: float = 0.0, rank: int = 0
) -> None:
    """ConfigError names the ranks whose environment does not activate Thalweg.

    They announce themselves before they build a module, which is collective: nobody who is going to
    should need the timeout. Where it is not, they have `longest` seconds, and rank 0 warns after
    the timeout. An announcement that an earlier attempt has left in the store hides a rank only
    here: exchange() names it.
    """
    keys = [announcement(each) for each in ranks]
    places = _rendezvous.missing(shared, keys, timeout)
    late = ""
    if places and longest > timeout:
        late = f", or it has not come within {longest:g} s (THALWEG_STEP_TIMEOUT)"
        if rank == 0:
            text = (
                "thalweg: waiting for rank %s to come to the same DistributedDataParallel module, "
                "for %g s at most (THALWEG_STEP_TIMEOUT), unless the environment does not activate "
                "Thalweg there: set the same variables everywhere"
            )
            _log.warning(text, ", ".join(str(ranks[place]) for place in places), longest)
        places = _rendezvous.missing(shared, keys, longest - timeout)
    if places:
        raise ConfigError(
            f"thalweg: the environment activates it here, but not on rank "
            f"{', '.join(str(ranks[place]) for place in places)}{late}: set the same variables "
            "everywhere"
        )


def exchange(
    shared: Store,
    answer: Answer,
    *,
    name: str,
    rank: int,
    world: int,
    timeout: float,
    variable: str = "THALWEG_TIMEOUT",
    quiet: float = math.inf,
) -> list[Answer]:
    """Returns what all workers answer, by rank. Raises TimeoutError, naming those that do not; rank
    0 warns of them after `quiet` seconds.
    """
    given = _rendezvous.gather(
        shared,
        name,
        json.dumps(asdict(answer)),
        where="the same DistributedDataParallel module",
        rank=rank,
        world=world,
        timeout=timeout,
        variable=variable,
        quiet=quiet,
    )
    return [Answer(**json.loads(one)) for one in given]
