#!/usr/bin/env python3
"""Writes the reference of the C++ headers that the package installs, as pages for mkdocs.

Usage: cpp_reference.py FOLDER. There is a page for each folder of headers.
"""

from __future__ import annotations

import re
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from itertools import chain, count, zip_longest
from pathlib import Path

from doxygen import public_headers, run_doxygen

# Folder of headers: its page, and the page's title.
PAGES = {
    "client/core": ("client.md", "C++: sessions"),
    "core/device": ("device.md", "C++: devices"),
    "core/base": ("base.md", "C++: types"),
}
_INTRODUCTION = """\
These headers come with the [library for C++ programs](../docs/cpp.md), and are included by these
names. Everything is in the namespace `thalweg`."""
_HIDDEN = {"define", "friend"}


def anchor_of(header: str) -> str:
    """Returns the anchor of a header on its page."""
    return re.sub(r"\W", "-", header)


def link_to(header: str) -> str:
    """Returns where the reference has a header, seen from the folder of the site."""
    return f"cpp/{PAGES[str(Path(header).parent)][0]}#{anchor_of(header)}"


def escaped(text: str | None) -> str:
    """Returns text that Markdown shows as it is, in a table too."""
    text = (text or "").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([*_`|\[\]\\])", r"\\\1", text)


def prose(text: str | None) -> str:
    """Returns text in which the names of pages are links."""
    parts = re.split(r"\b(docs/[\w/-]+\.md)\b", text or "")
    names = [f"[{escaped(name)}](../{name})" for name in parts[1::2]]
    return "".join(chain(*zip_longest(map(escaped, parts[::2]), names, fillvalue="")))


class Entry:
    """A class, function, constant or type, as Doxygen has found it."""

    def __init__(self, node: ET.Element) -> None:
        place = node.find("location")
        assert place is not None
        self.node = node
        self.kind = node.attrib["kind"]
        named = node.findtext("qualifiedname") or node.findtext("compoundname") or ""
        self.name = named.removeprefix("thalweg::")
        self.anchor = ""
        self.line = int(place.attrib["line"])
        body_ends = int(place.get("bodyend", -1)) if self.kind == "function" else -1
        self.last_line = max(self.line, int(place.get("declline", -1)), body_ends)

    def is_row(self) -> bool:
        """Returns whether a table of its class has it, and not a section."""
        arguments = self.node.findtext("argsstring", "")
        return self.kind == "variable" or arguments.endswith(("=default", "=delete"))

    def comment(self) -> str:
        """Returns what its comment says."""
        return "".join("".join(paragraph.itertext()) for paragraph in paragraphs(self.node))


def paragraphs(node: ET.Element) -> Iterator[ET.Element]:
    """Yields those of an entry's comment."""
    yield from node.iterfind("briefdescription/para")
    yield from node.iterfind("detaileddescription/para")


def in_order(nodes: Iterable[ET.Element]) -> list[Entry]:
    """Returns what users see of the nodes, in the order of the header."""
    seen = [n for n in nodes if n.get("prot") == "public" and n.get("kind") not in _HIDDEN]
    return sorted(map(Entry, seen), key=lambda entry: entry.line)


def in_groups(entries: list[Entry]) -> list[list[Entry]]:
    """Puts functions together that one comment is about: each in the line below another.

    A comment that begins with *Returns* is about a single function.
    """
    groups: list[list[Entry]] = []
    for entry in entries:
        first, last = (groups[-1][0], groups[-1][-1]) if groups else (entry, entry)
        is_alone = not first.comment() or first.comment().startswith("Returns ")
        is_next = last.kind == entry.kind == "function" and entry.line == last.last_line + 1
        if is_next and not is_alone and not entry.comment() and "~" not in entry.name:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


class Reference:
    """Makes pages of what Doxygen says."""

    def __init__(self, compounds: dict[str, ET.Element]) -> None:
        self._files = {
            place.attrib["file"]: node
            for node in compounds.values()
            if node.get("kind") == "file" and (place := node.find("location")) is not None
        }
        self._free: dict[str, list[ET.Element]] = {}
        for node in compounds["namespacethalweg"].iter("memberdef"):
            if (place := node.find("location")) is not None:
                self._free.setdefault(place.attrib["file"], []).append(node)
        # Page and anchor of whatever Doxygen numbers.
        self._places: dict[str, tuple[str, str]] = {}
        self._page = ""
        self._tops: dict[str, list[Entry]] = {}
        self._members: dict[Entry, list[Entry]] = {}
        for header in public_headers():
            file = self._files[header]
            page = PAGES[str(Path(header).parent)][0]
            self._places[file.attrib["id"]] = (page, anchor_of(header))
            inner = [compounds[node.attrib["refid"]] for node in file.iter("innerclass")]
            self._tops[header] = in_order([*inner, *self._free.get(header, [])])
            for entry in self._tops[header]:
                self._place(entry, header)
                if entry.kind in ("class", "struct"):
                    self._members[entry] = in_order(entry.node.iter("memberdef"))
                    for member in self._members[entry]:
                        self._place(member, header, entry.anchor if member.is_row() else None)

    def _place(self, entry: Entry, header: str, anchor: str | None = None) -> None:
        page = PAGES[str(Path(header).parent)][0]
        taken = {anchor for _, anchor in self._places.values()}
        name = re.sub(r"[^\w~]+", "-", entry.name)
        numbered = (f"{name}-{number}" for number in count(2))
        entry.anchor = anchor or next(each for each in chain([name], numbered) if each not in taken)
        for node in [entry.node, *entry.node.iterfind("enumvalue")]:
            self._places[node.attrib["id"]] = (page, entry.anchor)

    def _link(self, node: ET.Element) -> str:
        text = escaped("".join(node.itertext()))
        page, anchor = self._places.get(node.attrib["refid"], ("", ""))
        if not anchor:
            return text
        return f"[{text}]({'' if page == self._page else page}#{anchor})"

    def _code(self, node: ET.Element | None) -> str:
        """Returns C++ of Doxygen's, whose types are links, in our style."""
        if node is None:
            return ""
        parts = [escaped(node.text)]
        for child in node:
            parts += [self._link(child), escaped(child.tail)]
        code = "".join(parts).strip()
        code = re.sub(r"(?<!&lt;)&lt; | (?=&gt;)", lambda found: found[0].strip(), code)
        code = re.sub(r" ((?:\\\*|&amp;)+) ?", r"\1 ", code)
        return re.sub(r" (?=[,)])", "", code).rstrip()

    def _comment(self, node: ET.Element) -> list[str]:
        """Returns a comment's paragraphs as Markdown."""
        found = [text for para in paragraphs(node) for text in self._paragraph(para)]
        return [text for text in found if text]

    def _paragraph(self, para: ET.Element) -> Iterator[str]:
        parts = [prose(para.text)]
        for child in para:
            if child.tag == "ref":
                parts.append(self._link(child))
            elif child.tag == "computeroutput":
                parts.append(f"`{''.join(child.itertext())}`")
            elif child.tag == "verbatim":
                yield "".join(parts).strip()
                yield f"```text\n{(child.text or '').rstrip()}\n```"
                parts = []
            else:
                raise ValueError(f"a comment has <{child.tag}>, which the reference does not know")
            parts.append(prose(child.tail))
        yield "".join(parts).strip()

    def _declaration(self, entry: Entry) -> str:
        """Returns how an entry is declared, as a line of HTML."""
        name = escaped(entry.name.rpartition("::")[2])
        code = f"<b>{name}</b>"
        if entry.kind in ("class", "struct"):
            code = f"{entry.kind} {code}"
        elif entry.kind == "enum":
            type_ = self._code(entry.node.find("type"))
            code = f"enum class {code}" + (f" : {type_}" if type_ else "")
        elif entry.kind == "typedef":
            code = f"using {code} = {self._code(entry.node.find('type'))}"
        else:
            code = f"{self._code(entry.node.find('type'))} {code}".strip()
            if entry.kind == "function":
                code += self._arguments(entry)
            elif "\n" not in (value := self._code(entry.node.find("initializer"))):
                code = f"{code} {value}".strip()
        flags = [flag for flag in ("static", "explicit") if entry.node.get(flag) == "yes"]
        if entry.node.get("virt") in ("virtual", "pure-virtual"):
            flags.append("virtual")
        if (parameters := entry.node.find("templateparamlist")) is not None:
            types = ", ".join(self._code(type_) for type_ in parameters.iter("type"))
            flags.insert(0, f"template &lt;{types}&gt;")
        return f'<code class="cpp">{" ".join([*flags, code])}</code>'

    def _arguments(self, entry: Entry) -> str:
        given = []
        for param in entry.node.iterfind("param"):
            name = escaped(param.findtext("declname"))
            default = self._code(param.find("defval"))
            text = f"{self._code(param.find('type'))} {name}".strip()
            given.append(f"{text} = {default}" if default else text)
        rest = entry.node.findtext("argsstring", "").rpartition(")")[2]
        return f"({', '.join(given)}){re.sub(' *= *', ' = ', rest)}"

    def _table(self, title: str, rows: list[tuple[str, ET.Element]]) -> list[str]:
        lines = [f"| {code} | {' '.join(self._comment(node))} |" for code, node in rows]
        return ["\n".join([f"| {title} | meaning |", "|---|---|", *lines])] if rows else []

    def _value(self, node: ET.Element) -> tuple[str, ET.Element]:
        value = f"{escaped(node.findtext('name'))} {self._code(node.find('initializer'))}"
        return f'<code class="cpp">{value.strip()}</code>', node

    def _section(self, level: str, entries: list[Entry]) -> list[str]:
        """Returns the section of an entry, or of several functions that one comment is about."""
        names = ", ".join(dict.fromkeys(escaped(entry.name) for entry in entries))
        anchors = "".join(f'<a id="{entry.anchor}"></a>' for entry in entries[1:])
        lines = [f"{level} {names} {{ #{entries[0].anchor} }}"]
        lines.append(anchors + "\n".join(map(self._declaration, entries)))
        for entry in entries:
            lines += self._comment(entry.node)
        # Doxygen also takes a macro that is defined between the values for one.
        found = entries[0].node.iterfind("enumvalue")
        values = [self._value(each) for each in found if each.findtext("name", "").startswith("k")]
        return [*lines, *self._table("value", values)]

    def _class(self, entry: Entry) -> list[str]:
        members = self._members[entry]
        rows = [(self._declaration(each), each.node) for each in members if each.is_row()]
        lines = [*self._section("###", [entry]), *self._table("member", rows)]
        for group in in_groups([each for each in members if not each.is_row()]):
            lines += self._section("####", group)
        return lines

    def page(self, folder: str) -> str:
        """Returns the page of a folder's headers."""
        self._page, title = PAGES[folder]
        lines = [f"# {title}", _INTRODUCTION]
        for header in public_headers():
            if str(Path(header).parent) != folder:
                continue
            lines += [f"## {header} {{ #{anchor_of(header)} }}"]
            lines += self._comment(self._files[header])
            for group in in_groups(self._tops[header]):
                first = group[0]
                lines += (
                    self._class(first) if first in self._members else self._section("###", group)
                )
        return "\n\n".join(lines) + "\n"


def write(target: Path) -> None:
    """Writes the pages into the folder cpp of the site."""
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(run_doxygen(Path(folder)))
    (target / "cpp").mkdir(parents=True, exist_ok=True)
    for folder, (page, _) in PAGES.items():
        (target / "cpp" / page).write_text(reference.page(folder), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
