"""Runs the instructions of one stage of a Dockerfile."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import dockerfile
from container import Container, Image
from dockerfile import Instruction, substitute

_NETWORK = ("/etc/resolv.conf", "/etc/hosts")
_SOURCE = "/.source"  # where the stage sees the files to copy
_CERTIFICATES = "/.certificates"


class StageRun:
    """A stage being built: its writes are in `layer`, all else is in `image`."""

    def __init__(
        self,
        base: Image,
        layer: Path,
        arguments: Mapping[str, str],
        source: Callable[[str, str], Path],
    ) -> None:
        """Prepares a stage. `source(stage, path)` locates a file; an empty stage is the context."""
        self.image = base
        self._base = base
        self._layer = layer
        self._given = arguments
        self._source = source

    def run(self, instruction: Instruction) -> None:
        """Runs an instruction. Raises CalledProcessError when a command fails."""
        name, value = instruction
        variables = self.image.arguments | self.image.env
        if name == "ARG":
            argument, default = dockerfile.pair(value)
            value = self._given.get(argument, substitute(default, variables))
            self.image = replace(self.image, arguments=self.image.arguments | {argument: value})
        elif name == "ENV":
            variable, text = dockerfile.pair(substitute(value, variables))
            self.image = replace(self.image, env=self.image.env | {variable: text})
        elif name == "RUN":
            self._step(["/bin/sh", "-c", value])
        elif name == "COPY":
            self._copy(shlex.split(value))
        elif name == "WORKDIR":
            self._step(["mkdir", "-p", value])
            self.image = replace(self.image, workdir=value)
        elif name == "USER":
            self.image = replace(self.image, user=value)
        elif name == "ENTRYPOINT":
            self.image = replace(self.image, entrypoint=dockerfile.command(value), command=[])
        elif name == "CMD":
            self.image = replace(self.image, command=dockerfile.command(value))

    def _copy(self, words: list[str]) -> None:
        """Copies files as root's, as without --chown; of a folder, its contents are copied."""
        stage = words.pop(0).removeprefix("--from=") if words[0].startswith("--") else ""
        path, target = words  # several sources are not supported
        source = self._source(stage, path)
        to = shlex.quote(target)
        if source.is_dir():
            script = f"mkdir -p {to}; copy {_SOURCE}/. {to}"
        elif target.endswith(("/", ".")):
            script = f"mkdir -p {to}; copy {_SOURCE} {to}/{shlex.quote(source.name)}"
        else:
            script = f"mkdir -p $(dirname {to}); copy {_SOURCE} {to}"
        copy = "copy() { cp -dR --preserve=mode,timestamps $1 $2; }"
        self._step(["/bin/bash", "-ec", f"{copy}; {script}"], {_SOURCE: source})

    def _step(self, command: list[str], mounts: Mapping[str, Path] | None = None) -> None:
        """Runs a command as root, with this machine's network."""
        lent = {path: Path(path) for path in _NETWORK} | dict(mounts or {})
        env = dict(self.image.arguments)
        if certificates := os.environ.get("PIP_CERT"):
            lent[_CERTIFICATES] = Path(certificates)
            env["PIP_CERT"] = _CERTIFICATES
        image = replace(self.image, layers=self._base.layers, user="0:0")
        upper = self._layer / "upper"
        with tempfile.TemporaryDirectory(prefix="step-", dir=self._layer) as folder:
            step = Container(image, Path(folder), command, env, mounts=lent, upper=upper)
            subprocess.run(step.argv(), check=True, stdin=subprocess.DEVNULL)
        for path in (_SOURCE, _CERTIFICATES):  # the mount points
            place = upper / path.lstrip("/")
            if place.is_dir():
                place.rmdir()
            else:
                place.unlink(missing_ok=True)
