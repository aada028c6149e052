"""Replaced methods of torch: their order, and that torch's own come back."""

import functools
import itertools
import json
import subprocess
import sys

import pytest

from thalweg._torch import _patches
from thalweg._torch._patches import Layer, Method

PERMUTATIONS = list(itertools.permutations(("inner", "middle", "outer")))


@pytest.fixture
def owner(monkeypatch):
    """A class that is declared to have three layers around its only method."""

    class Owner:
        def work(self, text, *, end=""):
            """Does it."""
            return f"({text}{end})"

    layers = tuple(Layer(user, "for tests") for user in ("inner", "middle", "outer"))
    declared = (*_patches.DECLARED, Method(Owner, "work", layers, compiled=True))
    monkeypatch.setattr(_patches, "DECLARED", declared)
    return Owner


def around(user):
    def work(inner, self, *args, **kwargs):
        return f"<{user}{inner(self, *args, **kwargs)}{user}>"

    return work


def install(owner, users):
    for user in users:
        _patches.install(user, owner, "work", around(user))


@pytest.mark.parametrize("users", PERMUTATIONS)
def test_layers_are_called_as_declared_whatever_the_order_of_installation(owner, users):
    install(owner, users)
    expected = "<outer<middle<inner(x!)inner>middle>outer>"
    assert owner().work("x", end="!") == expected


@pytest.mark.parametrize("users", PERMUTATIONS)
def test_torchs_own_method_is_back_once_the_last_layer_is_gone(owner, users):
    before = vars(owner)["work"]
    install(owner, ("outer", "inner", "middle"))
    for user in users:
        assert vars(owner)["work"] is not before
        _patches.uninstall(user)
    assert vars(owner)["work"] is before


def test_installing_twice_is_installing_once(owner):
    install(owner, ("outer", "outer", "inner", "outer"))
    assert owner().work("x") == "<outer<inner(x)inner>outer>"
    _patches.uninstall("outer")
    assert owner().work("x") == "<inner(x)inner>"
    _patches.uninstall("outer")
    _patches.uninstall("inner")


def test_method_keeps_its_name_and_documentation(owner):
    install(owner, ("inner",))
    assert (owner.work.__name__, owner.work.__doc__) == ("work", "Does it.")


def test_replacement_by_others_stays_and_leads_to_what_is_installed(owner):
    install(owner, ("inner",))
    ours = owner.work

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        return f"theirs {ours(self, *args, **kwargs)}"

    owner.work = theirs
    install(owner, ("outer",))
    assert owner().work("x") == "theirs <outer<inner(x)inner>outer>"
    for user in ("inner", "outer"):
        _patches.uninstall(user)
    assert owner.work is theirs
    assert owner().work("x") == "theirs (x)"
    install(owner, ("middle",))
    assert owner().work("x") == "theirs <middle(x)middle>"


def test_replacement_that_is_not_declared_is_refused(owner):
    with pytest.raises(LookupError, match=r"Owner.work is not declared as replaced by 'somebody'"):
        _patches.install("somebody", owner, "work", around("somebody"))
    with pytest.raises(LookupError, match=r"Owner.rest is not declared as replaced by 'inner'"):
        _patches.install("inner", owner, "rest", around("inner"))


EVERYTHING = """
import inspect, json
import torch
from thalweg._activation import _fused_optimizers, _zero_code
from thalweg._torch import _patches, _precision
from thalweg.optim import _finite

def current():
    return [vars(method.owner)[method.name] for method in _patches.DECLARED]

class Session:
    def note_precision(self, loss_scale, skipped_steps): pass

before = current()
session = Session()
_zero_code.activate()
_fused_optimizers.activate()
_precision.watch(session)
_finite.install()
for replacement in _patches._replaced.values():
    for around in replacement._arounds.values():
        first, second, *_ = inspect.signature(around).parameters.values()
        assert first.kind == inspect.Parameter.POSITIONAL_ONLY, around
        assert second.kind in (first.kind, inspect.Parameter.VAR_POSITIONAL), around
users = {layer.user for method in _patches.DECLARED for layer in method.layers}
replaced = {
    f"{method.owner.__name__}.{method.name}": [layer.user for layer in method.layers]
    for method, old, new in zip(_patches.DECLARED, before, current()) if old is not new
}
for user in users:
    _patches.uninstall(user)
print(json.dumps([replaced, [old is new for old, new in zip(before, current())]]))
"""


def test_uninstalling_leaves_torchs_own_objects():
    result = subprocess.run(
        [sys.executable, "-c", EVERYTHING],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    replaced, is_back = json.loads(result.stdout)
    assert {"DistributedDataParallel.__init__", "SGD.step", "GradScaler.update"} <= set(replaced)
    assert all(is_back)
