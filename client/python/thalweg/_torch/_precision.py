"""Passes the decisions of loss scalers (scales and skipped steps) to sessions for their sidecars.

Sessions are told what the gradients of a backward pass carry before it begins: the scale of the
scaler by which its loss was multiplied, or 1. Which one that is, a mark on the loss says.

Nothing here waits for a device, but for the scale of a scaler that is older than the sessions:
values on a GPU are copied to pinned memory, and read in a later step, once they have arrived.
Nothing is done while there is no session.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler

from thalweg._torch import _patches

_MARK = "thalweg_scaler"  # in the metadata of the node that has multiplied a loss
# So many nodes of a pass are looked at, from its losses on, before it counts as unscaled.
_NEAR = 64


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
# Each with the scale that it was told last.
_sessions: weakref.WeakKeyDictionary[Session, float] = weakref.WeakKeyDictionary()
_scales: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()
# These have scaled a loss since they were last updated.
_at_work: weakref.WeakSet[object] = weakref.WeakSet()
_on_the_way: deque[_Decision] = deque()


class _Latest:
    """The latest loss that was scaled, or whose backward pass has begun."""

    scaler: weakref.ref[object] | None = None  # None: no scaler has scaled it
    scale = 1.0  # as far as it is known


def watch(session: Session) -> None:
    """Makes the session receive the decisions of all scalers of this process from now on. It is
    told first that gradients carry none, so that what it holds back of these has a unit.
    """
    for name, around in (
        ("scale", _scale_and_observe),
        ("update", _update_and_observe),
        ("load_state_dict", _load_and_observe),
    ):
        _patches.install("precision", GradScaler, name, around)
    _patches.install("precision", torch.autograd, "backward", _observe_and_run)
    with _lock:
        _sessions[session] = 1.0
        session.note_precision(1.0, 0)


def carry(scaled: Tensor, scaler: object, scale: float) -> Tensor:
    """Returns a loss that was multiplied by the scale. Sessions will know that of its gradients."""
    if _sessions:
        _at_work.add(scaler)
        with _lock:
            _scales[scaler] = scale
        _mark(scaled, scaler)
        _follow(scaler)
    return scaled


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


def followed() -> float:
    """Returns the scale of the latest loss that was scaled, or whose backward pass has begun."""
    with _lock:
        return _Latest.scale


def shown(stats: dict[str, float]) -> dict[str, float]:
    """Returns the statistics of a session with the smallest scale that is known in the place of
    what the session was told last; 0: no scale is known.
    """
    with _lock:
        told = stats["loss_scale"]
        stats["loss_scale"] = min(_scales.values(), default=0.0 if told == 1 else told)
    return stats


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
    with _lock:
        _pass_on([(scaler, scale, False)])


def _follow(scaler: object | None) -> None:
    """Makes sessions know what the gradients to come carry: this scaler's scale, or none."""
    settle()
    with _lock:
        _Latest.scaler = None if scaler is None else weakref.ref(scaler)
        _say(1.0 if scaler is None else _scales.get(scaler))


def _pass_on(news: Sequence[tuple[object, float, bool]]) -> None:
    for scaler, scale, _ in news:
        _scales[scaler] = scale
    latest = None if _Latest.scaler is None else _Latest.scaler()
    _say(None if latest is None else _scales.get(latest), sum(skipped for *_, skipped in news))


def _say(scale: float | None, skipped: int = 0) -> None:
    """Tells sessions what is new to them. None: the scale is what it was, or not known yet."""
    _Latest.scale = _Latest.scale if scale is None else scale
    for session, told in list(_sessions.items()):
        if skipped or scale not in (None, told):
            _sessions[session] = told if scale is None else scale
            session.note_precision(_sessions[session], skipped)


@_disable_dynamo
def _mark(outputs: Any, scaler: object) -> Any:  # noqa: ANN401 - what scale() takes
    """Returns the scaled losses; their backward passes will be known to be this scaler's."""
    if isinstance(outputs, Tensor):
        if outputs.grad_fn is not None:
            outputs.grad_fn.metadata[_MARK] = scaler  # type: ignore[index] # torch says: a method
        return outputs
    if isinstance(outputs, list | tuple):
        for each in outputs:
            _mark(each, scaler)
        return outputs
    return (_mark(each, scaler) for each in outputs)  # torch has not looked at them yet either


def _scaler_of(losses: Any) -> object | None:  # noqa: ANN401 - what torch.autograd.backward takes
    """Returns the scaler nearest to the losses of a pass; None: there is none near them."""
    if not _scales:
        return None
    given: Iterable[Any] = losses if type(losses) in (list, tuple) else [losses]
    # A GradientEdge has a node.
    nodes = deque(getattr(each, "grad_fn", getattr(each, "node", None)) for each in given)
    for _ in range(_NEAR):
        if not nodes:
            break
        node = nodes.popleft()
        if node is None:
            continue
        scaler: object | None = node.metadata.get(_MARK)
        if scaler is not None:
            return scaler
        nodes.extend(following for following, _ in node.next_functions)
    return None


def _observe_and_run(
    backward: Callable[..., None],
    /,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> None:
    # Within a pass, one begins that computes something of it again (reentrant checkpoints).
    if _sessions and torch._C._current_graph_task_id() == -1:
        _follow(_scaler_of(args[0] if args else kwargs.get("tensors")))
    backward(*args, **kwargs)


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
    return host, partial(_has_arrived, arrived)


def _has_arrived(event: torch.cuda.Event) -> bool:
    """Returns whether it is known that an event is over: asking ends the making of a graph."""
    return not torch.cuda.is_current_stream_capturing() and event.query()


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
        _know(scaler, scaler._init_scale)
    elif scaler not in _scales and not _is_captured(before):  # it is older than the sessions
        _know(scaler, before.item())
    scaled = _mark(scaled, scaler)
    _follow(scaler)
    return scaled


def _is_captured(value: Tensor) -> bool:
    """Returns whether a value is part of a CUDA graph that is being made, and cannot be read."""
    return value.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
