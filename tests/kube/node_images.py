"""Images for the nodes of test clusters: a containerd's folder, made once from podman's storage."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from node import start_containerd, write_containerd_settings
from programs import BIN, ROOT, Programs

FOLDER = ROOT / "out" / "kube"
# scripts/test_kube makes them.
OURS = tuple(f"localhost/thalweg-{name}:latest" for name in ("aggregator", "sidecar", "training"))
OTHERS = ("localhost/pause:test", "localhost/busybox:test", "localhost/training-operator:test")
_ENV = os.environ | {"CONTAINERS_CONF": str(ROOT / ".tools" / "containers.conf")}


def identity(image: str) -> str:
    """Returns the image's identity in podman's storage; empty if it is not there."""
    command = ["podman", "image", "inspect", "--format", "{{.Id}}", image]
    return subprocess.run(command, env=_ENV, capture_output=True, text=True).stdout.strip()


def images() -> Path:
    """Returns a folder for Node.begin_with; imports what podman has unless that was done before."""
    names = [*OTHERS, *OURS]
    found = [identity(name) for name in names]
    assert all(found), dict(zip(names, found, strict=True))
    done = FOLDER / f"images-{hashlib.sha256(repr(found).encode()).hexdigest()[:12]}"
    if not done.exists():
        for old in FOLDER.glob("images-*"):
            shutil.rmtree(old)
        part = FOLDER / "images.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _import(part, names)
        (part / "containerd").rename(done)
        shutil.rmtree(part)
    return done


def _import(folder: Path, names: list[str]) -> None:
    programs = Programs(folder)
    write_containerd_settings(folder)
    start_containerd(folder, programs)
    try:
        for name in names:
            save = ["podman", "save", "--format", "docker-archive", name]
            into = [BIN / "ctr", "--address", folder / "containerd.sock", "--namespace", "k8s.io"]
            with subprocess.Popen(save, env=_ENV, stdout=subprocess.PIPE) as archive:
                subprocess.run([*into, "images", "import", "-"], stdin=archive.stdout, check=True)
            assert archive.returncode == 0, name
    finally:
        programs.stop()
