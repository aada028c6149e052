"""What loss scalers decide, for sessions to tell their sidecars: scales, and steps skipped.

Nothing here waits for a device: what lies on a GPU is copied to pinned memory, and looked at in a
later step, once it is there. Nothing is done while there is no session.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler


class Session(Protocol):
    """The part of _C.Session that is needed."""

    def note_precision(self, loss_scale: float, skipped_steps: int) -> None: ...


class _Decision(NamedTuple):
    """Of a GradScaler's update()."""

    scaler: GradScaler
    values: Tensor  # on the host: the scale, then flags, not 0 where there was an infinity
    is_here: Callable[[], bool]


_lock = threading.Lock()  # stats() may be called by any thread
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_scales: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()
_on_the_way: deque[_Decision] = deque()
_observed: set[int] = set()  # ids of GradScalers in update()


def watch(session: Session) -> None:
    """The session hears of all scalers of this process from now on."""
    _install()
    _sessions.add(session)


def tell(scaler: object, scale: float, *, skipped: bool) -> None:
    """The scaler has come to a scale, and may have skipped the step."""
    if _sessions:
        with _lock:
            _pass_on([(scaler, scale, skipped)])


@contextmanager
def observing(scaler: GradScaler) -> Iterator[None]:
    """Around what makes up update(), which may have this around a part of it as well."""
    if not _sessions or not scaler.is_enabled() or id(scaler) in _observed:
        yield
        return
    _observed.add(id(scaler))
    try:
        # update() forgets them.
        flags = [
            flag
            for optimizer in scaler._per_optimizer_states.values()
            for flag in optimizer["found_inf_per_device"].values()
        ]
        yield
    finally:
        _observed.discard(id(scaler))
    if scaler._scale is not None:
        _look(scaler, [scaler._scale, *flags])


def settle() -> None:
    """Passes on what has come to the host meanwhile."""
    with _lock:
        news = []
        while _on_the_way and _on_the_way[0].is_here():
            scaler, values, _ = _on_the_way.popleft()
            scale, *flags = values.tolist()
            news.append((scaler, scale, any(flags)))
        if news:
            _pass_on(news)


def _pass_on(news: Sequence[tuple[object, float, bool]]) -> None:
    for scaler, scale, _ in news:
        _scales[scaler] = scale
    skipped = sum(skipped for *_, skipped in news)
    for session in list(_sessions):
        # The smallest: that scaler is in trouble, if any is.
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
    """Copies from a GPU, without waiting; and whether they are there."""
    device = values[0].device
    together = torch.stack([value.to(device, non_blocking=True) for value in values])
    host = torch.empty(len(values), dtype=together.dtype, device="cpu", pin_memory=True)
    host.copy_(together, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))
    return host, arrived.query


@functools.cache
def _install() -> None:
    update: Callable[..., None] = GradScaler.update

    @functools.wraps(update)
    def update_and_observe(self: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        with observing(self):
            update(self, *args, **kwargs)

    GradScaler.update = update_and_observe  # type: ignore[method-assign]
