"""Tests that _C.pyi says of the native module what that says of itself.

mypy checks callers against the stub alone, so that a native function that takes another argument
than the stub says would fail where it is first called.
"""

import ast
import re
from pathlib import Path

import pytest

import thalweg
from thalweg import _C

PLACE = re.compile(r"arg\d+$")  # what pybind11 calls an argument without a name
STUB = ast.parse(Path(thalweg.__file__).with_name("_C.pyi").read_text(encoding="utf-8"))


def described():
    """Gives each function of the stub, by its name in the module."""
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not _is_property(method):
                    yield f"{node.name}.{method.name}", method


def _is_property(method):
    return any(isinstance(mark, ast.Name) for mark in method.decorator_list)


def stated(node):
    """Returns for each argument its name, and whether it may be left out."""
    places, named = node.args.posonlyargs + node.args.args, node.args.kwonlyargs
    optional = [False] * (len(places) - len(node.args.defaults)) + [True] * len(node.args.defaults)
    optional += [default is not None for default in node.args.kw_defaults]
    return [
        (a.arg, may) for a, may in zip(places + named, optional, strict=True) if a.arg != "self"
    ]


def native(name):
    """Returns the same of a native function, by the first line of what pybind11 writes; None where
    it takes anything.
    """
    found = _C
    for part in name.split("."):
        found = getattr(found, part)
    text = (found.__doc__ or "").split("\n")[0]
    inside = re.fullmatch(r"\w+\((.*)\) -> .*", text)
    if inside is None or "*args" in text:
        return None
    function = ast.parse(f"def f({_without_types(inside[1])}): ...").body[0]
    return stated(function)


def _without_types(text):
    """Returns the arguments, with None for defaults and no types, which are not all Python's."""
    depth, pieces = 0, [""]
    for character in text:
        depth += (character in "[({<") - (character in "])}>")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return ", ".join(
        piece.split(":")[0].strip() + ("=None" if "=" in piece else "") for piece in pieces if piece
    )


FUNCTIONS = [(name, node) for name, node in described() if native(name) is not None]


@pytest.mark.parametrize(("name", "node"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_stub_has_the_arguments_of_the_native_function(name, node):
    expected = native(name)
    given = stated(node)
    shared, left_out = expected[: len(given)], expected[len(given) :]
    assert [may for _, may in given] == [may for _, may in shared]
    pairs = zip(given, shared, strict=True)
    assert [own for (own, _), (name, _) in pairs if own != name and not PLACE.match(name)] == []
    assert all(may for _, may in left_out)  # of torch's, which the stub need not have


def test_most_of_the_stub_is_compared():
    assert len(FUNCTIONS) > 60
