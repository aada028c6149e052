"""Joins jobs as nodes with one worker each, through the sidecars' shards, without torch's DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from averaging import Averaging
from harness import TIMEOUT

from thalweg import _C

JOB = "everybody-knows-it"
ELEMENTS = 5000


def session(
    sidecar, node, shards, hosts, secret, *, job=JOB, nodes=2, timeout=TIMEOUT, chunk_bytes=4096
):
    """Joins the job as a node."""
    return _C.Session(
        sidecar_path=sidecar,
        job=job,
        rank=node,
        world_size=nodes,
        node=node,
        num_nodes=nodes,
        node_name=f"host{node}",
        local_rank=0,
        local_size=1,
        codec="fp32",
        chunk_bytes=chunk_bytes,
        timeout=timeout,
        shards=shards,
        hosts=hosts,
        secret=secret,
    )


def train(sidecar, node, shards, hosts, secret, **settings):
    """Trains as a node of the job; returns the mean of 2 ** (node % 8)."""
    with contextlib.closing(session(sidecar, node, shards, hosts, secret, **settings)) as joined:
        average = Averaging(joined, [ELEMENTS])
        for _ in range(3):
            [mean] = average.means([torch.full((ELEMENTS,), 2.0 ** (node % 8))])
    return mean


@contextlib.contextmanager
def offers(sidecars, secret, job=JOB) -> Iterator[list[str]]:
    """Gives the addresses of the shards that the sidecars host for the job."""
    with contextlib.ExitStack() as stack:
        made = [
            _C.ShardOffer(sidecar_path=path, job=job, secret=secret, timeout=TIMEOUT)
            for path in sidecars
        ]
        for offer in made:
            stack.callback(offer.close)
        yield [offer.address for offer in made]
