"""Builds the images of deploy/Dockerfile without a container engine, by its own instructions.

Usage: builder.py OUT [NAME=VALUE…]     build arguments, as with `docker build --build-arg`

Images from a registry are replaced: debootstrap installs Debian 12 in
place of the slim image. OUT gets a folder for each stage and a NAME.json for each image. A stage is
built again when its instructions, the arguments, what it copies, or the stages below it have
changed. Needs root and the package registries that the Dockerfile needs; PIP_CERT, where it is set,
is lent to every step.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import time
from pathlib import Path

import dockerfile
from container import Image
from dockerfile import Stage
from stage import StageRun

ROOT = Path(__file__).resolve().parents[2]


class Builder:
    """Builds the stages of the Dockerfile and keeps them in `out`."""

    def __init__(self, out: Path, arguments: dict[str, str]) -> None:
        self._out = out
        self._stages = dockerfile.parse(ROOT / "deploy" / "Dockerfile").stages
        self._arguments = arguments
        self._images: dict[str, Image] = {}
        self._keys: dict[str, str] = {}
        self._context = out / "context"
        self._copy_context()

    def build(self, name: str) -> Image:
        """Returns the image of that stage; builds first the stages that it needs."""
        if name in self._images:
            return self._images[name]
        stage = self._stages[name]
        base = self.build(stage.base) if stage.base in self._stages else self._debian()
        self._keys[name] = self._key(stage)
        layer = self._out / f"{name}-{self._keys[name]}"
        done = layer / "image.json"
        if not done.exists():
            self._run(stage, base, layer)
        self._images[name] = Image.load(done)
        self._images[name].save(self._out / f"{name}.json")
        return self._images[name]

    def _run(self, stage: Stage, base: Image, layer: Path) -> None:
        start = time.monotonic()
        print(f"==> stage {stage.name}", flush=True)
        subprocess.run(["rm", "-rf", layer], check=True)
        layer.mkdir()
        run = StageRun(base, layer, self._arguments, self._source)
        for instruction in stage.instructions:
            print(f"    {instruction.name} {instruction.value}", flush=True)
            run.run(instruction)
        layers = [*base.layers, str(layer / "upper")]
        Image(**(vars(run.image) | {"layers": layers})).save(layer / "image.json")
        print(f"==> stage {stage.name}: {time.monotonic() - start:.0f} s", flush=True)

    def _key(self, stage: Stage) -> str:
        """Returns a hash of everything that affects the stage."""
        parts = [self._keys.get(stage.base, stage.base), repr(stage.instructions)]
        parts.append(repr(sorted(self._arguments.items())))
        for name, value in stage.instructions:
            if name != "COPY":
                continue
            source, path = ("", *shlex.split(value))[-3:-1]
            if source:
                self.build(source.removeprefix("--from="))
                parts.append(self._keys[source.removeprefix("--from=")])
            else:
                parts.append(_digest(self._context / path))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def _source(self, stage: str, path: str) -> Path:
        found = self._images[stage].find(path) if stage else self._context / path
        if found is None or not found.exists():
            raise ValueError(f"COPY: {stage or 'the context'} has no {path}")
        return found

    def _debian(self) -> Image:
        """Makes a minimal Debian 12 with debootstrap."""
        base = self._out / "base"
        if not base.exists():
            print("==> debootstrap", flush=True)
            part = base.with_suffix(".part")
            subprocess.run(["rm", "-rf", part], check=True)
            subprocess.run([ROOT / "scripts" / "debian_base", part], check=True)
            part.rename(base)
        return Image([str(base)])

    def _copy_context(self) -> None:
        """Copies the repository but for what .dockerignore names: NAME at the root, and **/NAME."""
        ignored = []
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
            everywhere = line.startswith("**/")
            ignored += ["--no-anchored" if everywhere else "--anchored"]
            ignored += [f"--exclude={line[3:]}" if everywhere else f"--exclude=./{line}"]
        subprocess.run(["rm", "-rf", self._context], check=True)
        self._context.mkdir(parents=True)
        pack = ["tar", "-c", "-C", ROOT, *ignored, "."]
        packed = subprocess.run(pack, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", self._context], input=packed.stdout, check=True)


def _digest(path: Path) -> str:
    """Returns a digest of the names, modes and bytes of a file or of all files below a folder."""
    result = hashlib.sha256()
    for file in sorted([path, *path.rglob("*")]):
        if file.is_file():
            name = f"{file.relative_to(path)} {file.stat().st_mode}\n"
            result.update(name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return result.hexdigest()


def main() -> None:
    out, *arguments = sys.argv[1:]
    builder = Builder(Path(out).resolve(), dict(dockerfile.pair(text) for text in arguments))
    for name in ("aggregator", "sidecar", "training"):
        builder.build(name)


if __name__ == "__main__":
    main()
