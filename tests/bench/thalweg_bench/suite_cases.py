"""Defines the cases of `thalweg bench suite`: each is one or more commands of `thalweg bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RESNET_BYTES = 102_228_128  # of its gradients in fp32
SCALE_NODES = (2, 4, 8, 16)
MEMORY_NODES = 4
MEMORY_WINDOW_CHUNKS = 16
MEMORY_CHUNK_BYTES = 256 << 10
MICRO = "micro"


@dataclass(frozen=True)
class SuiteCase:
    name: str
    seconds: int  # approximate time on two cores
    commands: tuple[str, ...]  # arguments of `thalweg bench`
    resources: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def command_lines(self) -> list[str]:
        """Returns the commands as a person would type them."""
        env = "".join(f"{name}={value} " for name, value in self.env.items())
        return [f"{env}thalweg bench {command}" for command in self.commands]


def _lab(nodes: int, rate: str, peers: str, more: str = "", *, size: int = RESNET_BYTES) -> str:
    shards = 0 if rate == "none" else nodes
    where = f"lab --nodes {nodes} --shards {shards} --rate {rate} --bytes {size} --peers {peers}"
    return f"{where} {more}".rstrip()


def _allreduce(name: str, seconds: int, command: str) -> SuiteCase:
    return SuiteCase(name, seconds, (command,), resources=True)


def _step(name: str, seconds: int, peers: str, more: str) -> SuiteCase:
    where = "step --nodes 4 --shards 4 --rate 250mbit"
    return SuiteCase(f"step-{name}", seconds, (f"{where} --peers {peers},iperf3 {more}",))


_BOTH = "gloo,iperf3"
_SLOW = _lab(4, "250mbit", "iperf3", "--repeats 3 --slow-shard 10", size=12_800_000)

_ALL = (
    _allreduce("allreduce-4x250mbit", 75, _lab(4, "250mbit", _BOTH)),
    _allreduce("allreduce-4x500mbit", 50, _lab(4, "500mbit", _BOTH)),
    _allreduce("allreduce-4x1gbit", 35, _lab(4, "1gbit", _BOTH)),
    _allreduce("allreduce-4x2gbit", 30, _lab(4, "2gbit", _BOTH)),
    _allreduce("allreduce-8x100mbit", 165, _lab(8, "100mbit", _BOTH)),
    _allreduce("allreduce-4x2workers-250mbit", 80, _lab(4, "250mbit", _BOTH, "--workers 2")),
    _allreduce("fp16-4x1gbit", 25, _lab(4, "1gbit", "iperf3", "--dtype fp16")),
    _allreduce("local-2workers", 20, _lab(1, "none", "gloo,memcpy", "--workers 2")),
    _allreduce("local-4workers", 20, _lab(1, "none", "gloo,memcpy", "--workers 4")),
    _step("resnet50", 100, "ddp,torch-fp16", "--model resnet50 --codec fp16"),
    _step("swin-t", 110, "ddp,torch-fp16", "--model swin-t --codec fp16"),
    # Plain DDP would add its 438 MB and 21 s to each of many steps without new information.
    _step("bert-base", 130, "torch-fp16", "--model bert-base --codec fp16 --repeats 3"),
    _step("4x2workers-fp32", 100, "ddp", "--model resnet50 --workers 2 --repeats 3"),
    SuiteCase("sweep-1gbit", 60, ("sweep --nodes 4 --shards 4 --rate 1gbit --peers gloo",)),
    SuiteCase(
        "scale",
        90,
        tuple(_lab(nodes, "50mbit", "iperf3", size=12_000_000) for nodes in SCALE_NODES),
        resources=True,
    ),
    SuiteCase("latency", 30, ("latency --nodes 4 --shards 4 --count 1000 --peers gloo",)),
    SuiteCase("soak", 25, ("soak --nodes 2 --shards 2 --count 10000",), resources=True),
    SuiteCase(
        "memory",
        25,
        (_lab(MEMORY_NODES, "500mbit", "iperf3", "--repeats 3"),),
        resources=True,
        env={
            "THALWEG_CHUNK_BYTES": str(MEMORY_CHUNK_BYTES),
            "THALWEG_WINDOW_CHUNKS": str(MEMORY_WINDOW_CHUNKS),
        },
    ),
    SuiteCase("slow-shard", 60, (_SLOW, f"{_SLOW} --weighted"), resources=True),
    SuiteCase(MICRO, 40, (MICRO,)),
)
CASES = {case.name: case for case in _ALL}
