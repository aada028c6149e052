"""A node of a test's cluster: a network namespace with a containerd, a kubelet and a kube-proxy.

Containers are runc's, and pods have addresses of their own behind a bridge of the node.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from programs import BIN, Programs, Sandbox, run
from until import until

SWITCH, SWITCH_ADDRESS = "switch", "10.250.0.254"
PAUSE = "localhost/pause:test"
_CGROUPS = Path("/sys/fs/cgroup")

_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/run"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  sandbox_image = "{pause}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""


class Node:
    """One node; `images` is a containerd's folder with images, which it begins with."""

    def __init__(self, number: int, folder: Path, kubeconfig: Path, programs: Programs) -> None:
        self.name = f"node{number}"
        self.address = f"10.250.0.{number}"
        self.pods = f"10.244.{number}.0/24"
        self._port = f"port{number}"
        self._folder = folder / self.name
        self._kubeconfig = kubeconfig
        self._programs = programs
        self._folder.mkdir()
        self._sandbox = Sandbox()
        self.prefix = self._sandbox.prefix
        self.run = self._sandbox.run

    def connect(self, rate: str = "") -> None:
        """Makes the node's network and its link to the switch, shaped to `rate`."""
        run(*f"ip link add {self._port} type veth peer name eth0 netns {self._sandbox.pid}".split())
        run(*f"ip link set {self._port} master {SWITCH} up".split())
        for line in (
            "ip link set lo up",
            f"ip addr add {self.address}/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {SWITCH_ADDRESS}",
            "sysctl -qw net.ipv4.ip_forward=1",
        ):
            self.run(*line.split())
        run("ip", "route", "add", self.pods, "via", self.address)
        if rate:
            shape = f"root tbf rate {rate} burst 256k latency 50ms"
            run(*f"tc qdisc add dev {self._port} {shape}".split())
            self.run(*f"tc qdisc add dev eth0 {shape}".split())

    def set_link(self, *, up: bool) -> None:
        """Cuts the node from the others, or connects it again."""
        run("ip", "link", "set", self._port, "up" if up else "down")

    def begin_with(self, images: Path) -> None:
        """Takes over images. Files of layers are shared, for nobody writes to them."""
        run("cp", "--archive", "--link", images, self._folder / "containerd")
        for database in (self._folder / "containerd").rglob("*.db"):
            copy = database.with_suffix(".copy")
            shutil.copy2(database, copy)
            copy.replace(database)

    def start(self) -> None:
        self._write_settings()
        self._make_cgroups()
        start_containerd(self._folder, self._programs, self.prefix)
        kubelet = f"--kubeconfig={self._kubeconfig} --config={self._folder / 'kubelet.json'} "
        kubelet += f"--root-dir={self._folder / 'kubelet'} --hostname-override={self.name} "
        kubelet += f"--node-ip={self.address} --cert-dir={self._folder / 'pki'}"
        self._programs.start(
            f"{self.name}-kubelet", ["kubelet", *kubelet.split()], prefix=self.prefix
        )
        proxy = f"--kubeconfig={self._kubeconfig} --hostname-override={self.name} "
        proxy += "--proxy-mode=iptables --cluster-cidr=10.244.0.0/16 --bind-address=0.0.0.0 "
        proxy += "--conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 "
        proxy += "--conntrack-tcp-timeout-close-wait=0"
        self._programs.start(
            f"{self.name}-proxy", ["kube-proxy", *proxy.split()], prefix=self.prefix
        )

    def stop(self) -> None:
        self._sandbox.stop()

    def _write_settings(self) -> None:
        write_containerd_settings(self._folder)
        subnet = {"ranges": [[{"subnet": self.pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
        ipam = {"type": "host-local", "dataDir": str(self._folder / "ipam")} | subnet
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True}
        plugins = [
            bridge | {"ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ]
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
        (self._folder / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/thalweg-{self.name}",
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self._folder}/containerd.sock",
            # It then bears with what a root of a container may not do, such as raising limits.
            "featureGates": {"KubeletInUserNamespace": True},
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%"},
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "clusterDNS": ["10.250.0.1"],
            "clusterDomain": "cluster.local",
            # Mounted secrets follow their objects quickly.
            "syncFrequency": "5s",
        }
        (self._folder / "kubelet.json").write_text(json.dumps(kubelet))

    def _make_cgroups(self) -> None:
        """Makes the node's group in every hierarchy (there is one in version 2)."""
        version2 = (_CGROUPS / "cgroup.controllers").exists()
        hierarchies = [_CGROUPS] if version2 else [p for p in _CGROUPS.iterdir() if p.is_dir()]
        for hierarchy in hierarchies:
            group = hierarchy / f"thalweg-{self.name}"
            with contextlib.suppress(OSError):  # of a hierarchy that knows no children
                group.mkdir(exist_ok=True)
                for name in ("cpuset.cpus", "cpuset.mems"):
                    if not version2 and (hierarchy / name).exists():
                        (group / name).write_text((hierarchy / name).read_text())


def write_containerd_settings(folder: Path) -> None:
    (folder / "cni").mkdir(parents=True, exist_ok=True)
    text = _CONTAINERD.format(folder=folder, pause=PAUSE)
    (folder / "containerd.toml").write_text(text, encoding="ascii")


def start_containerd(folder: Path, programs: Programs, prefix: Sequence[str] = ()) -> None:
    """Starts a containerd on the settings in `folder`, and waits until it answers."""
    name = f"{folder.name}-containerd"
    command = ["containerd", "--config", folder / "containerd.toml"]
    programs.start(name, command, prefix=prefix)
    ask = [BIN / "ctr", "--address", folder / "containerd.sock", "version"]
    answers = lambda: subprocess.run(ask, capture_output=True).returncode == 0  # noqa: E731
    until("containerd answers", answers, 30, programs.said)
