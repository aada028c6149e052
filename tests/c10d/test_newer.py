"""Tests the command that runs newer tests of torch's back ends over several back ends.

Those tests are not in torch's wheel, so that these bring some of the same two forms.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).with_name("newer.py")

# As in torch's repository: classes without a back end, which are told what that can do.
COMMON = """
import torch
import torch.distributed as dist

STANDARD_DTYPES = (torch.float32,)
COMPLEX_DTYPES = (torch.complex64,)
FLOAT8_DTYPES = (torch.float8_e5m2,)


class Base:
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def begin(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group(self.backend_name, rank=self.rank, world_size=2, store=store)
"""
COLLECTIVES = """
import torch
import torch.distributed as dist
from c10d_backend_common import Base
from thalweg._job import _topology
from torch.testing._internal.common_utils import TestCase


class AbstractMadeTest(Base):
    def test_sum(self):
        self.begin()
        for dtype in self.dtypes + self.complex_dtypes:
            tensor = torch.ones(3, dtype=dtype, device=self.device_type)
            dist.all_reduce(tensor)
            self.assertEqual(tensor, torch.full((3,), 2, dtype=dtype))

    def test_it_runs_over_gloo(self):
        self.begin()
        self.assertEqual(dist.get_backend(), "gloo")

    def test_all_workers_are_on_one_host(self):
        self.begin()
        hosts = [None, None]
        dist.all_gather_object(hosts, _topology.host_id())
        self.assertEqual(hosts[0], hosts[1])

    def test_nothing_is_right(self):
        self.begin()
        self.assertEqual(self.rank, 2)

    def test_functions_have_their_newer_names(self):
        self.begin()
        gathered = torch.empty(2)
        dist.all_gather_single(gathered, torch.tensor([float(self.rank)]))
        self.assertEqual(gathered, torch.tensor([0.0, 1.0]))

    def test_gather_single(self):
        raise AssertionError("torch 2.11 has no such function")

    def test_float8(self):
        if not self.float8_dtypes:
            self.skipTest(f"{self.backend_name} has no float8")
        self.begin()
        tensor = torch.full((2,), float(self.rank)).to(self.float8_dtypes[0])
        dist.broadcast(tensor, src=1)
        self.assertEqual(tensor.float(), torch.ones(2))

    def test_coalescing(self):
        if not self.supports_coalescing:
            self.skipTest(f"{self.backend_name} does not coalesce")


class ContractTest(TestCase):
    def test_nothing(self):
        raise AssertionError
"""
# As in torchcomms' repository: they are started by torchrun, and their class makes a process group.
COMMS = """
import os
import unittest

import torch
import torch.distributed as dist
from torchcomms.tests.helpers.py.test_helpers import skip_if_ncclx
from torchcomms.tests.integration.helpers.TorchCommTestHelpers import get_device, get_rank_and_size


@skip_if_ncclx
class Made(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        dist.config.use_torchcomms = True
        rank, size = get_rank_and_size()
        backend = os.environ["TEST_BACKEND"]
        dist.init_process_group(backend=backend, rank=rank, world_size=size)
        cls.device = get_device(backend, rank)

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def test_sum_of_four(self):
        rank = torch.tensor([float(dist.get_rank())], device=self.device)
        dist.all_reduce(rank)
        self.assertEqual(rank.item(), 6)

    def test_it_runs_over_gloo(self):
        self.assertEqual(dist.get_backend(), "gloo")

    def test_not_here(self):
        self.skipTest("it is for GPUs")
"""


def run(folder, backends, *more):
    """Returns what the command has done, and by back end the outcomes of tests."""
    torchs, comms = folder / "torchs", folder / "comms"
    torchs.mkdir()
    comms.mkdir()
    (torchs / "c10d_backend_common.py").write_text(COMMON)
    (torchs / "test_c10d_collectives.py").write_text(COLLECTIVES)
    (torchs / "test_c10d_p2p.py").write_text("import nothing_of_that_name")
    (comms / "MadeTest.py").write_text(COMMS)
    (comms / "OwnTest.py").write_text("import torchcomms\n\ntorchcomms.new_comm('gloo')\n")
    out = folder / "outcomes.json"
    argv = [str(torchs), str(comms), "--json", str(out), "--timeout", "30"]
    argv += ["--backend", *backends, *more]
    done = subprocess.run(
        [sys.executable, str(COMMAND), *argv], timeout=200, capture_output=True, text=True
    )
    found = json.loads(out.read_text())
    del found["left out"]
    outcomes = {
        backend: {name: each["outcome"] for name, each in tests.items()}
        for backend, tests in found.items()
    }
    return done, outcomes


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(tmp_path_factory.mktemp("made"), ["gloo", "thalweg"])


def test_tests_of_both_forms_run_over_each_back_end_as_far_as_it_says_it_goes(ran):
    _, outcomes = ran
    assert outcomes["gloo"] == {
        "collectives: Made.test_all_workers_are_on_one_host": "passed",
        "collectives: Made.test_coalescing": "skipped",
        "collectives: Made.test_float8": "skipped",
        "collectives: Made.test_functions_have_their_newer_names": "passed",
        "collectives: Made.test_gather_single": "skipped",
        "collectives: Made.test_it_runs_over_gloo": "passed",
        "collectives: Made.test_nothing_is_right": "failed",
        "collectives: Made.test_sum": "passed",
        "MadeTest: Made.test_it_runs_over_gloo": "passed",
        "MadeTest: Made.test_not_here": "skipped",
        "MadeTest: Made.test_sum_of_four": "passed",
    }
    assert outcomes["thalweg"] == outcomes["gloo"] | {
        "collectives: Made.test_float8": "passed",
        "collectives: Made.test_it_runs_over_gloo": "failed",
        "MadeTest: Made.test_it_runs_over_gloo": "failed",
    }


def test_what_fails_over_the_last_back_end_alone_is_named_and_makes_the_command_fail(ran):
    done, _ = ran
    assert done.returncode == 1
    assert "| collectives | 4 / 3 / 1 | 4 / 2 / 2 |" in done.stdout
    assert "| MadeTest | 2 / 1 / 0 | 1 / 1 / 1 |" in done.stdout
    assert done.stdout.endswith(
        "failed over thalweg and passed over gloo:\n"
        "  collectives: Made.test_it_runs_over_gloo\n"
        "  MadeTest: Made.test_it_runs_over_gloo\n"
    )


def test_reasons_say_what_the_back_end_what_torch_and_what_the_tests_lack(ran):
    done, _ = ran
    assert "skipped 1: gloo has no float8" in done.stdout
    assert "skipped 1: thalweg does not coalesce" in done.stdout
    assert "skipped 1: it is for GPUs" in done.stdout
    assert "has no torch.distributed.gather_single" in done.stdout


def test_files_and_classes_that_are_not_run_are_named_with_the_reason(ran):
    done, _ = ran
    own = "its tests speak to torchcomms' own communicators, not to process groups"
    assert f"left out 1: {own}: OwnTest" in done.stdout
    made = "its tests make back ends of torch's own"
    assert f"left out 1: {made}: collectives: ContractTest" in done.stdout
    missing = "process_group, fault_tolerance"
    assert f"left out 2: the folder has no such file: {missing}" in done.stdout
    assert "No module named 'nothing_of_that_name': p2p" in done.stdout


def test_tests_that_fail_over_both_back_ends_do_not_make_the_command_fail(tmp_path):
    done, outcomes = run(tmp_path, ["nonesuch", "nonesuch2"], "--only", "sum")
    assert set(outcomes["nonesuch"].values()) == {"failed"}
    assert len(outcomes["nonesuch2"]) == 2
    assert done.returncode == 0


def test_workers_can_be_placed_on_several_hosts(tmp_path):
    _, outcomes = run(tmp_path, ["gloo"], "--only", "one_host", "--hosts", "2")
    assert outcomes["gloo"] == {"collectives: Made.test_all_workers_are_on_one_host": "failed"}


def test_folder_without_such_tests_is_refused_by_name(tmp_path):
    argv = [sys.executable, str(COMMAND), str(tmp_path)]
    done = subprocess.run(argv, timeout=60, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{tmp_path} has neither c10d_backend_common.py nor any file *Test.py" in done.stderr
