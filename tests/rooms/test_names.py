"""Tests that sources of one room can be compiled as one, as the sanitizers' builds do, and that no
two classes of a program share a name.
"""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each source of this folder is a program of its own.
PROGRAMS = Path("server/bin")
DECLARATIONS = (
    re.compile(r"(?:inline )?(?:constexpr|const|constinit|static) [^=({]*?(\w+)[\[\]\w]* ?[={;]"),
    re.compile(r"(?:template <.*> )?(?:struct|class|enum class|enum|using) (\w+)"),
    # A function's name together with its parameters, since functions may be overloaded.
    re.compile(r"[\w:<>,*& ]*?[ *&](\w+\(.*)"),
)

CLASS = re.compile(r"(?:struct|class|enum class|enum) (\w+)(?: final)?(?: : [^;{]*)? \{(?:.*\};)?$")


def names_without_linkage(text: str) -> list[str]:
    """Returns what unnamed namespaces declare at the start of lines, with the namespaces around."""
    around: list[str] = []
    names = []
    for line in text.splitlines():
        if opened := re.match(r"(?:inline )?namespace (?:([\w:]+) )?\{$", line):
            around.append(opened[1] or "")
        elif line.startswith("}  // namespace") and around:
            around.pop()
        elif around and not around[-1] and re.match(r"\w", line):
            for declaration in DECLARATIONS:
                if declared := declaration.match(line):
                    names.append("::".join([*around, declared[1]]))
                    break
    return names


def clashes(sources: dict[str, str]) -> list[str]:
    """Returns each name without linkage that several `sources` of a room, texts by path, have."""
    places = defaultdict(list)
    for path, text in sources.items():
        # What is compiled for several targets has their names around its own.
        if "HWY_NAMESPACE" not in text:
            for name in set(names_without_linkage(text)):
                places["/".join(Path(path).parts[:2]), name].append(path)
    return [f"{name}: {', '.join(paths)}" for (_, name), paths in places.items() if len(paths) > 1]


def classes(text: str) -> set[str]:
    """Returns the classes that named namespaces have, with the namespaces around."""
    around: list[str] = []
    found = set()
    for line in text.splitlines():
        if opened := re.match(r"(?:inline )?namespace (?:([\w:]+) )?\{$", line):
            around.append(opened[1] or "")
        elif line.startswith("}  // namespace") and around:
            around.pop()
        elif around and all(around) and (defined := CLASS.match(line)):
            found.add("::".join([*around, defined[1]]))
    return found


def test_classes_of_named_namespaces_are_found() -> None:
    text = """namespace thalweg {
class Declared;
struct Base { int a; };
class Defined final : public Base {
  struct Inner {
namespace {
struct Unnamed {
}  // namespace
}  // namespace thalweg
"""
    assert classes(text) == {"thalweg::Base", "thalweg::Defined"}


def test_no_two_classes_of_a_program_share_a_name() -> None:
    """With a name of two classes, the linker may take one's functions for the other's."""
    places = defaultdict(set)
    for room in ("core", "server", "client", "kernels"):
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".h", ".cc", ".cu"):
                for name in classes(path.read_text()):
                    places[name].add(str(path.relative_to(ROOT)))
    assert len(places) > 400
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_names_clash_in_a_room_alone() -> None:
    text = "namespace thalweg {{\nnamespace {{\n{}\n}}  // namespace\n}}  // namespace thalweg\n"
    paths = ("core/base/clock.cc", "core/base/in/clock.cc", "core/ipc/clock.cc")
    for line, name in {
        "constexpr Duration kPause = seconds(1);": "kPause",
        "constexpr char kMagic[8] = {};": "kMagic",
        "struct Part {": "Part",
        "int Add(int a, int b) {": "Add(int a, int b) {",
    }.items():
        found = clashes({path: text.format(line) for path in paths})
        assert found == [f"thalweg::::{name}: {paths[0]}, {paths[1]}"]
    assert not clashes(
        {paths[0]: text.format("int Add(int a)"), paths[1]: text.format("int Add()")}
    )
    assert not clashes(dict.fromkeys(paths[:2], "namespace thalweg {\nint a = 1;\n}\n"))


def test_no_two_sources_of_a_room_share_a_name_without_linkage() -> None:
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for room in ("core", "server", "client", "kernels")
        for path in sorted((ROOT / room).rglob("*.cc"))
        if not re.search(r"_(test|bench|fuzz)\.cc$", path.name)
        and PROGRAMS not in path.relative_to(ROOT).parents
    }
    assert len(sources) > 200
    assert clashes(sources) == []


def test_no_room_has_both_headers_that_define_tcp() -> None:
    rooms = defaultdict(set)
    for path in sorted((ROOT / "server").rglob("*.cc")):
        for header in re.findall(r"#include <((?:linux|netinet)/tcp\.h)>", path.read_text()):
            rooms[path.relative_to(ROOT).parts[:2]].add(header)
    assert rooms
    assert all(len(headers) == 1 for headers in rooms.values()), rooms
