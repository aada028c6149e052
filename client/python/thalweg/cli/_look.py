"""Reads what shards and sidecars report about themselves over HTTP (docs/api.md)."""

from __future__ import annotations

import http.client
from typing import Any, NamedTuple

from thalweg.cli import _answers, _http

_ERRORS = (OSError, http.client.HTTPException, ValueError, _http.AccessError)


class Look(NamedTuple):
    """One shard's answer."""

    address: str
    error: str  # why there is no answer; empty when there is one
    shard: dict[str, Any]  # /api/v1/shard
    jobs: list[dict[str, Any]]  # the jobs of /api/v1/jobs


class Collectives(NamedTuple):
    """A sidecar's answer."""

    address: str
    error: str  # why there is no answer; empty when there is one
    jobs: list[dict[str, Any]]  # the jobs of /api/v1/collectives


def look(address: str, access: _http.Access = _http.PLAIN) -> Look:
    """Asks one shard."""
    try:
        shard, jobs = _get(access, address, "shard"), _jobs(access, address, "jobs")
    except _ERRORS as error:
        return Look(address, _problem(error, "shard"), {}, [])
    return Look(address, "", shard, jobs)


def look_at_sidecar(address: str, access: _http.Access = _http.PLAIN) -> Collectives:
    """Asks one sidecar."""
    try:
        return Collectives(address, "", _jobs(access, address, "collectives"))
    except _ERRORS as error:
        return Collectives(address, _problem(error, "sidecar"), [])


def _jobs(access: _http.Access, address: str, what: str) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = _get(access, address, what)["jobs"]
    return jobs


def _get(access: _http.Access, address: str, what: str) -> dict[str, Any]:
    answer: dict[str, Any] = _http.get_json(access, address, f"/api/v1/{what}")
    _answers.check(what, answer)
    return answer


def _problem(error: Exception, what: str) -> str:
    if isinstance(error, _http.AccessError):
        return str(error)
    if isinstance(error, (OSError, http.client.HTTPException)):
        return f"not reachable: {_reason(error)}"
    if isinstance(error, _answers.AnswerError):
        return f"answers as no {what} of this release does: {error}"
    return f"is no {what} of Thalweg: {error}"


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):  # a handshake's says where OpenSSL was
        return "timed out"
    cause = getattr(error, "reason", None) or error
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
