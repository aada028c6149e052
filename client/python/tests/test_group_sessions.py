"""Tests which modules the session of a process group can serve."""

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from thalweg._c10d import _process_group
from thalweg._c10d._process_group import World
from thalweg._job import _rendezvous
from thalweg._job._topology import Tensor
from thalweg._settings._config import Config

MODEL = (Tensor("a.weight", "float32", (64, 64)), Tensor("a.bias", "float32", (64,)))
DEFAULTS = Config.from_env({})
OTHERS = {
    "aggregators": ("a:1",),
    "chunk_bytes": 8192,
    "codec": "fp16",
    "job": "mine",
    "local_shards": "0",
    "min_nodes": 2,
    "node_reduce": "workers",
    "reconnect": 7.0,
    "residuals": "/tmp/r",
    "sidecar": "/tmp/s",
    "snapshot_every": 50,
    "step_timeout": 7.0,
    "timeout": 7.0,
}


def world(**settings):
    """Returns one whose session is never used."""
    return World(None, None, DEFAULTS._replace(**settings), 60.0, os.getpid())


def test_module_that_asks_for_the_same_is_served_until_one_is_attached():
    group = world()
    assert group.why_apart(DEFAULTS, MODEL, None) == ""
    group.is_taken = True
    assert "another module is attached" in group.why_apart(DEFAULTS, MODEL, None)


def test_module_on_a_gpu_is_not_served():
    assert "the module is on a GPU" in world().why_apart(DEFAULTS, MODEL, 0)


@pytest.mark.parametrize("name", Config._fields)
def test_each_setting_that_differs_is_named_with_its_variable(name):
    value = OTHERS[name]
    reason = world().why_apart(DEFAULTS._replace(**{name: value}), MODEL, None)
    assert reason.startswith(f"{name} is {value} but was ")
    assert reason.endswith(f"set THALWEG_{name.upper()} before")


@pytest.mark.parametrize(
    ("ours", "asked", "served"),
    [
        ("onebit;elems<1024=fp16", "onebit", False),  # the bias
        ("onebit;elems<1024=fp16", "onebit;*.bias=fp16", True),
        ("powersgd:4", "powersgd:4;other=fp32", True),
        ("powersgd:4", "powersgd:4;a.*=fp32", False),
        ("powersgd:4", "powersgd:2", False),
    ],
)
def test_codecs_need_to_agree_for_the_modules_parameters_only(ours, asked, served):
    reason = world(codec=ours).why_apart(DEFAULTS._replace(codec=asked), MODEL, None)
    assert (reason == "") == served


def test_new_group_says_after_a_worker_s_timeout_that_another_has_not_come(monkeypatch):
    asked = {}

    def gather(*_, **how):
        asked.update(how)
        raise TimeoutError

    monkeypatch.setenv("THALWEG_TIMEOUT", "7")
    monkeypatch.setattr(_rendezvous, "gather", gather)
    group = SimpleNamespace(group_rank=0, group_size=2, store=dist.HashStore(), group_id="new")
    with pytest.raises(TimeoutError):
        _process_group._begin(group, 1800.0)
    assert (asked["quiet"], asked["timeout"]) == (7.0, 1800.0)
    assert asked["where"] == 'the new process group of the back end "thalweg"'
