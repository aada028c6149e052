"""Tests that the Python package's rooms import only from the floors below their own.

What a function imports when it is called does not count: that is how `import thalweg` stays quick,
and how a lower floor is told of a higher one.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "client" / "python" / "thalweg"
# Each room is a package or a module; a few that belong together are one room. docs/architecture.md
# shows the same floors.
FLOORS = (
    ("_settings", "_torch", "_binaries _native _C", "_backend", "_autoload", "_early_apex", "data"),
    ("_job", "codecs policy", "optim", "timeline"),
    ("_attach", "_c10d", "amp", "node"),
    ("_sharded", "compat", "ddp", "ps", "tensorboard"),
    ("_activation", "elastic", "fsdp"),
    ("_reduce_by_hand", "cli __main__", "lightning", "examples"),
)
ROOMS = {name: room for floor in FLOORS for room in floor for name in room.split()}
LEVELS = {room: level for level, floor in enumerate(FLOORS) for room in floor}


def imported(tree: ast.AST) -> list[str]:
    """Returns the modules that are imported when this one is."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            found += imported(node)
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_module_has_a_room():
    names = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert names == set(ROOMS)


def test_rooms_import_only_from_floors_below():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = room_of(path)
        if name == "__init__":
            continue
        for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
            top, _, rest = module.partition(".")
            target = ROOMS.get(rest.partition(".")[0]) if top == "thalweg" else None
            if target is None or target == ROOMS[name]:
                continue
            if LEVELS[target] >= LEVELS[ROOMS[name]]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert wrong == []


def test_import_of_a_function_and_for_types_does_not_count():
    text = (
        "import a\n"
        "from b import c\n"
        "if TYPE_CHECKING:\n    import d\n"
        "try:\n    import e\nexcept ImportError:\n    pass\n"
        "def f():\n    import g\n"
        "class H:\n    import h\n"
    )
    assert imported(ast.parse(text)) == ["a", "b.c", "e", "h"]
