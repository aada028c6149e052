"""What servers answer over HTTP (docs/api.md), as far as the command line reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

_SHOWN = 40  # characters of a wrong value


class AnswerError(ValueError):
    """An answer is JSON, but not as a server of this release gives it."""


class _Absent(NamedTuple):
    """A field that earlier releases do not have."""

    pattern: Any


class _Null(NamedTuple):
    """A value that may be null."""

    pattern: Any


_BYTES = {"raw_bytes": float, "wire_bytes": float}
_FAULT = {"job": str, "kind": str, "reason": str, "message": str, "seconds_ago": float}
_NODE = {
    "name": str,
    "state": str,
    "workers": float,
    "silent_seconds": float,
    "last_rounds": float,
    "waited_seconds": float,
    "reconnections": _Absent(float),
}
_PLACEMENT = {"text": str, "seconds_per_byte": float, "ring_seconds_per_byte": float}
_JOB = {
    "name": str,
    "identity": _Absent(str),
    "state": ("gathering", "running", "failed"),
    "failure": str,
    "codec": str,
    "workers": float,
    "shards": float,
    "rounds": float,
    "received": _BYTES,
    "sent": _BYTES,
    "nodes": [_NODE],
    "waiting": _Null({"seconds": float, "nodes": [float]}),
    "placement": _Absent(_Null(_PLACEMENT)),
    "update_seconds": _Absent(float),
    "residual_bytes": _Absent(float),
}
_COLLECTIVE = {
    "name": str,
    "what": str,
    "came": [{"rank": float, "seconds_ago": float}],
    "sent_seconds_ago": _Null(float),
    "done_seconds_ago": _Null(float),
}
_PATTERNS = {
    "shard": {
        "version": str,
        "started_unix_seconds": float,
        "uptime_seconds": float,
        "unix_seconds": _Absent(float),
        "draining": bool,
        "jobs": float,
        "rounds": float,
        "received": _BYTES,
        "sent": _BYTES,
        "held_bytes": float,
        "memory_budget_bytes": _Absent(float),
        "memory_reserved_bytes": _Absent(float),
        "weight": _Absent(float),
        "faults": _Absent([_FAULT]),
    },
    "jobs": {"jobs": [_JOB]},
    "collectives": {"jobs": [{"name": str, "node": float, "collectives": [_COLLECTIVE]}]},
}
_KINDS = {str: "text", bool: "true or false", float: "a number"}


def check(what: str, answer: Any) -> None:  # noqa: ANN401 - it comes from anywhere
    """Checks an answer of /api/v1/`what`. Raises AnswerError, which names the field."""
    _check(f"/api/v1/{what}", answer, _PATTERNS[what])
    for number, job in enumerate(answer["jobs"] if what == "jobs" else ()):
        named = job["waiting"]["nodes"] if job["waiting"] else ()
        if any(node not in range(len(job["nodes"])) for node in named):
            raise AnswerError(f"jobs[{number}].waiting.nodes is {_told(named)}, of nodes it lacks")


def _check(name: str, value: Any, pattern: Any) -> None:  # noqa: ANN401
    if isinstance(pattern, _Null):
        if value is not None:
            _check(name, value, pattern.pattern)
    elif isinstance(pattern, dict):
        if not isinstance(value, dict):
            raise AnswerError(f"{name} is {_told(value)}, expected an object")
        for key, field in pattern.items():
            if key in value or not isinstance(field, _Absent):
                wanted = field.pattern if isinstance(field, _Absent) else field
                inner = key if name.startswith("/") else f"{name}.{key}"
                _check(inner, value.get(key), wanted)
    elif isinstance(pattern, list):
        if not isinstance(value, list):
            raise AnswerError(f"{name} is {_told(value)}, expected a list")
        for number, each in enumerate(value):
            _check(f"{name}[{number}]", each, pattern[0])
    elif isinstance(pattern, tuple):
        if value not in pattern:
            raise AnswerError(f"{name} is {_told(value)}, expected one of {', '.join(pattern)}")
    elif not _is(value, pattern):
        raise AnswerError(f"{name} is {_told(value)}, expected {_KINDS[pattern]}")


def _is(value: object, kind: type) -> bool:
    if kind is not float:
        return isinstance(value, kind)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -1e300 < value < 1e300  # type: ignore[operator]


def _told(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
