"""Lets workers sum their gradients among themselves; one of them speaks to the sidecar (path C).

A node's worker of local rank 0 is its leader, the others are its followers:

    follower   hook: divide, sum ─┐                                         ┌─▶ take in, complete
    leader     hook: divide, sum ─┴▶ the session's hook ─▶ announce, spread ┴─▶ complete

Sums are issued in the order of DDP's hooks, and so are the results, whatever order they come in:
the collectives of a group need the same order on all workers. A follower joins in a result's
broadcast only when the leader has announced it. Until then it can still receive a failure, and no
GPU is kept busy by waiting.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store, _register_comm_hook
from torch.nn.parallel import DistributedDataParallel

from thalweg import _C
from thalweg._job import _rendezvous
from thalweg._job._topology import Placement
from thalweg.node import _words
from thalweg.node._follower import Follower
from thalweg.node._leader import Leader
from thalweg.node._sums import NodeSums, Outcome
from thalweg.node._waits import Waits, look_interval


class Node(NamedTuple):
    """The workers of one node, as one of them sees them."""

    job: str
    place: Placement
    world_size: int
    timeout: float  # without a sign of life
    step_timeout: float  # of a round that waits for others


def join(
    model: DistributedDataParallel,
    parameters: list[tuple[str, torch.Tensor]],
    node: Node,
    session: _C.Session | None,
) -> Leader | Follower:
    """Makes `model` average the gradients of its `parameters` over its node, and the leader, with
    `session`, over the nodes.

    Call it on all workers of the node. Raises RuntimeError, OSError (TimeoutError among them).
    """
    # The name of a job is new at every attach(): no other attempt has written there.
    prefix = f"thalweg/{node.job}/node{node.place.node}"
    store = PrefixStore(prefix, _rendezvous.default_store())
    device = parameters[0][1].device if parameters else torch.device("cpu")
    interval = look_interval(node.timeout, node.step_timeout)
    member: Leader | Follower
    if session is not None:
        lines = _gather_followers(store, node)
        sums = NodeSums(store, node.place, node.world_size, device, node.step_timeout)
        hook = _C.DdpHook(session, parameters)
        waits = Waits(node.place.ranks, node.step_timeout)
        member = Leader(
            session,
            hook,
            sums,
            lines,
            waits=waits,
            timeout=node.timeout,
            look_interval=interval,
        )
    else:
        line = _find_leader(store, node)
        sums = NodeSums(store, node.place, node.world_size, device, node.step_timeout)
        member = Follower(line, sums, node.place.ranks[0], node.timeout, interval)
    try:
        _register(model, member)
    except BaseException:
        member.close()
        raise
    return member


def _register(model: DistributedDataParallel, member: Leader | Follower) -> None:
    """Does what model.register_comm_hook() does, but for keeping the hook in the module as well,
    which could be neither copied nor saved then.
    """
    assert model.logger is not None
    model.logger._set_comm_hook_name(node_hook.__qualname__)
    _register_comm_hook(model.reducer, _Hooked(member, weakref.ref(model)), node_hook)


def _gather_followers(store: Store, node: Node) -> dict[int, _words.Line]:
    listener, address = _words.listen()
    with listener:
        store.set("leader", "\n".join(address))
        return _words.accept(listener, address.token, set(node.place.ranks[1:]), node.timeout)


def _find_leader(store: Store, node: Node) -> _words.Line:
    store.wait(["leader"], timedelta(seconds=node.timeout))
    address = _words.Address(*store.get("leader").decode().split("\n"))
    rank = node.place.ranks[node.place.local_rank]
    return _words.connect(address, rank, node.timeout)


class _Hooked(NamedTuple):
    """The state of the hook. The module's reducer owns it, so it must not own the module."""

    member: Leader | Follower
    model: weakref.ref[DistributedDataParallel]


def node_hook(hooked: _Hooked, bucket: GradBucket) -> Outcome:
    """Is the hook in torch's form; DDP's statistics contain its name."""
    model = hooked.model()
    assert model is not None
    _C.scale_to_joined(model.reducer, bucket.buffer())
    return hooked.member.run_hook(bucket)
