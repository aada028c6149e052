"""Makes process groups of the back end "thalweg".

The workers of a world meet and connect to their node's sidecar. Where that world is the default
process group, every other group becomes one of its session's.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from thalweg import _C, policy
from thalweg._job import _collectives, _member, _rendezvous, _shards
from thalweg._job._member import Job
from thalweg._job._topology import Tensor
from thalweg._settings import _checks
from thalweg._settings._config import Config, ConfigError, Network
from thalweg._torch import _patches

_log = logging.getLogger("thalweg")

_ALL = 1  # number of the group of all workers


@dataclass(eq=False)
class World:
    """A process group whose workers are a job, and this worker's session."""

    job: Job
    session: _C.Session
    settings: Config  # that the session was started with
    timeout: float  # of the group's collectives, in seconds; at most as long as a setting may be
    pid: int
    is_taken: bool = False  # a module is attached, whose buckets the session knows by number

    def why_apart(self, asked: Config, model: Sequence[Tensor], cuda_device: int | None) -> str:
        """Returns why a module needs a session of its own; empty: this one can take its gradients.

        A session's settings and device are those with which it was started.
        """
        if cuda_device is not None:
            return "its session is for the CPU, and the module is on a GPU"
        if self.is_taken:
            return "another module is attached to it already"
        for name, ours in self.settings._asdict().items():
            theirs = getattr(asked, name)
            same = _same_codecs(ours, theirs, model) if name == "codec" else ours == theirs
            if not same:
                return (
                    f"{name} is {theirs or '(none)'} but was {ours or '(none)'} in "
                    f"init_process_group(): set THALWEG_{name.upper()} before"
                )
        return ""


_worlds: dict[str, World] = {}  # by the name of the group


def create(options: Any, pg_options: object) -> _C.ProcessGroup:  # noqa: ANN401 - c10d's own type
    """Makes the process group that c10d asks for with `options` (_DistributedBackendOptions).

    All workers of the group call it together. The default process group is a job of its workers,
    and its session serves the groups that are made of them; where the default process group is of
    another back end, each group is a job of its own. Raises what thalweg.ddp.attach() raises.
    """
    if pg_options is not None:
        raise RuntimeError(
            'thalweg: the back end "thalweg" takes no pg_options, got '
            f"{type(pg_options).__name__}: the environment has its settings (docs/settings.md)"
        )
    _tell_callbacks()
    timeout = options.timeout.total_seconds()
    _worlds.pop(options.group_id, None)  # of a group that has been destroyed
    ranks = options.global_ranks_in_group
    if ranks and world_of(dist.group.WORLD) is not None:
        everyone = _backend_of(dist.group.WORLD)
        assert everyone is not None
        part = everyone.make_part(
            store=options.store, ranks=ranks, name=options.group_id, timeout=timeout
        )
        assert part is not None  # c10d asks only those who are in it
        return part
    world = _begin(options, timeout)
    group = _C.ProcessGroup(
        world.session,
        number=_ALL,
        rank=options.group_rank,
        nodes=list(world.job.nodes),
        name=options.group_id,
        timeout=timeout,
        store=options.store,
    )
    group.at_shutdown(functools.partial(_forget, options.group_id, world))
    return group


def _forget(name: str, world: World) -> None:
    if _worlds.get(name) is world:
        del _worlds[name]


def world_of(group: dist.ProcessGroup | None) -> World | None:
    """Returns the world that a process group is; None: it has another back end, or is a part."""
    world = None if group is None else _worlds.get(group.group_name)
    if world is None or world.pid != os.getpid():
        return None
    # A group that has been destroyed leaves its name to another, perhaps of another back end.
    return None if _backend_of(group) is None else world


def _backend_of(group: dist.ProcessGroup | None) -> _C.ProcessGroup | None:
    """Returns the group's back end for tensors on the CPU, if it is this one."""
    if group is None:
        return None
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for the CPU
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return backend if isinstance(backend, _C.ProcessGroup) else None


def make_part(group: dist.ProcessGroup, ranks: Sequence[int], name: str) -> _C.ProcessGroup:
    """Makes a group of some of the ranks of a group of this back end, all of whom call it with the
    same unique name, and of which torch does not hear.

    The name of a group of new_group(use_local_synchronization=True) has the number of those that
    torch knows, which must be the same on ranks that are in no such part.
    """
    backend = _backend_of(group)
    assert backend is not None
    whole = backend
    if world_of(dist.group.WORLD) is not None:  # which has made the group, and counts its parts
        everyone = _backend_of(dist.group.WORLD)
        assert everyone is not None
        members = dist.get_process_group_ranks(group)
        whole, ranks = everyone, [members[rank] for rank in ranks]
    timeout = backend.options._timeout.total_seconds()
    part = whole.make_part(
        store=_rendezvous.default_store(), ranks=list(ranks), name=name, timeout=timeout
    )
    assert part is not None
    return part


