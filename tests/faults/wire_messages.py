"""The messages of proto/thalweg/v1 as Python classes, without generated files."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "thalweg")
        command = ["protoc", f"-I{PROTO}", "--include_imports", f"--descriptor_set_out={out}"]
        subprocess.run([*command, "thalweg/v1/exchange.proto"], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


@functools.cache
def _class(name: str) -> Any:
    descriptor = _pool().FindMessageTypeByName(f"thalweg.v1.{name}")
    return message_factory.GetMessageClass(descriptor)


def message(name: str, **fields: Any) -> Any:
    """Returns a new message, such as message("Open", token=1)."""
    return _class(name)(**fields)


def parse(name: str, data: bytes) -> Any:
    return _class(name).FromString(data)


@functools.cache
def wire_version() -> int:
    """Returns the version that the servers of this checkout speak."""
    header = (ROOT / "core" / "base" / "protocol.h").read_text()
    found = re.search(r"\bkWireVersion = (\d+);", header)
    assert found, "core/base/protocol.h does not say kWireVersion"
    return int(found[1])


def join_request(job: str, *, node: int = 0, nodes: int = 1, **fields: Any) -> Any:
    """Returns a valid request to join a job without a secret, with one worker on each node."""
    known = {
        "max_wire_version": wire_version(),
        "min_wire_version": wire_version(),
        "job": job,
        "node": node,
        "node_name": "stranger",
        "workers": 1,
        "num_nodes": nodes,
        "world_size": nodes,
        "num_shards": 1,
        "codec": "fp32",
        "round_timeout_ms": 3_600_000,
    }
    return message("JoinRequest", **known | fields)
