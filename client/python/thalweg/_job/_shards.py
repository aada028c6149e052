"""Agrees with a job's other workers on its shards, which the nodes' sidecars may host."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from thalweg import _C
from thalweg._job import _addresses, _collectives, _topology
from thalweg._job._topology import Introduction, Placement
from thalweg._settings._config import ConfigError


class Node(NamedTuple):
    """What a node's first worker tells the others about its sidecar."""

    number: int
    host: str  # as in Introduction
    address: str  # host:port of the shard that it hosts; empty: it hosts none
    aggregators: tuple[str, ...]

    @property
    def host_name(self) -> str:
        return _topology.host_name(self.host)

    def __str__(self) -> str:
        return f"node {self.number} ({self.host_name})"


class Shards(NamedTuple):
    """A job's shards in their order."""

    addresses: tuple[str, ...] = ()  # none: those that each node's sidecar was started with
    hosts: tuple[int, ...] = ()  # numbers of the nodes that host them; -1: a machine of its own
    nodes: tuple[Node, ...] = ()

    def __str__(self) -> str:
        if not self.addresses:
            return ""
        hosted = sum(host >= 0 for host in self.hosts)
        return f"{len(self.addresses)} shards, {hosted} of them in sidecars"

    def hint(self, text: str, me: int) -> str:
        """Returns what to do about an error of node `me` that names a shard of another node."""
        for address, host in zip(self.addresses, self.hosts, strict=True):
            named = re.search(rf"(?<![\w.:]){re.escape(address)}(?!\d)", text)
            if named and host not in (-1, me):
                own = (
                    f"at {self.nodes[me].address}" if self.nodes[me].address else "without a shard"
                )
                return (
                    f". {self.nodes[me]}, {own}, must reach {self.nodes[host]} at {address}: set "
                    "THALWEG_INTERFACE to the interface of the network between them, and open the "
                    "ports of THALWEG_SHARD_PORTS in firewalls; THALWEG_LOCAL_SHARDS=0 uses only "
                    "the machines of THALWEG_AGGREGATORS"
                )
        return ""


@contextlib.contextmanager
def offered(
    workers: Sequence[Introduction],
    place: Placement,
    sidecar: str,
    meeting: _collectives.Meeting,
    *,
    for_all_collectives: bool = False,
) -> Iterator[Shards]:
    """Gives the job's shards, which stay ready for its sessions until the context ends.

    All workers enter it together, with the socket of their sidecar. `for_all_collectives`: the job
    does other collectives than the allreduce of gradients.
    """
    if not _topology.may_host(workers):
        yield Shards()
        return
    offer = _collectives.together(
        lambda: _offer(workers[0], sidecar) if place.local_rank == 0 else None, meeting
    )
    try:
        mine = None
        if offer is not None:
            me = workers[place.ranks[0]]
            extra = me.aggregators or tuple(offer.aggregators)
            mine = Node(place.node, me.host, offer.address, extra)
        nodes = [node for node in _collectives.gather(mine, meeting) if node is not None]
        policy = workers[0].local_shards
        yield arrange(sorted(nodes), policy, for_all_collectives=for_all_collectives)
    finally:
        if offer is not None:
            offer.close()


def arrange(
    nodes: Sequence[Node], local_shards: str, *, for_all_collectives: bool = False
) -> Shards:
    """Lists the shards, those of nodes first. Raises ConfigError, the same on all workers."""
    hosting = [node for node in nodes if node.address]
    idle = [node for node in nodes if not node.address]
    if local_shards == "1" and idle:
        raise ConfigError(
            f"thalweg: local_shards is 1, but the sidecar of {idle[0]} hosts no shard: start it "
            "with --shard-listen HOST:PORT, or set THALWEG_LOCAL_SHARDS to auto"
        )
    for node in nodes:
        if node.aggregators != nodes[0].aggregators:
            raise ConfigError(
                f"thalweg: the aggregators of {nodes[0]} are {_listed(nodes[0].aggregators)}, but "
                f"those of {node} are {_listed(node.aggregators)}: set THALWEG_AGGREGATORS to the "
                "same list on all workers"
            )
    if not hosting and not nodes[0].aggregators:
        raise ConfigError(
            f"thalweg: the workers form {len(nodes)} nodes, but none of their sidecars hosts a "
            "shard, and there is no aggregator to meet at: start the sidecars with --shard-listen "
            "HOST:PORT, or set THALWEG_AGGREGATORS to host:port of every aggregator"
        )
    extra = nodes[0].aggregators
    if local_shards == "auto" and len(extra) >= len(nodes) and not for_all_collectives:
        hosting = []  # they would sum nothing, and the nodes need not reach each other
    _check_addresses(hosting, several_hosts=len({node.host for node in nodes}) > 1)
    addresses = (*(node.address for node in hosting), *extra)
    hosts = (*(node.number for node in hosting), *[-1] * len(extra))
    return Shards(addresses, hosts, tuple(nodes))


