"""Workers meet through the process group's store, within a deadline, and learn who is missing.

The group's collectives may need a device that the script has not chosen, and their own timeout is
half an hour.

A store may outlive its workers: torchrun keeps one over its restarts, and so does a script that
destroys its process group and makes another. Neither the store nor the environment says which keys
an earlier attempt has left: after the loss of a node, TORCHELASTIC_RESTART_COUNT even differs
between the workers of an attempt. So every meeting has a random name, and the workers learn it by
questions that are random too: what an earlier attempt has left is never read as an answer.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from thalweg._settings._variables import is_first_of_node

_POLL_SECONDS = 0.02  # how often rank 0 looks for new questions
_FIRST_SECONDS = 0.001  # after somebody has come: others are usually close
_GRACE_SECONDS = 1.0  # rank 0 tells its decision within this time
_READING_SECONDS = 5.0  # the others read it within this time, or rank 0 goes on

_log = logging.getLogger("thalweg")


def default_store() -> Store:
    """Returns the store of the default process group. Raises RuntimeError for MPI's."""
    store: Store | None = dist.distributed_c10d._get_default_store()
    if store is None:
        raise RuntimeError("thalweg: MPI process groups have no store: use gloo or nccl")
    return store


def host_of(shared: Store) -> str:
    """Returns the host that serves a store, as this worker names it; empty: no host does."""
    while isinstance(shared, PrefixStore):
        shared = shared.underlying_store
    return shared.host if isinstance(shared, TCPStore) else ""


def missing(shared: Store, keys: Sequence[str], timeout: float) -> list[int]:
    """Returns the places of those keys that nobody has set within `timeout` seconds."""
    try:
        shared.wait(list(keys), timedelta(seconds=timeout))
    except RuntimeError:
        return [place for place, key in enumerate(keys) if not shared.check([key])]
    return []


def gather(
    shared: Store,
    name: str,
    value: str,
    *,
    where: str,
    rank: int,
    world: int,
    timeout: float,
    variable: str = "THALWEG_TIMEOUT",
    quiet: float = math.inf,
) -> list[str]:
    """Returns what all ranks give under this name, by rank; messages say `where` they meet, and
    which `variable` has the timeout. After `quiet` seconds rank 0 warns of whom it waits for; if it
    has not come itself, the first worker of each node does.

    Rank 0 decides, and returns when the others have read that: its process may be the store's, and
    end next. If it has waited `timeout` seconds for another rank, TimeoutError names that one
    to all that have come. A rank that rank 0 does not answer for as long, because it has not come
    or has given up, gets TimeoutError as well.
    """
    text = f"to come to {where}, for {timeout:g} s at most ({variable})"
    if rank == 0:
        answers = _collect(shared, name, value, world, timeout, quiet=quiet, text=text)
    else:
        answers = _take_part(shared, name, value, rank, timeout, quiet=quiet, text=text)
    absent = [str(other) for other, answer in enumerate(answers) if answer is None]
    if absent:
        raise TimeoutError(
            f"thalweg: rank {', '.join(absent)} has not come to {where} within {timeout:g} s "
            f"({variable})"
        )
    return [answer for answer in answers if answer is not None]


def await_all(group: dist.ProcessGroup, timeout: float, quiet: float) -> None:
    """Returns when all workers have come to attach(). Raises TimeoutError with the missing ranks;
    after `quiet` seconds gather() warns of them.

    What follows uses torch's collectives, which would wait as long as the process group does.
    """
    try:
        store = default_store()
    except RuntimeError:  # the group is MPI's; torch's collectives then wait on their own terms
        return
    try:
        gather(
            store,
            f"attach/{group.group_name}",
            "",
            where="attach()",
            rank=dist.get_rank(group),
            world=dist.get_world_size(group),
            timeout=timeout,
            variable="THALWEG_STEP_TIMEOUT",
            quiet=quiet,
        )
    except TimeoutError as error:
        raise TimeoutError(
            f"{error}. All workers must attach. Without code, they do so in their first training "
            "step. A worker cannot take part if it has no batch, or if its first step comes later. "
            "It also waits in vain for the others, in a barrier perhaps, if they have run the "
            "module in training mode before it does, to look at shapes perhaps: run that under "
            "torch.no_grad()"
        ) from None


def _collect(
    shared: Store, name: str, value: str, world: int, timeout: float, *, quiet: float, text: str
) -> list[str | None]:
    """Names the meeting to all who ask, and returns the values of those that come, after telling
    them. Warns after `quiet` seconds; `text` is what of those that have not come.
    """
    meeting = secrets.token_hex(8)
    began = time.monotonic()
    deadline = began + timeout
    told: dict[int, str] = {}
    absent = list(range(1, world))
    pause = _FIRST_SECONDS
    while absent and time.monotonic() < deadline:
        for rank in absent:
            question = _read(shared, _key(name, "asks", rank))
            if question and question != told.get(rank):
                shared.set(_key(name, "answer", question), meeting)
                told[rank] = question
                pause = _FIRST_SECONDS
        time.sleep(pause)  # torch would log a warning whenever a wait() times out
        pause = min(2 * pause, _POLL_SECONDS)
        absent = [rank for rank in absent if not shared.check([_key(name, meeting, rank)])]
        if absent and time.monotonic() > began + quiet:
            quiet = math.inf
            _log.warning("thalweg: waiting for rank %s %s", ", ".join(map(str, absent)), text)
    answers = [value, *(_read(shared, _key(name, meeting, rank)) for rank in range(1, world))]
    shared.set(_key(name, meeting, "all"), json.dumps(answers))
    readers = [rank for rank, answer in enumerate(answers) if rank and answer is not None]
    missing(shared, [_key(name, meeting, "read", rank) for rank in readers], _READING_SECONDS)
    return answers


def _take_part(
    shared: Store, name: str, value: str, rank: int, timeout: float, *, quiet: float, text: str
) -> list[str | None]:
    """Returns what rank 0 has collected, or only that rank 0 is absent. Warns after `quiet` seconds
    without it; `text` is what of it.
    """
    question = secrets.token_hex(8)
    answer = _key(name, "answer", question)
    shared.set(_key(name, "asks", rank), question)
    if quiet < timeout and missing(shared, [answer], quiet):
        timeout -= quiet
        if is_first_of_node():
            _log.warning("thalweg: waiting for rank 0 %s", text)
    if missing(shared, [answer], timeout):
        return [None]
    meeting = shared.get(answer).decode()
    shared.set(_key(name, meeting, rank), value)
    collected = _key(name, meeting, "all")
    if missing(shared, [collected], timeout + _GRACE_SECONDS):
        return [None]
    answers: list[str | None] = json.loads(shared.get(collected))
    shared.set(_key(name, meeting, "read", rank), "")
    return answers


def _read(shared: Store, key: str) -> str | None:
    """Returns the value of a key that is set."""
    return shared.get(key).decode() if shared.check([key]) else None


def _key(name: str, *parts: str | int) -> str:
    return "/".join(["thalweg", name, *map(str, parts)])