def call_at_end(group: dist.ProcessGroup, listener: Callable[[], object]) -> None:
    """Lets destroy_process_group() call `listener` before it ends the group's session."""
    backend = _backend_of(group)
    assert backend is not None
    backend.at_shutdown(listener)


def timeout_of(group: dist.ProcessGroup, cuda_device: int | None = None) -> float:
    """Returns how many seconds the group's collectives wait, at most as many as a setting may have.

    They are those of tensors on that GPU; None: on the CPU.
    """
    if (world := world_of(group)) is not None:
        return world.timeout
    device = torch.device("cpu") if cuda_device is None else torch.device("cuda", cuda_device)
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # MPI's has none, nor have plug-ins'
        timeout = default_pg_timeout
    return float(min(timeout.total_seconds(), _checks.MAX_TIMEOUT))


def running_sidecar() -> tuple[str, bool]:
    """As ddp.attach() asks: the sidecar that this process has started for a process group."""
    for world in _worlds.values():
        ours = world.pid == os.getpid() and world.job.starts_sidecars
        if ours and world.session.status() is None:
            return world.job.sidecar, world.job.listens
    return "", False


def _tell_callbacks() -> None:
    """Counts collectives of a future's callbacks as theirs, whichever thread runs them.

    A rank's callback runs on the completion thread, on one of another back end, or on the thread
    that adds it if the collective has ended by then: which one is chance, and must not change the
    order of collectives.
    """
    for name in ("then", "add_done_callback"):
        _patches.install("process_group", torch._C.Future, name, _add)


def _add(
    add: Callable[..., Any],
    future: torch._C.Future[Any],
    /,
    callback: Callable[[torch._C.Future[Any]], Any],
) -> Any:  # noqa: ANN401 - what the callback's caller gets
    return add(future, functools.partial(_C.call_in_callback, callback))


def _begin(options: Any, timeout: float) -> World:  # noqa: ANN401 - c10d's own type
    """Makes a group a job of its own."""
    problem = ""
    step_timeout = min(timeout, _checks.MAX_TIMEOUT)
    try:
        config, network = Config.from_env(), Network.from_env()
    except ConfigError as error:
        config, network = Config.from_env({}), Network.from_env({})
        problem = str(error)  # the others must hear of it as well
    config = config._replace(
        codec=policy.for_any_model(policy.parse(config.codec)).spec(),
        step_timeout=config.step_timeout or step_timeout,
        node_reduce="sidecar",
    )
    rank, size = options.group_rank, options.group_size
    where = 'the new process group of the back end "thalweg"'
    meeting = _collectives.Meeting(
        None, "process_group", rank, size, config.timeout, options.store, where
    )
    # The others may come as late as the group's own timeout allows.
    late = meeting._replace(
        timeout=max(config.timeout, timeout / 2),
        variable="its timeout, or twice THALWEG_TIMEOUT",
        quiet=config.timeout,
    )
    me = _member.introduction(config, problem, running=running_sidecar())
    workers = _member.meet(me, late)
    job = _member.join(workers, network, meeting, for_all_collectives=True)
    assert job.session is not None
    if rank == 0 and (text := _shards.relays(job.shards, job.place)):
        _log.warning("job %s: %s", job.name, text)
    world = World(job, job.session, config, step_timeout, os.getpid())
    _worlds[options.group_id] = world
    # A process may end without destroying its groups; see _starting, whose finalizers run later.
    weakref.finalize(world, _close, job.session, world.pid)
    _log.info("job %s: rank %d, process group of %d", job.name, rank, size)
    return world


def _close(session: _C.Session, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not touch its parent's session
        session.close()


def _same_codecs(ours: str, theirs: str, model: Sequence[Tensor]) -> bool:
    """Returns whether two policies, as text, mean the same for all parameters of a model."""
    one, other = policy.parse(ours), policy.parse(theirs)
    return one.default == other.default and all(
        one.codec_of(tensor.name, tensor.shape) == other.codec_of(tensor.name, tensor.shape)
        for tensor in model
    )
