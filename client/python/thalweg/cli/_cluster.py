"""`thalweg doctor --cluster` checks the shards, their jobs and the cluster that they run on."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from thalweg import __version__
from thalweg.cli import _http, _kubernetes, _status_table
from thalweg.cli._finding import Finding
from thalweg.cli._look import Look, look
from thalweg.cli._status_table import clean, duration

_HTTP_PORT = 7071  # the chart's port
_CONNECT_SECONDS = 2.0
# difference of clocks beyond which the logs of two machines cannot be compared
_APART_SECONDS = 1.0
_SILENT_SECONDS = 5.0  # the job fails after 10
_RECENT_SECONDS = 3600.0
_FAULTS = 5
_SLOWER_THAN_A_RING = 1.01  # shares are whole numbers, so that equal times differ a little
# HTTP/2, and so gRPC, begins with a client's greeting and empty settings; the server answers with a
# frame of this type.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
_UNASKED = "not asked more without THALWEG_TLS_CERT and THALWEG_TLS_KEY"


class _Visit(NamedTuple):
    """A shard's answers over HTTP."""

    look: Look
    apart_seconds: float  # lower bound of the difference between its clock and ours


def cluster(
    aggregators: Sequence[str], shards: Sequence[str], access: _http.Access, namespace: str
) -> int:
    """Prints a line per finding and returns the exit code.

    `aggregators` are gRPC addresses, `shards` HTTP addresses: without them, the aggregators' hosts
    with the chart's port.
    """
    http = shards or [f"{a.rpartition(':')[0]}:{_HTTP_PORT}" for a in aggregators]
    with ThreadPoolExecutor(1 + len(aggregators) + len(http)) as pool:
        # All shards are asked at once, so that one that does not answer delays no other.
        below = pool.submit(_kubernetes.findings, namespace)
        opened = itertools.repeat(access)
        greeted, visits = pool.map(_greet, aggregators, opened), pool.map(_visit, http, opened)
        findings = [*greeted, *_shards(list(visits)), *below.result()]
    for finding in findings:
        print(f"{finding.level:<4}  {clean(finding.text)}")
    count = Counter(finding.level for finding in findings)
    print(f"{count['ok']} ok, {count['warn']} warn, {count['FAIL']} FAIL")
    return int(count["FAIL"] > 0)


def _greet(address: str, access: _http.Access = _http.PLAIN) -> Finding:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with contextlib.ExitStack() as stack:
            connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
            stack.enter_context(connection)
            if access.grpc is not None:
                connection = access.grpc.wrap_socket(connection, server_hostname=host)
                stack.enter_context(connection)
                if not access.has_certificate:
                    return Finding("note", f"gRPC {address}: speaks TLS; {_UNASKED}")
            head = _answer(connection)
    except ssl.SSLError as error:
        return Finding("FAIL", f"gRPC {address}: {_http.tls_error(error)}")
    except OSError as error:
        return Finding("FAIL", f"gRPC {address}: cannot be reached: {error}")
    if len(head) < 9 or head[3] != _SETTINGS:
        remark = "gRPC with TLS: give --tls-ca"
        if access.grpc is not None:
            remark = "it refuses the certificate in THALWEG_TLS_CERT"
        return Finding("FAIL", f"gRPC {address}: something else than gRPC answers, or {remark}")
    return Finding("ok", f"gRPC {address}: answers")


def _answer(connection: socket.socket) -> bytes:
    """Returns the head of the first frame; less when the other end has closed the connection."""
    head = b""
    # A refusal may come while the greeting is still being sent.
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        connection.sendall(_GREETING)
        while len(head) < 9 and (more := connection.recv(9 - len(head))):
            head += more
    return head


def _visit(address: str, access: _http.Access) -> _Visit:
    before = time.time()
    seen = look(address, access)
    after = time.time()
    clock = float(seen.shard.get("unix_seconds", before))
    return _Visit(seen, max(0.0, before - clock, clock - after))


