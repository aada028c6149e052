"""Reads what a shard reports about itself over HTTP (docs/api.md)."""

from __future__ import annotations

import http.client
from typing import Any, NamedTuple

from thalweg.cli import _http


class Look(NamedTuple):
    """One shard's answer."""

    address: str
    error: str  # why there is no answer; empty when there is one
    shard: dict[str, Any]  # /api/v1/shard
    jobs: list[dict[str, Any]]  # the jobs of /api/v1/jobs


def look(address: str, access: _http.Access = _http.PLAIN) -> Look:
    """Asks one shard."""
    try:
        shard, jobs = _get(access, address, "shard"), _get(access, address, "jobs")["jobs"]
        if not isinstance(jobs, list):
            raise ValueError("jobs is not a list")
    except _http.AccessError as error:
        return Look(address, str(error), {}, [])
    except (OSError, http.client.HTTPException) as error:
        return Look(address, f"not reachable: {_reason(error)}", {}, [])
    except (ValueError, KeyError, TypeError) as error:
        return Look(address, f"is no shard of Thalweg: {error}", {}, [])
    return Look(address, "", shard, jobs)


def _get(access: _http.Access, address: str, what: str) -> dict[str, Any]:
    answer = _http.get_json(access, address, f"/api/v1/{what}")
    if not isinstance(answer, dict):
        raise ValueError(f"/api/v1/{what} is not an object")
    return answer


def _reason(error: BaseException) -> str:
    cause = getattr(error, "reason", None) or error
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
