"""Lets what a codec carries on all nodes alike ride in the optimizer's state_dict().

So a checkpoint as every trainer writes it, by one worker, resumes with the codec's step counts and
factors. torch ignores the key, also where Thalweg is not installed. What nodes hold back differs
between them and is not in it: State.state_dict() has that, and so do files (_residuals.py).

What no job has gone on from is saved again as it was loaded: a run on one node, which compresses
nothing, loses nothing of it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thalweg._attach import _codec_states, _first_step, _jobs, _loaded
from thalweg._attach._jobs import AttachedModule
from thalweg._attach._loaded import Loaded
from thalweg._torch import _patches

if TYPE_CHECKING:
    from thalweg._attach._state import State
    from thalweg._job._collectives import Meeting

KEY = "thalweg"  # in the state_dict of an optimizer
_SAVED_BY_HAND = "by load_state_dict()"

_log = logging.getLogger("thalweg")
# The meeting of a module's workers, and for how long one of them may be late to it.
_meetings: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[Meeting, float]] = (
    weakref.WeakKeyDictionary()
)


def install() -> None:
    """From now on optimizers' checkpoints take along what belongs to attached modules."""
    _patches.install("resuming", Optimizer, "state_dict", _save)
    _patches.install("resuming", Optimizer, "load_state_dict", _load)


def join(
    module: DistributedDataParallel, state: State, meeting: Meeting, step_timeout: float
) -> None:
    """Makes the module's workers agree from where they go on, before gradients are averaged for the
    first time. One may come so many seconds later than another, as to every step. A module whose
    codec has nothing to go on from only takes the place of an earlier one of its parameters.
    """
    _jobs.begin(module, state)
    if not state.rides:
        return
    # Half as long, because gather() waits for twice the timeout.
    first = meeting._replace(timeout=meeting.timeout / 2, where="the first training step")
    _meetings[module] = first, step_timeout
    _first_step.call(module, _settle_attached)


def settle(module: DistributedDataParallel, state: State) -> None:
    """Goes on from what optimizers have loaded. All workers call it together, before a step.

    If not all of them have loaded the same, nobody takes it: nodes must count alike. RuntimeError,
    on all workers: some have called load_state_dict(), which cannot be taken back.
    """
    if module not in _meetings:
        return
    _first_step.cancel(module)
    meeting, late = _meetings.pop(module)
    job = _jobs.job_of(module, state)
    found = None if job is None else _loaded.take(job.parameters, _jobs.number_of(job))
    state.has_trained = True
    mine = _SAVED_BY_HAND if state.has_loaded else _digest(found)
    held_back, missing = _find_residuals(state, found)
    problem = ""
    try:
        everyone = _gather((mine, missing), meeting, late, state)
    except TimeoutError as error:
        # None of them takes anything: those who come later wait in vain as well.
        everyone, problem = [(mine, missing)], str(error)
    loaded = {digest for digest, _ in everyone}
    _check_loaded_by_hand([digest for digest, _ in everyone])
    if found is None or _SAVED_BY_HAND in loaded:
        return
    missing = next((why for _, why in everyone if why), "")
    if len(loaded) > 1:
        problem = "not all workers have loaded it"
    if not problem:
        problem = state.ride_on(found, None if missing else held_back)
    if meeting.rank != 0:
        return
    if problem:
        _log.warning(
            "job %s: the codec begins anew, with step 1, in spite of what the optimizer's "
            "checkpoint has of it: %s",
            state.job,
            problem,
        )
    else:
        _say_what_goes_on(state, found, missing)


def _gather(
    value: tuple[str, str], meeting: Meeting, late: float, state: State
) -> list[tuple[str, str]]:
    """Returns the values of all workers, of which one may be so many seconds late. Raises
    TimeoutError if it is later or its node is lost, and RuntimeError where the job
    has ended meanwhile.
    """
    from thalweg._job import _collectives

    last, has_warned = time.monotonic() + late, meeting.rank != 0
    bound = f"{late:g} s (THALWEG_STEP_TIMEOUT)"
    while True:
        try:
            return _collectives.gather(value, meeting)
        except TimeoutError as error:
            why = str(error).removeprefix("thalweg: ")
            if (ended := state.status()) is not None:
                raise RuntimeError(f"thalweg: {ended}") from error
            if lost := state.lost_nodes():
                raise TimeoutError(f"{why}; the job goes on without {lost[0]}") from error
            if time.monotonic() >= last:
                raise TimeoutError(f"{why}, nor within {bound}") from error
            if not has_warned:
                _log.warning("job %s: waits for at most %s: %s", state.job, bound, why)
                has_warned = True


def _check_loaded_by_hand(everyone: list[str]) -> None:
    others = [str(rank) for rank, one in enumerate(everyone) if one != _SAVED_BY_HAND]
    if others and len(others) < len(everyone):
        raise RuntimeError(
            f"thalweg: of {len(everyone)} workers, rank {', '.join(others)} did not call the "
            "State's load_state_dict(), expected all or none: nodes must count the codec's steps "
            "alike"
        )


