"""Runs deploy/compose.yaml on the built images, as its first lines say, without an engine.

Usage: compose.py IMAGES, in namespaces of its own (scripts/prove_images)

Exit code 1 unless the workers train, through both aggregators, to replicas of the same bits, and
all servers end with 0 when they are asked to. What this does not know in the file is refused.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from container import DEFAULT_CAPABILITIES, Container, Image
from running import Network, Running, Sandbox, shard

ROOT = Path(__file__).resolve().parents[2]
# A service may have these keys; any other is refused and not ignored.
KNOWN = {
    *("image", "build", "command", "environment", "depends_on", "healthcheck", "volumes"),
    *("read_only", "cap_drop", "shm_size", "ports"),
}
WORKERS = ("worker0", "worker1")
TRAINING_SECONDS = 400.0
GRACE_SECONDS = 10.0  # of `docker compose stop`


class Project:
    """The services of the file, and the containers that run."""

    def __init__(self, images: Path, folder: Path) -> None:
        text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
        self._services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
        self._images = images
        self._folder = folder
        self._network = Network(folder)
        self.sandboxes: dict[str, Sandbox] = {}
        self.running: dict[str, Running] = {}
        for name, service in self._services.items():
            if unknown := service.keys() - KNOWN:
                raise ValueError(f"{name}: {', '.join(unknown)} is not known here")
            self.sandboxes[name] = self._network.add(name)

    def start(self, name: str) -> None:
        """Starts the service after its dependencies are healthy."""
        if name in self.running:
            return
        service = self._services[name]
        for other in service.get("depends_on", {}):
            self.start(other)
            self._await_healthy(other)
        print(f"==> {name}", flush=True)
        self.running[name] = Running(name, self._container(name, service))

    def stop(self) -> dict[str, int]:
        """Stops what runs, the last started first; returns exit codes."""
        reverse = list(reversed(self.running))
        return {name: self.running[name].stop(GRACE_SECONDS) for name in reverse}

    def close(self) -> None:
        self.stop()
        self._network.stop()

    def _container(self, name: str, service: dict[str, Any]) -> Container:
        image = Image.load(self._images / f"{service['build']['target']}.json")
        folder = self._folder / name
        folder.mkdir()
        assert service.get("cap_drop", []) in ([], ["ALL"])
        mounts = {"/etc/hosts": self._network.hosts}
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")
            mounts[target] = self._volume(source, image, target)
        return Container(
            image,
            folder,
            [*image.entrypoint, *service.get("command", image.command)],
            {key: str(value) for key, value in service.get("environment", {}).items()},
            capabilities=() if service.get("cap_drop") else DEFAULT_CAPABILITIES,
            read_only=service.get("read_only", False),
            mounts=mounts,
            shm_bytes=_bytes(service.get("shm_size", "64m")),
            sandbox=self.sandboxes[name].pid,
        )

    def _volume(self, name: str, image: Image, path: str) -> Path:
        """Makes a volume; a new one begins with the image's contents."""
        volume = self._folder / "volumes" / name
        if not volume.exists():
            found = image.find(path)
            assert found is not None and not any(found.iterdir()), path
            volume.mkdir(parents=True)
            shutil.copystat(found, volume)
            shutil.chown(volume, found.stat().st_uid, found.stat().st_gid)
        return volume

    def _await_healthy(self, name: str) -> None:
        check = self._services[name]["healthcheck"]
        kind, *command = check["test"]
        assert kind == "CMD"
        seconds = float(check["interval"].removesuffix("s")) * check["retries"]
        running = self.running[name]
        running.await_("healthy", lambda: running.execute(command), seconds)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([mg])", text)
    assert match is not None, text
    return int(match[1]) << {"m": 20, "g": 30}[match[2]]


def check(project: Project) -> None:
    """Checks the project. Raises AssertionError."""
    for name in WORKERS:
        project.start(name)
    for name, running in project.running.items():
        running.await_user("65532")
        if name not in WORKERS:
            assert running.status("CapBnd").strip("0") == "", name
            assert not running.execute(["touch", "/root-is-read-only"]), name
    codes = [project.running[name].wait(TRAINING_SECONDS) for name in WORKERS]
    output = "".join(project.running[name].output for name in WORKERS)
    print(project.running[WORKERS[0]].output, flush=True)
    assert codes == [0, 0], output
    assert "with codec powersgd:rank=4" in output, output
    assert "2 replicas are bit-identical" in output, output
    for name in ("aggregator0", "aggregator1"):
        rounds = shard(f"{project.sandboxes[name].address}:7071")["rounds"]
        print(f"==> {name}: {rounds:.0f} rounds", flush=True)
        assert rounds > 0, name
    ended = project.stop()
    print(f"==> ended: {ended}", flush=True)
    assert set(ended.values()) == {0}, {n: project.running[n].output for n in ended if ended[n]}


def main() -> None:
    (images,) = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix="compose-"))
    project = Project(Path(images).resolve(), folder)
    try:
        check(project)
    finally:
        project.close()
        subprocess.run(["rm", "-rf", folder], check=True)
    print("compose.yaml: runs")


if __name__ == "__main__":
    main()
