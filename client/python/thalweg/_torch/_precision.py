"""Passes the decisions of loss scalers (scales and skipped steps) to sessions for their sidecars.

Nothing here waits for a device: values on a GPU are copied to pinned memory, and read in a later
step, once they have arrived. Nothing is done while there is no session.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from thalweg._torch import _patches


class Session(Protocol):
    """The needed part of _C.Session."""

    def note_precision(self, loss_scale: float, skipped_steps: int) -> None: ...


class _Decision(NamedTuple):
    """The outcome of a GradScaler's update()."""

    scaler: GradScaler
    # on the host: the scale, then flags that are nonzero where there was an infinity
    values: Tensor
    is_here: Callable[[], bool]


_lock = threading.Lock()  # any thread may call stats()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_scales: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()
# Those that have scaled a loss since they were last updated.
_at_work: weakref.WeakSet[object] = weakref.WeakSet()
_on_the_way: deque[_Decision] = deque()


def watch(session: Session) -> None:
    """Makes the session receive the decisions of all scalers of this process from now on."""
    for name, around in (
        ("scale", _scale_and_observe),
        ("update", _update_and_observe),
        ("load_state_dict", _load_and_observe),
    ):
        _patches.install("precision", GradScaler, name, around)
    _sessions.add(session)
    with _lock:
        _scales.clear()  # this session has heard of none


def announce(scaler: object, scale: float) -> None:
    """Makes sessions know a scale before they get gradients that carry it."""
    if _sessions:
        _at_work.add(scaler)
        _know(scaler, scale)


def tell(scaler: object, scale: float, *, skipped: bool) -> None:
    """Records the scaler's new scale, and whether it skipped the step."""
    if _sessions:
        _at_work.discard(scaler)
        with _lock:
            _pass_on([(scaler, scale, skipped)])


def carried() -> float:
    """Returns the smallest scale that gradients may carry now, as far as it is known: that of
    scalers which have scaled a loss since their last update. 1: there is none.
    """
    with _lock:
        return min((_scales[each] for each in list(_at_work) if each in _scales), default=1.0)


def settle() -> None:
    """Passes on the values that have arrived on the host in the meantime."""
    with _lock:
        news = []
        while _on_the_way and _on_the_way[0].is_here():
            scaler, values, _ = _on_the_way.popleft()
            scale, *flags = values.tolist()
            news.append((scaler, scale, any(flags)))
        if news:
            _pass_on(news)


def _know(scaler: object, scale: float) -> None:
    if _scales.get(scaler) != scale:
        with _lock:
            _pass_on([(scaler, scale, False)])


def _pass_on(news: Sequence[tuple[object, float, bool]]) -> None:
    for scaler, scale, _ in news:
        _scales[scaler] = scale
    skipped = sum(skipped for *_, skipped in news)
    for session in list(_sessions):
        # The smallest scale is reported: if a scaler is in trouble, it is that one.
        session.note_precision(min(_scales.values()), skipped)


def _look(scaler: GradScaler, values: Sequence[Tensor]) -> None:
    device = values[0].device
    if device.type == "cpu":
        here = torch.stack([value.to(device) for value in values])
        _on_the_way.append(_Decision(scaler, here, lambda: True))
    elif device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        _on_the_way.append(_Decision(scaler, *_fetch(values)))
    settle()


def _fetch(values: Sequence[Tensor]) -> tuple[Tensor, Callable[[], bool]]:
    """Copies from a GPU, without waiting; returns the copies and whether they have arrived."""
    device = values[0].device
    together = torch.stack([value.to(device, non_blocking=True) for value in values])
    host = torch.empty(len(values), dtype=together.dtype, device="cpu", pin_memory=True)
    host.copy_(together, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))
    return host, arrived.query


def _scale_and_observe(
    scale: Callable[..., Any],
    scaler: GradScaler,
    /,
    outputs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    if not _sessions or not scaler.is_enabled():
        return scale(scaler, outputs)
    before = scaler._scale
    scaled = scale(scaler, outputs)
    _at_work.add(scaler)
    if before is None:
        announce(scaler, scaler._init_scale)
    elif scaler not in _scales:  # it is older than the sessions
        _look(scaler, [before])
    return scaled


def _load_and_observe(
    load: Callable[..., None], scaler: GradScaler, /, state_dict: dict[str, Any]
) -> None:
    load(scaler, state_dict)
    if _sessions and scaler.is_enabled():
        _know(scaler, scaler._init_scale)


def _update_and_observe(
    update: Callable[..., None],
    scaler: GradScaler,
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> None:
    if not _sessions or not scaler.is_enabled():
        update(scaler, *args, **kwargs)
        return
    # update() forgets them.
    flags = [
        flag
        for optimizer in scaler._per_optimizer_states.values()
        for flag in optimizer["found_inf_per_device"].values()
    ]
    update(scaler, *args, **kwargs)
    _at_work.discard(scaler)
    if scaler._scale is not None:
        _look(scaler, [scaler._scale, *flags])
