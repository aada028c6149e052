"""Containers without an engine: layers by overlayfs, and the namespaces, root, user, capabilities
and mounts that an engine would give. Needs root.

Unlike with an engine, there is neither seccomp nor a limit of memory or CPU.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Docker and containerd leave these to a container that drops none.
DEFAULT_CAPABILITIES = (
    *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("net_bind_service", "net_raw", "sys_chroot", "mknod", "audit_write", "setfcap"),
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """Layers, the lowest first, and the settings that a container of it begins with."""

    layers: list[str]
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    # build arguments; stages based on it inherit them
    arguments: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Image:
        return Image(**json.loads(path.read_text(encoding="utf-8")))

    def find(self, path: str) -> Path | None:
        """Returns where the file at that path of the image lies on this machine."""
        places = [Path(layer, path.lstrip("/")) for layer in reversed(self.layers)]
        return next((place for place in places if place.exists()), None)


@dataclass(frozen=True)
class Container:
    """One process and its children. `folder` gets what they write, unless `upper` is set."""

    image: Image
    folder: Path
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""  # UID:GID; empty: the image's
    groups: Sequence[str] = ()
    capabilities: Sequence[str] = DEFAULT_CAPABILITIES
    no_new_privileges: bool = False
    read_only: bool = False
    mounts: Mapping[str, Path] = field(default_factory=dict)  # by the path inside
    read_only_mounts: Collection[str] = ()  # of these
    shm_bytes: int = 64 << 20
    upper: Path | None = None
    sandbox: int = 0  # a process whose network, host name and IPC it shares; 0: the caller's

    def argv(self) -> list[str]:
        """Returns the command line that starts it. Its only child is the container's init."""
        sandbox = ["nsenter", f"--target={self.sandbox}", "--net", "--uts", "--ipc"]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c"]
        return [*(sandbox if self.sandbox else []), *unshare, "\n".join(self._script())]

    def _script(self) -> list[str]:
        root, upper = self.folder / "root", self.upper or self.folder / "upper"
        work = upper.with_name(upper.name + ".work")
        options = (
            f"lowerdir={':'.join(reversed(self.image.layers))},upperdir={upper},workdir={work}"
        )
        lines = ["set -eu", shlex.join(["mkdir", "-p", str(root), str(upper), str(work)])]
        lines += [shlex.join(["mount", "-t", "overlay", "overlay", "-o", options, str(root)])]
        lines += [shlex.join(["cd", str(root)]), _SYSTEM.format(shm=self.shm_bytes)]
        for inside, outside in self.mounts.items():
            target = shlex.quote("." + inside)
            make = "mkdir -p" if outside.is_dir() else "touch"
            lines += [f"mkdir -p $(dirname {target}); [ -e {target} ] || {make} {target}"]
            lines += [f"mount --bind {shlex.quote(str(outside))} {target}"]
            lines += [f"mount -o remount,bind,ro {target}"] * (inside in self.read_only_mounts)
        lines += ["mount -o remount,bind,ro ."] * self.read_only
        # From here on the mounts hide everything but the image.
        return [*lines, "pivot_root . .", "umount -l .", f"exec {shlex.join(self._start())}"]

    def _start(self) -> list[str]:
        uid, gid = (self.user or self.image.user).split(":")
        groups = f"--groups={','.join(self.groups)}" if self.groups else "--clear-groups"
        kept = "".join(f",+{name}" for name in self.capabilities)
        start = ["setpriv", f"--reuid={uid}", f"--regid={gid}", groups]
        start += [f"--bounding-set=-all{kept}", "--inh-caps=-all"]
        start += ["--no-new-privs"] * self.no_new_privileges
        env = {"HOME": self._home(uid)} | self.image.env | dict(self.env)
        start += ["env", "--ignore-environment", f"--chdir={self.image.workdir}"]
        return [*start, *(f"{name}={value}" for name, value in env.items()), *self.command]

    def _home(self, uid: str) -> str:
        passwd = self.image.find("/etc/passwd")
        assert passwd is not None
        users = [line.split(":") for line in passwd.read_text(encoding="utf-8").splitlines()]
        return next((user[5] for user in users if user[2] == uid), "/")


_SYSTEM = """\
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755,nosuid tmpfs dev
for device in null zero full random urandom tty; do
  touch dev/$device
  mount --bind /dev/$device dev/$device
done
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mkdir dev/shm
mount -t tmpfs -o mode=1777,nosuid,nodev,size={shm} tmpfs dev/shm"""
