"""Runs a training in one membership after the other."""

from __future__ import annotations

import functools
import gc
import logging
import math
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from thalweg import ddp
from thalweg._job import _member
from thalweg._settings import _config
from thalweg.elastic import _nodes
from thalweg.elastic._gathering import Finished, FirstWorker, FurtherWorker
from thalweg.elastic._mailbox import Plan
from thalweg.elastic._nodes import Address
from thalweg.elastic._quorum import Rules, Standing
from thalweg.elastic._state import State, _Interrupted

_Result = TypeVar("_Result")

# A worker that fails so often without a commit in between fails for good.
_TRIES = 3
# Others wait so long for the shard of a node that is gone: less than where its loss ends the job.
_RECONNECT_SECONDS = "3"
_GROUP_SECONDS = default_pg_timeout.total_seconds()

_log = logging.getLogger("thalweg")


def run(
    train: Callable[[State], _Result] | None = None,
    *,
    nodes: str | None = None,
    node: int | None = None,
    min_nodes: int = 1,
    backend: str = "thalweg",
    wait: float = 600.0,
) -> Any:  # noqa: ANN401 - a decorator, with arguments or without
    """Lets `train`, a function of a thalweg.elastic.State, go on without lost nodes.

    Each call makes the default process group of the nodes that are there, gives all workers the
    state of the last commit, and calls `train`. When that raises because a node was lost, and when
    nodes have come, it does so again. Returns what `train` returns, when that of all has returned;
    the last process group stays.

    `nodes` and `node` are THALWEG_ELASTIC and this node's place there. Fewer nodes than `min_nodes`
    do not train. `backend` is that of the process group. `wait` is how many seconds a worker waits
    for enough nodes; then it raises TimeoutError, or returns what `train` has returned if only the
    others' end was not heard. RuntimeError, ConnectionError or TimeoutError of `train` mean the
    loss of a node; the third without a commit in between is raised.
    """
    if train is None:
        return functools.partial(
            run, nodes=nodes, node=node, min_nodes=min_nodes, backend=backend, wait=wait
        )

    @functools.wraps(train)
    def wrapper(state: State) -> _Result:
        runner = _Runner(nodes, node, min_nodes, backend, wait)
        try:
            result = runner.run(train, state)
            _Runner.ended += 1
            return result
        finally:
            runner.close()

    return wrapper


class _Runner:
    """A worker's memberships."""

    ended: ClassVar[int] = 0  # trainings of this process

    def __init__(
        self, nodes: str | None, node: int | None, min_nodes: int, backend: str, wait: float
    ) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "thalweg: run() makes the default process group, but there is one already: "
                "destroy it before"
            )
        # For sidecars that workers start.
        os.environ.setdefault("THALWEG_RECONNECT", _RECONNECT_SECONDS)
        addresses, self._node = _nodes.find(nodes, node)
        if min_nodes > len(addresses):
            raise ValueError(f"thalweg: min_nodes is {min_nodes}, of {len(addresses)} nodes")
        self._backend = backend
        self._wait = wait
        self._settings = _config.Config.from_env()
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._plan: Plan | None = None
        self._store: TCPStore | None = None  # that this worker serves
        self._host = addresses[self._node].host
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._standing = Standing(
            self._node,
            workers=workers,
            nodes=",".join(map(str, addresses)),
            ended=_Runner.ended,
        )
        self._gatherer: FirstWorker | FurtherWorker
        if self._local_rank == 0:
            seconds = self._settings.timeout
            rules = Rules(len(addresses), min_nodes, seconds, seconds)
            self._gatherer = FirstWorker(
                addresses, self._standing, rules, self._open_store, _member.abort_for_lost
            )
        else:
            self._gatherer = FurtherWorker(addresses[self._node])

    def run(self, train: Callable[[State], _Result], state: State) -> _Result:
        # Each membership ends with a collection, which need not look at all that torch has loaded.
        gc.collect()
        gc.freeze()
        results: list[_Result] = []  # of a train() after which others were not heard any more
        failed_at, failures = -1, 0
        while True:
            standing = self._standing._replace(commits=state.commits)
            # Others whose train() has returned, too, may have heard so from all, and have gone.
            silence = self._settings.timeout if results else math.inf
            try:
                plan = self._gatherer.gather(standing, self._plan, self._wait, silence)
            except (Finished, ConnectionError, TimeoutError):
                if results:
                    return results[0]
                raise
            try:
                self._begin(plan, state)
                results = [train(state)]
                dist.barrier()
                self._gatherer.finish(self._standing)
                return results[0]
            except _Interrupted:
                _log.info("elastic: nodes have come: another membership begins")
            except (RuntimeError, ConnectionError, TimeoutError) as error:
                failures = failures + 1 if state.commits == failed_at else 1
                failed_at = state.commits
                if failures == _TRIES:
                    raise
                _log.warning("elastic: %s: %s", type(error).__name__, str(error).split("\n")[0])
                traceback.clear_frames(error.__traceback__)  # they hold the process group
            self._leave(state)

    def close(self) -> None:
        gc.unfreeze()
        self._gatherer.close()

    def _begin(self, plan: Plan, state: State) -> None:
        """Makes the process group of a membership, and gives this worker its newest state."""
        began = time.monotonic()
        self._plan = plan
        rank = plan.first_rank(self._node) + self._local_rank
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan.world_size))
        with self._gatherer.guard(plan, self._give_up):
            dist.init_process_group(
                self._backend,
                store=PrefixStore(plan.name, self._store_of(plan)),
                rank=rank,
                world_size=plan.world_size,
                timeout=timedelta(seconds=self._settings.step_timeout or _GROUP_SECONDS),
            )
        membership = plan.membership(rank)
        state._begin(membership, self._standing.generation, self._gatherer.has_comers)
        self._standing = self._standing._replace(generation=plan.generation, members=plan.nodes)
        self._gatherer.begin(self._standing)
        if rank == 0:
            took = time.monotonic() - began
            _log.warning(
                "elastic: %s, begun in %.1f s at commit %d", membership, took, state.commits
            )

    def _leave(self, state: State) -> None:
        """Ends this worker's part in a membership; that of the others fails, if it has not yet."""
        state.membership = None
        ddp.close_all()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._close_store()
        gc.collect()  # modules of the last membership hold its gradients

    def _open_store(self) -> Address:
        """Starts a store for a membership's workers, this one among them, to meet."""
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        return Address(self._host, self._store.port)

    def _give_up(self) -> None:
        """Ends this worker's wait for others that are to begin a membership, and so theirs."""
        self._close_store()
        _member.abort_all()

    def _close_store(self) -> None:
        """Ends all waits for what others put into the store that this worker has opened."""
        self._store = None

    def _store_of(self, plan: Plan) -> TCPStore:
        seconds = timedelta(seconds=self._settings.timeout)
        return TCPStore(plan.store.host, plan.store.port, is_master=False, timeout=seconds)
