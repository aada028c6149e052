"""Prepares torch's own harness, in which a test starts workers, for programs that run its tests."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

from thalweg._job import _topology

# By which tests of several processes are told from those of threads.
STARTS_PROCESSES = ("MultiProcessTestCase", "MultiProcContinuousTest")


def prepare(seconds: float) -> None:
    """Sets what the harness reads when it is loaded: a test ends its workers after `seconds`."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(seconds))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if importlib.util.find_spec("expecttest") is None:  # the tests need its name only
        stand_in = types.ModuleType("expecttest")
        vars(stand_in)["TestCase"] = unittest.TestCase
        sys.modules["expecttest"] = stand_in


def fork_workers(seconds: float, hosts: int = 1) -> Any:
    """Prepares the harness, and returns it. Its tests fork their workers, and count them.

    torch's own choice, spawn, loads torch in each worker. The process must have no other threads.
    Thalweg takes the workers for those of so many hosts, in turn.
    """
    prepare(seconds)
    multiprocessing.set_start_method("fork")
    harness: Any = importlib.import_module("torch.testing._internal.common_distributed")
    for name in STARTS_PROCESSES:
        _count_workers(getattr(harness, name))
    harness.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(
        multiprocessing.get_context("fork").Process
    )
    run = harness.MultiProcessTestCase._run.__func__

    def on_host(case: Any, rank: int, *args: Any, **kwargs: Any) -> None:
        place(rank, hosts)
        run(case, rank, *args, **kwargs)

    harness.MultiProcessTestCase._run = classmethod(on_host)
    return harness


def place(rank: int, hosts: int) -> None:
    """Makes thalweg take this process, a worker, for one on the rank's host of so many."""
    if hosts > 1:
        host = f"host{rank % hosts}/{_topology.host_id()}"
        vars(_topology)["host_id"] = lambda: host


def add_hosts_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="let thalweg take the workers for those of N hosts (default: 1);\n"
        "THALWEG_INTERFACE must name an address of this one other than 127.0.0.1",
    )


def load(path: Path) -> types.ModuleType:
    """Returns the module of a file, which may import its neighbours. Raises what loading raises."""
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))


def why_not_loaded(error: Exception) -> str:
    """Returns what is said of a file that raises an error when it is loaded."""
    return f"it cannot be loaded: {type(error).__name__}: {error}"


def cases(module: types.ModuleType) -> list[type[unittest.TestCase]]:
    """Returns the test cases that a module defines and that have tests."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == module.__name__
        and tests(value)
    ]


def tests(case: type) -> list[str]:
    """Returns the names of a class's tests."""
    return list(unittest.defaultTestLoader.getTestCaseNames(case))


def _count_workers(case: Any) -> None:
    set_up = case.setUp

    def counted(self: Any) -> None:
        set_up(self)
        self.started = int(self.world_size)

    case.started = 0
    case.setUp = counted