def _shards(visits: Sequence[_Visit]) -> Iterator[Finding]:
    for seen, apart in visits:
        if seen.error:
            yield Finding("FAIL", f"HTTP {seen.address}: {seen.error}")
            continue
        up = duration(float(seen.shard["uptime_seconds"]))
        yield Finding("ok", f"HTTP {seen.address}: thalweg {seen.shard['version']}, up for {up}")
        if seen.shard["draining"]:
            yield Finding("warn", f"HTTP {seen.address}: is shutting down, takes no new jobs")
        if apart > _APART_SECONDS:
            text = f"its clock is {duration(apart)} from this machine's"
            yield Finding("warn", f"HTTP {seen.address}: {text}")
    looks = [visit.look for visit in visits if not visit.look.error]
    yield from _versions(looks)
    yield from _jobs(looks)
    yield from _faults(looks)


def _versions(looks: Sequence[Look]) -> Iterator[Finding]:
    wire = _by_value(looks, "wire_version")
    if len(wire) > 1:
        yield Finding("FAIL", f"shards speak different wire versions: {_told(wire)}")
    versions = _by_value(looks, "version")
    if len(versions) > 1:
        yield Finding("warn", f"shards are of different versions: {_told(versions)}")
    elif versions and __version__ not in versions:
        yield Finding(
            "warn", f"this machine has thalweg {__version__}, the shards {_told(versions)}"
        )


def _by_value(looks: Sequence[Look], key: str) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for seen in looks:
        result.setdefault(str(seen.shard.get(key, "unknown")), []).append(seen.address)
    return result


def _told(values: dict[str, list[str]]) -> str:
    return "; ".join(f"{value} ({', '.join(who)})" for value, who in sorted(values.items()))


def _jobs(looks: Sequence[Look]) -> Iterator[Finding]:
    for name, job in _status_table.merged_jobs(looks).items():
        if job.state == "failed":
            yield Finding("FAIL", f"job {name}: has failed: {job.remark}")
            continue
        problems = [f"node {i} {text}" for i, node in enumerate(job.nodes) if (text := _ails(node))]
        if job.shards != job.of_shards:
            problems.append(f"it is on {job.shards} of its {job.of_shards} shards")
        for problem in problems:
            yield Finding("warn", f"job {name}: {problem}")
        if not problems:
            size = f"{len(job.nodes)} nodes, {job.workers} workers"
            yield Finding("ok", f"job {name}: {job.state}, {size}")
        # As soon as a shard has a weight, the weights decide.
        if job.placement and not any(seen.shard.get("weight") for seen in looks):
            yield _cost(name, job.placement)


def _cost(name: str, placement: Mapping[str, Any]) -> Finding:
    """Tells what the job's links take and what would help; warns where a ring would be faster."""
    ring = float(placement["ring_seconds_per_byte"])
    slower = 0 < _SLOWER_THAN_A_RING * ring < float(placement["seconds_per_byte"])
    return Finding("warn" if slower else "ok", f"job {name}: {placement['text']}")


def _ails(node: Mapping[str, Any]) -> str:
    """Returns what is wrong with a node of a job; empty when nothing is."""
    silent = float(node["silent_seconds"])
    if node["state"] == "missing":
        return "has not come"
    if node["state"] == "active" and silent > _SILENT_SECONDS:
        return f"({node['name']}) has sent nothing for {duration(silent)}"
    return ""


def _faults(looks: Sequence[Look]) -> Iterator[Finding]:
    recent = [f for f in _status_table.merged_faults(looks) if f["seconds_ago"] < _RECENT_SECONDS]
    for fault in recent[:_FAULTS]:
        when, what = duration(float(fault["seconds_ago"])), f"{fault['kind']}, {fault['reason']}"
        yield Finding("warn", f"{when} ago, job {fault['job']}: {what}: {fault['message']}")
