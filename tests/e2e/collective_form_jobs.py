"""Contains jobs on the back end "thalweg" with all forms of collectives: `collective_form_jobs.py
NAME OUT`.

BACKEND is what init_process_group() is asked for, DEVICE has the tensors.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import group_forms  # noqa: F401 - adds checks
import job_runner
import sparse_collective_forms  # noqa: F401 - adds checks
import torch
import torch.distributed as dist
from collective_forms import CHECKS, outcome
from waiting import until

from thalweg._job import _member


def forms() -> dict[str, str]:
    """Makes all checks; returns their errors, of which none must be."""
    return {name: outcome(one) for name, one in CHECKS.items()}


def sums() -> list[float]:
    """Takes part in two sums, of the default group and of another one."""
    tensors = [torch.ones(2) for _ in range(2)]
    dist.all_reduce(tensors[0])
    dist.all_reduce(tensors[1], group=dist.new_group())
    dist.barrier()
    return [tensor.sum().item() for tensor in tensors]


def ended_twice() -> list[str]:
    """Ends the group's back end by all means, each more than once; returns the errors."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.all_reduce(torch.ones(2))
    calls = [backend.shutdown, backend.shutdown, backend.abort, backend.abort]
    errors = [outcome(call) for call in calls]
    late = outcome(lambda: dist.all_reduce(torch.ones(2)))
    return [*errors, "" if "the session was closed" in late else f"not closed: {late}"]


def ended_in_a_callback() -> list[str]:
    """Rank 1 ends the process group in a callback."""
    store = dist.distributed_c10d._get_default_store()
    refusal = ""
    if dist.get_rank() == 0:
        store.wait(["there is a callback"])  # otherwise rank 1's own thread may call it
        dist.all_reduce(torch.ones(2))
    else:
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        refused = future.then(lambda _: outcome(dist.destroy_process_group))
        store.set("there is a callback", "")
        refusal = refused.wait()
    return [refusal, outcome(lambda: dist.all_reduce(torch.ones(2)))]


def awaited_in_a_child() -> list[str]:
    """Waits in a forked child for a collective that the parent began, which waits for rank 0."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["the child has waited"])
        dist.all_reduce(torch.ones(2))
        return [""]
    work = dist.all_reduce(torch.ones(2), async_op=True)
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, outcome(work.wait).encode())
        os._exit(0)
    os.wait()
    store.set("the child has waited", "")
    work.wait()
    return [os.read(read, 1 << 12).decode()]


def aborted() -> list[str]:
    """Aborts while a collective waits for the other ranks, which wait for something else."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.barrier()
    job_runner.meet()
    if dist.get_rank() > 0:
        return [outcome(lambda: dist.recv(torch.zeros(2), src=0))]
    work = dist.all_reduce(torch.ones(2), async_op=True)
    backend.abort()
    return [outcome(work.wait), outcome(backend.abort)]


def aborted_while_copying() -> list[str]:
    """Aborts while a copy of values without gaps, which the call has made, goes to the sidecar."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def abort() -> None:
        maps = Path("/proc/self/maps")
        until(
            "memory for the values", lambda: "thalweg-given" in maps.read_text(), 60, every=0.0001
        )
        backend.abort()

    with ThreadPoolExecutor() as pool:
        aborting = pool.submit(abort)
        values = torch.ones(2, 16 << 20).t()
        failed = outcome(lambda: dist.all_reduce(values))
        aborting.result()
    return [failed]


def aborted_as_by_elastic() -> list[str]:
    """Rank 0 fails all jobs of its process while the other ranks wait for something else."""
    dist.barrier()
    job_runner.meet()
    if dist.get_rank() > 0:
        return [outcome(lambda: dist.recv(torch.zeros(2), src=0))]
    return [outcome(_member.abort_for_lost), outcome(lambda: dist.all_reduce(torch.ones(2)))]


JOBS = {
    job.__name__: job
    for job in (
        *(forms, sums, ended_twice, ended_in_a_callback, awaited_in_a_child),
        *(aborted, aborted_while_copying, aborted_as_by_elastic),
    )
}


def main() -> None:
    torch.set_default_device(os.environ.get("DEVICE", "cpu"))
    job_runner.run(lambda name: JOBS[name](), os.environ.get("BACKEND", "thalweg"))


if __name__ == "__main__":
    main()
