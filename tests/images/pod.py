"""Runs a pod on the built images: does what the kubelet does with its spec. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from container import DEFAULT_CAPABILITIES, Container, Image
from running import Network, Running, Sandbox, answers

# A container may have these keys; any other is refused and not ignored. Requests concern the
# scheduler.
KNOWN = {
    *("name", "image", "imagePullPolicy", "command", "args", "env", "envFrom", "ports"),
    *("startupProbe", "readinessProbe", "livenessProbe", "securityContext", "resources"),
    *("volumeMounts", "restartPolicy"),
}


class Pod:
    """A pod. `configmaps`, `secrets`: data by name. `env`: what an operator adds to containers."""

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        sandbox: Sandbox,
        folder: Path,
        *,
        configmaps: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, Mapping[str, str]],
        env: Mapping[str, str],
    ) -> None:
        self.name = name
        self.spec = spec
        self.sandbox = sandbox
        self.running: dict[str, Running] = {}
        self._folder = folder / name
        self._folder.mkdir()
        self._configmaps = configmaps
        self._secrets = secrets
        self._env = env
        self._volumes = {volume["name"]: self._volume(volume) for volume in spec.get("volumes", ())}

    def start(self, images: Path, network: Network) -> None:
        """Starts native sidecars, waits until they have started, then starts the containers."""
        self._images, self._hosts = images, network.hosts
        for container in self.spec.get("initContainers", ()):
            assert container["restartPolicy"] == "Always", "only native sidecars are known here"
            self._run(container)
            self.await_probe(container, "startupProbe")
        for container in self.spec["containers"]:
            self._run(container)

    def await_probe(self, container: dict[str, Any], kind: str) -> None:
        """Returns when the probe succeeds; fails after as many tries as it allows."""
        probe = container[kind]
        port = next(p for p in container["ports"] if p["name"] == probe["httpGet"]["port"])
        address = f"{self.sandbox.address}:{port['containerPort']}"
        seconds = float(probe["periodSeconds"] * probe.get("failureThreshold", 3))
        running, path = self.running[container["name"]], probe["httpGet"]["path"]
        scheme = probe["httpGet"].get("scheme", "HTTP").lower()
        running.await_(f"ready by {kind}", lambda: answers(address, path, scheme), seconds)

    def stop(self) -> dict[str, int]:
        """Stops containers, then sidecars; returns their exit codes, also of those that ended
        before.
        """
        grace = float(self.spec.get("terminationGracePeriodSeconds", 30))
        return {name: self.running[name].stop(grace) for name in reversed(self.running)}

    def remove(self) -> None:
        for volume in self._volumes.values():
            if os.path.ismount(volume):
                subprocess.run(["umount", volume], check=True)

    def _run(self, container: dict[str, Any]) -> None:
        name = container["name"]
        if unknown := container.keys() - KNOWN:
            raise ValueError(f"{name}: {', '.join(unknown)} is not known here")
        kind = container["image"].rpartition("thalweg-")[2].partition(":")[0]
        image = Image.load(self._images / f"{kind}.json")
        context = self.spec["securityContext"] | container.get("securityContext", {})
        folder = self._folder / name
        folder.mkdir()
        dropped = context.get("capabilities", {}).get("drop", [])
        assert dropped in ([], ["ALL"])
        asked = container.get("volumeMounts", ())
        mounts = {m["mountPath"]: self._volumes[m["name"]] for m in asked}
        mounts["/etc/hosts"] = self._hosts
        print(f"==> {self.name}: {name}", flush=True)
        self.running[name] = Running(
            f"{self.name}/{name}",
            Container(
                image,
                folder,
                self._command(container, image),
                self._environment(container),
                user=f"{context['runAsUser']}:{context['runAsGroup']}",
                groups=[str(context["fsGroup"])],
                capabilities=() if dropped else DEFAULT_CAPABILITIES,
                no_new_privileges=context.get("allowPrivilegeEscalation") is False,
                read_only=context.get("readOnlyRootFilesystem", False),
                mounts=mounts,
                read_only_mounts={m["mountPath"] for m in asked if m.get("readOnly")},
                sandbox=self.sandbox.pid,
            ),
        )

    def _command(self, container: dict[str, Any], image: Image) -> list[str]:
        if "command" in container:
            return [*container["command"], *container.get("args", [])]
        args = [a.replace("$(POD_IP)", self.sandbox.address) for a in container.get("args", ())]
        return [*image.entrypoint, *(args or image.command)]

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        env = dict(self._env)
        for source in container.get("envFrom", ()):
            env |= self._configmaps[source["configMapRef"]["name"]]
        # The only field that a variable refers to is the pod's address.
        address = self.sandbox.address
        return env | {v["name"]: v.get("value", address) for v in container.get("env", ())}

    def _volume(self, volume: dict[str, Any]) -> Path:
        path = self._folder / f"volume-{volume['name']}"
        path.mkdir()
        if "configMap" in volume:
            for name, text in self._configmaps[volume["configMap"]["name"]].items():
                (path / name).write_text(text, encoding="utf-8")
            return path
        group = self.spec["securityContext"]["fsGroup"]
        if "secret" in volume:
            for name, text in self._secrets[volume["secret"]["secretName"]].items():
                (path / name).write_text(text, encoding="ascii")
                (path / name).chmod(volume["secret"]["defaultMode"])
                shutil.chown(path / name, group=group)
            return path
        options = volume["emptyDir"]
        if options.get("medium") == "Memory":
            size = options["sizeLimit"].removesuffix("i")
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
            subprocess.run(mount, check=True)
        shutil.chown(path, group=group)
        path.chmod(0o2777)
        return path