def _say_what_goes_on(state: State, found: Mapping[str, Any], missing: str) -> None:
    _log.log(
        # Who has asked for files hears that they are not there.
        logging.WARNING if missing and state.has_residual_files else logging.INFO,
        "job %s: the codec goes on after step %d, from the optimizer's checkpoint; what nodes held "
        "back of gradients %s",
        state.job,
        _codec_states.rounds_of(found["shared"]),
        f"begins at zero: {missing}" if missing else "goes on, from files",
    )


def _find_residuals(state: State, found: Mapping[str, Any] | None) -> tuple[bytes | None, str]:
    """Returns what this node has held back, or why files do not say; neither: another worker of the
    node looks for it.
    """
    if found is None or not state.has_residual_files:
        return None, "THALWEG_RESIDUALS and State.state_dict() keep it"
    if state.residuals is None:
        return None, ""
    try:
        whole = state.residuals.find(found.get("residuals"))
        _codec_states.with_residuals(found["shared"], whole)
    except (OSError, ValueError) as error:
        return None, str(error).removeprefix("thalweg: ")
    return whole, ""


def _digest(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return hashlib.sha256(str(found.get("codec")).encode() + bytes(found["shared"])).hexdigest()


def _settle_attached(module: DistributedDataParallel) -> None:
    from thalweg import ddp

    state = ddp.state_of(module)
    if state is not None:
        settle(module, state)


def _save(
    original: Callable[..., dict[str, Any]],
    optimizer: Optimizer,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> dict[str, Any]:
    result = original(optimizer, *args, **kwargs)
    places: dict[AttachedModule | Loaded, list[int]] = {}  # of parameters
    for place, parameter in enumerate(_parameters(optimizer)):
        loaded, jobs = _loaded.loaded_for(parameter), _jobs.jobs_of(parameter)
        live = [job for job in jobs if job.state is not None]
        of_both: list[AttachedModule | Loaded] = [*loaded, *live]
        for one in of_both:
            places.setdefault(one, []).append(place)
        if jobs and not live and not loaded:
            _say_that_it_has_ended()
    ridings = list(_ridings_of(places))
    return {**result, KEY: ridings} if ridings else result


def _ridings_of(places: Mapping[AttachedModule | Loaded, list[int]]) -> Iterator[dict[str, Any]]:
    """Yields what is to be saved of these, by the places of their parameters."""
    awaited: set[Loaded] = set()  # by jobs, which go on from it in their first steps
    jobs = [one for one in places if isinstance(one, AttachedModule)]
    for job in jobs:
        state = job.state
        if state is None:
            continue
        found = [] if state.has_trained else _loaded.find(job.parameters, _jobs.number_of(job))
        awaited.update(found)
        if not found and (riding := state.riding()):
            yield {**riding, "parameters": places[job]}
    for one, of in places.items():
        if isinstance(one, Loaded):
            yield {**_as_loaded(one.riding, is_awaited=one in awaited), "parameters": of}


def _load(
    original: Callable[..., None],
    optimizer: Optimizer,
    /,
    state_dict: Mapping[str, Any],
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> None:
    original(optimizer, state_dict, *args, **kwargs)
    ridings = [one for one in state_dict.get(KEY) or () if _is_riding(one)]
    if not ridings:
        return
    parameters = list(_parameters(optimizer))
    known = [job.state for p in parameters for job in _jobs.jobs_of(p)]
    training = next((state for state in known if state and state.has_trained), None)
    if training is not None:
        _log.info(
            "job %s: the codec keeps its own step counts and factors: those of an optimizer's "
            "checkpoint are taken before the first training step only",
            training.job,
        )
        return
    _loaded.put(ridings, parameters)


def _as_loaded(riding: Mapping[str, Any], *, is_awaited: bool) -> dict[str, Any]:
    """Returns what was loaded and not used until now, to be saved again."""
    if is_awaited:
        return dict(riding)
    _say_that_it_is_passed_on(str(riding.get("codec")))
    # Steps are made without the job that would change what nodes hold back.
    return {key: value for key, value in riding.items() if key != "residuals"}


def _is_riding(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("shared"), bytes)
        and isinstance(value.get("parameters"), list)
    )


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yields the model's parameters that the optimizer updates, also through masters."""
    mixed: Any = sys.modules.get("thalweg.amp._optimizer")
    found = mixed.mixed_optimizer_of(optimizer) if mixed else None
    by_master = {} if found is None else found.params_by_master()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield by_master.get(id(parameter), parameter)


@functools.cache
def _say_that_it_has_ended() -> None:
    """Warns once, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(
            "an optimizer's checkpoint is without the codec's step counts and factors: the job of "
            "its parameters has ended; save it before DistributedDataParallel's module is gone"
        )


@functools.cache
def _say_that_it_is_passed_on(codec: str) -> None:
    """Says it once, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.info(
            "an optimizer's checkpoint takes along the step counts and factors of codec %s as they "
            "were loaded: nothing here goes on from them",
            codec,
        )
