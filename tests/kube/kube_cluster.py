"""A Kubernetes cluster of several nodes on this machine, with real containers.

Every node has a network namespace; the API server, the controllers, the scheduler and CoreDNS run
as programs on the first one. The caller is the first process in network, mount and process
namespaces of its own, so that everything it starts ends with it: scripts/test_kube arranges that.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path
from typing import Any

from certificates import Authority
from node import SWITCH, SWITCH_ADDRESS, Node
from programs import BIN, Programs, run
from until import until

API = "10.250.0.1:6443"
_SERVICES = "10.0.0.0/24"
_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
_COREFILE = """\
.:53 {{
  bind 10.250.0.1
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig} test
    pods insecure
  }}
  cache 5
}}
"""


class Cluster:
    """Starts `count` nodes with these images in `folder`; `rate` shapes their links."""

    def __init__(self, folder: Path, images: Path, count: int, rate: str = "") -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self._images = images
        self._rate = rate
        self._programs = Programs(folder)
        self.nodes = [
            Node(number + 1, folder, self.kubeconfig, self._programs) for number in range(count)
        ]

    def start(self) -> None:
        """Returns when all nodes are ready."""
        self._connect()
        self._start_control_plane()
        for node in self.nodes:
            node.begin_with(self._images)
            node.start()
        (self.folder / "Corefile").write_text(_COREFILE.format(kubeconfig=self.kubeconfig))
        self._on_first("dns", "coredns", f"-conf {self.folder / 'Corefile'}")
        until("all nodes are ready", self.all_ready, 90, self._programs.said)

    def stop(self) -> None:
        self._programs.stop()
        for node in self.nodes:
            node.stop()

    def kubectl(self, *arguments: object, text: str | None = None, seconds: float = 120) -> str:
        """Runs kubectl, with `text` as its input; returns what it prints."""
        command = [BIN / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        return run(*command, input=text, timeout=seconds)

    def get(self, *arguments: object) -> Any:
        """Returns what `kubectl get` finds."""
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def try_kubectl(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [BIN / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        words = [str(word) for word in command]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    def _connect(self) -> None:
        for line in (
            "ip link set lo up",
            f"ip link add {SWITCH} type bridge",
            f"ip addr add {SWITCH_ADDRESS}/24 dev {SWITCH}",
            f"ip link set {SWITCH} up",
            "sysctl -qw net.ipv4.ip_forward=1",
        ):
            run(*line.split())
        for node in self.nodes:
            node.connect(self._rate)
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    node.run("ip", "route", "add", other.pods, "via", other.address)

    def _start_control_plane(self) -> None:
        pki = Authority(self.folder / "pki")
        server = pki.issue("api", *_NAMES, "127.0.0.1", "10.250.0.1", "10.0.0.1")
        key = self.folder / "accounts.key"
        run("openssl", "genrsa", "-out", key, "2048")
        token = secrets.token_hex(16)
        tokens = self.folder / "tokens.csv"
        tokens.write_text(f"{token},admin,1,system:masters\n", encoding="ascii")
        self._write_kubeconfig(server.ca, token)
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        etcd = f"--listen-client-urls {client} --advertise-client-urls {client} "
        etcd += f"--listen-peer-urls {peer} --initial-advertise-peer-urls {peer} "
        etcd += f"--initial-cluster default={peer} --data-dir {self.folder / 'etcd'} "
        self._on_first("etcd", "etcd", f"{etcd} --unsafe-no-fsync")
        api = f"--etcd-servers={client} --bind-address=0.0.0.0 --advertise-address=10.250.0.1 "
        api += f"--secure-port=6443 --tls-cert-file={server.folder / 'tls.crt'} "
        api += f"--tls-private-key-file={server.folder / 'tls.key'} --token-auth-file={tokens} "
        api += f"--service-account-key-file={key} --service-account-signing-key-file={key} "
        api += "--service-account-issuer=https://kubernetes.default.svc --allow-privileged=true "
        api += f"--authorization-mode=RBAC --service-cluster-ip-range={_SERVICES} "
        self._on_first(
            "api", "kube-apiserver", f"{api} --kubelet-preferred-address-types=InternalIP"
        )
        ready = ("get", "--raw=/readyz")
        until("the API server is ready", lambda: self._answers(*ready), 90, self._programs.said)
        common = f"--kubeconfig={self.kubeconfig} --leader-elect=false --bind-address=127.0.0.1"
        controllers = f"--service-account-private-key-file={key} --root-ca-file={server.ca}"
        # A node that is lost is noticed as quickly as a test can wait.
        controllers += " --node-monitor-grace-period=12s"
        self._on_first("controllers", "kube-controller-manager", f"{common} {controllers}")
        self._on_first("scheduler", "kube-scheduler", common)

    def _write_kubeconfig(self, ca: Path, token: str) -> None:
        server = {"server": f"https://{API}", "certificate-authority": str(ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config), encoding="utf-8")
        self.kubeconfig.chmod(0o600)

    def _on_first(self, name: str, program: str, arguments: str) -> None:
        self._programs.start(name, [program, *arguments.split()], prefix=self.nodes[0].prefix)

    def _answers(self, *arguments: object) -> bool:
        return self.try_kubectl(*arguments).returncode == 0

    def all_ready(self) -> bool:
        ready = 0
        for node in self.get("nodes")["items"]:
            conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
            ready += conditions.get("Ready") == "True"
        return ready == len(self.nodes)