def warning(shards: Shards, num_shards: int, num_nodes: int, local_shards: str) -> str:
    """Says what it costs that no node hosts a shard; empty where that costs nothing.

    `num_shards` counts those that the sidecars were started with, too.
    """
    if num_shards >= num_nodes or any(host >= 0 for host in shards.hosts):
        return ""
    n, k = num_nodes, num_shards
    hosting = 2 * n * (n - 1) / (n * n + k * n - 2 * k)  # docs/placement.md
    cause, remedy = "no sidecar hosts a shard", "start the sidecars with --shard-listen HOST:PORT"
    remedy += " (`thalweg run --local-shards auto`)"
    if local_shards == "0":
        cause, remedy = "THALWEG_LOCAL_SHARDS (local_shards) is 0", "set it to auto"
    serve = "1 aggregator serves" if k == 1 else f"{k} aggregators serve"
    return (
        f"{cause}, and {serve} {n} nodes. On equal links the gradients take {n / k:.3g} times as "
        f"long as one link needs to carry them; with a shard on every node they would take "
        f"{hosting:.3g} times as long. {remedy[0].upper()}{remedy[1:]}, or use {n} aggregators"
    )


def relays(shards: Shards, place: Placement) -> str:
    """Says through what the collectives of nodes go that host no shard; empty: there are none."""
    idle = [node for node in range(place.num_nodes) if node not in shards.hosts]
    if not idle or place.num_nodes == 1:
        return ""
    numbers = ", ".join(map(str, idle))
    who = f"node {numbers} hosts" if len(idle) == 1 else f"nodes {numbers} host"
    return (
        f"{who} no shard: what all_gather, reduce_scatter, "
        "broadcast, gather, scatter, all_to_all and send bring to them crosses the network twice; "
        "start their sidecars with --shard-listen HOST:PORT, and leave THALWEG_LOCAL_SHARDS at auto"
    )


# What gRPC says of a server that is not what it expects, and what to ask of it.
_QUESTIONS = {
    "http1.x server": "is this its HTTP port? Sidecars need the one at which it listens",
    "wrong version number": "does it expect no TLS? THALWEG_TLS_CERT is set here",
    "Socket closed": "does it expect TLS (THALWEG_TLS_CERT, THALWEG_TLS_KEY, THALWEG_TLS_CA)?",
}


def question(text: str) -> str:
    """Returns what to ask about a shard that the error `text` cannot reach; empty: nothing."""
    if "cannot be reached" not in text:
        return ""
    found = (asked for said, asked in _QUESTIONS.items() if said in text)
    return next((f": {asked} `thalweg doctor --aggregators` tells" for asked in found), "")


def _check_addresses(hosting: Sequence[Node], *, several_hosts: bool) -> None:
    """Raises ConfigError if other nodes cannot reach a node at what it publishes."""
    if several_hosts:
        for node in hosting:
            _addresses.check_published(node.host_name, _addresses.host_in(node.address))
    first: dict[str, Node] = {}
    for node in hosting:
        other = first.setdefault(node.address, node)
        if other is not node:
            raise ConfigError(
                f"thalweg: {other} and {node} both publish {node.address} as the address of the "
                "shard that they host: set THALWEG_INTERFACE on each host to the interface or the "
                "address of the network between them"
            )


def _offer(job: Introduction, sidecar: str) -> _C.ShardOffer:
    return _C.ShardOffer(sidecar_path=sidecar, job=job.job, secret=job.secret, timeout=job.timeout)


def _listed(aggregators: Sequence[str]) -> str:
    return ",".join(aggregators) or "none"
