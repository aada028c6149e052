"""Makes nodes of a Kubernetes cluster out of this machine.

A node is a host name, a network namespace and a mount namespace of its own, in which containerd,
kubelet and kube-proxy find their usual folders: kubelets that share /var/log delete each other's
logs. The caller runs in namespaces of its own (processes, mounts, network): scripts/test_kube
arranges that, and that everything here ends with it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from api_server import BIN, ROOT
from waiting import until

# torch and what it needs is bound from here into every container: scripts/kube_cluster.sh has the
# reason.
PACKAGES = ROOT / ".venv" / "lib" / "python3.11" / "site-packages"
PACKAGES_INSIDE = "/opt/packages"
PAUSE_IMAGE = "localhost/thalweg-kube-tools:latest"
CGROUP = "thalweg-kube"
_SWITCH = "switch"
_CGROUPS = Path("/sys/fs/cgroup")
_ENV = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}

# What a kubelet sets of the kernel belongs to the machine: each node finds it set.
_KERNEL = """
vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1
kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000
"""
_SETUP = """set -e
mount --bind "$1/log" /var/log
for folder in /var/lib /run; do mount -t tmpfs tmpfs "$folder"; done
for pair in $3; do
  file=/run/kernel/${pair%=*}
  mkdir -p "${file%/*}"
  echo "${pair#*=}" >"$file"
  mount --bind "$file" "/proc/sys/${pair%=*}"
done
hostname "$2"
ip link set lo up
echo 1 >/proc/sys/net/ipv4/ip_forward
echo up
exec cat
"""
_CONTAINERD = """version = 2
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  sandbox_image = "{pause}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{folder}/spec.json"
"""


class Node:
    """A node of the number `number`, from 1. Settings and logs are in `folder`, what containerd and
    kubelet keep is in memory: there it ends with the namespace, and at once.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.name = f"node{number}"
        self.address = f"10.250.0.{number}"
        for name in ("log", "cni"):
            (folder / name).mkdir(parents=True)
        argv = ["unshare", "--net", "--mount", "--uts", "sh", "-c", _SETUP]
        argv += ["setup", str(folder), self.name, _KERNEL]
        self._holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", f"no namespaces for {self.name}"
        self.enter = ["nsenter", f"--target={self._holder.pid}", "--net", "--mount", "--uts"]
        self._connect()
        _make_cgroup(f"{CGROUP}-{number}")

    def run(self, *command: str, seconds: float = 120) -> str:
        argv = [*self.enter, *command]
        result = subprocess.run(argv, env=_ENV, capture_output=True, text=True, timeout=seconds)
        assert result.returncode == 0, f"{argv}\n{result.stderr}"
        return result.stdout

    def spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a program, whose output goes to /var/log/NAME.log of the node."""
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            argv = [*self.enter, name, *arguments]
            return subprocess.Popen(
                argv, env=_ENV, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Takes the node's link from the switch: the node itself sees nothing of that."""
        link = ["ip", "link", "set", f"port{self.number}"]
        subprocess.run([*link, "nomaster"], check=True)
        try:
            yield
        finally:
            subprocess.run([*link, "master", _SWITCH], check=True)

    def start_containerd(self) -> None:
        spec = json.loads(self.run("ctr", "oci", "spec"))
        options = {"type": "bind", "options": ["rbind", "ro"]}
        spec["mounts"].append({"source": str(PACKAGES), "destination": PACKAGES_INSIDE} | options)
        self._write("spec.json", json.dumps(spec))
        self._write("cni/10-pods.conflist", json.dumps(_pod_network(self.number)))
        settings = _CONTAINERD.format(folder=self.folder, pause=PAUSE_IMAGE)
        self.spawn("containerd", "--config", self._write("containerd.toml", settings))

    def await_containerd(self) -> None:
        probe = [*self.enter, "ctr", "version"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        until("containerd", lambda: subprocess.run(probe, **silent).returncode == 0, 30, self.log)

    def import_images(self, archive: Path) -> subprocess.Popen[bytes]:
        return self.spawn("ctr", "--namespace", "k8s.io", "images", "import", str(archive))

    def start_kubelet(self, kubeconfig: Path) -> None:
        config = self._write("kubelet.json", json.dumps(_kubelet(self.number)))
        access = f"--kubeconfig={kubeconfig}"
        self.spawn("kubelet", access, f"--config={config}", f"--node-ip={self.address}")
        proxy = ["--proxy-mode=iptables", "--cluster-cidr=10.244.0.0/16", "--bind-address=0.0.0.0"]
        # Limits of connections are the machine's, too.
        proxy += ["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"]
        self.spawn("kube-proxy", access, *proxy, "--conntrack-tcp-timeout-close-wait=0")

    def log(self) -> str:
        """Returns the ends of its programs' logs."""
        logs = sorted((self.folder / "log").glob("*.log"))
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in logs)

    def _write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text, encoding="ascii")
        return str(path)

    def _connect(self) -> None:
        port = f"port{self.number}"
        for line in (
            f"link add {port} type veth peer name eth0 netns {self._holder.pid}",
            f"link set {port} master {_SWITCH} up",
            f"route add 10.244.{self.number}.0/24 via {self.address}",
        ):
            subprocess.run(["ip", *line.split()], check=True)
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", "10.250.0.254")


def make_switch() -> None:
    """Connects nodes to each other and to the caller, who also routes between their pods."""
    for line in (
        "link set lo up",
        f"link add {_SWITCH} type bridge",
        f"addr add 10.250.0.254/24 dev {_SWITCH}",
        f"link set {_SWITCH} up",
    ):
        subprocess.run(["ip", *line.split()], check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")


def _make_cgroup(name: str) -> None:
    """Makes a control group of each controller, or the one of all of them (version 2)."""
    if (_CGROUPS / "cgroup.controllers").exists():
        (_CGROUPS / name).mkdir(exist_ok=True)
        return
    for procs in _CGROUPS.glob("*/cgroup.procs"):
        (procs.parent / name).mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):
        inherited = (_CGROUPS / "cpuset" / file).read_text(encoding="ascii")
        (_CGROUPS / "cpuset" / name / file).write_text(inherited, encoding="ascii")


def _pod_network(number: int) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": f"10.244.{number}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge | {"ipam": addresses}]}


def _kubelet(number: int) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}-{number}",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # Else it needs the right to raise limits, which not every root has.
        "featureGates": {"KubeletInUserNamespace": True},
        "failSwapOn": False,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "clusterDNS": ["10.250.0.1"],
        "clusterDomain": "cluster.local",
        "syncFrequency": "5s",  # of secrets that are mounted; a minute unless it is set
    }
