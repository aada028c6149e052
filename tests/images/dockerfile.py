"""Parses deploy/Dockerfile into stages of instructions, for the builder of these tests."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dockerfile_parse import DockerfileParser

KNOWN = {"ARG", "ENV", "RUN", "COPY", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD"}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class Instruction(NamedTuple):
    name: str
    value: str  # as written, with continued lines joined


class Stage(NamedTuple):
    name: str
    base: str  # another stage's name, or an image
    instructions: list[Instruction]


class Dockerfile(NamedTuple):
    arguments: dict[str, str]  # before the first FROM, with their defaults
    stages: dict[str, Stage]  # in order


def parse(path: Path) -> Dockerfile:
    """Parses the file. Raises ValueError for what the builder cannot do as an engine would."""
    result = Dockerfile({}, {})
    stage: Stage | None = None
    for item in DockerfileParser(str(path)).structure:
        name, value = item["instruction"].upper(), item["value"]
        if name in ("COMMENT", "LABEL"):
            continue
        if name == "FROM":
            match = re.fullmatch(r"(\S+)\s+AS\s+(\S+)", value, re.IGNORECASE)
            if match is None:
                raise ValueError(f"FROM {value}: expected FROM … AS NAME")
            stage = Stage(match[2], substitute(match[1], result.arguments), [])
            result.stages[stage.name] = stage
        elif name not in KNOWN or value.startswith("--mount"):
            raise ValueError(f"{name} {value}: not known here")
        elif stage is not None:
            stage.instructions.append(Instruction(name, value))
        elif name == "ARG":
            result.arguments.update([pair(value)])
        else:
            raise ValueError(f"{name} before FROM")
    return result


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $NAME and ${NAME}; an unset one is empty."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def pair(text: str) -> tuple[str, str]:
    """Splits NAME=VALUE, where the value may be quoted; without `=` it is empty."""
    words = shlex.split(text)
    if len(words) != 1:
        raise ValueError(f"{text}: expected one NAME=VALUE")
    name, _, value = words[0].partition("=")
    return name, value


def command(text: str) -> list[str]:
    """Returns the command of ENTRYPOINT or CMD: a list in JSON, or a line for the shell."""
    if text.startswith("["):
        return [str(word) for word in json.loads(text)]
    return ["/bin/sh", "-c", text]
