"""Runs a Kubernetes API server, without a scheduler and controllers.

It validates, prunes, stores and authorises like any other; pods never run, unless cluster.py adds
what a cluster needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".tools" / "bin"
START_SECONDS = 90.0
_FLAGS = """
--service-cluster-ip-range=10.0.0.0/24 --service-account-issuer=https://localhost
--authorization-mode=RBAC --allow-privileged=true
"""
# Nobody makes service accounts where no controller runs.
_ALONE = "--disable-admission-plugins=ServiceAccount"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class ApiServer:
    """Runs etcd and kube-apiserver. `folder` gets their files and an administrator's kubeconfig.

    It is reached at `address`; `enter` is a command that runs another one where that address is,
    and where `data` is a folder for etcd, by default in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        address: str = "127.0.0.1",
        enter: Sequence[str] = (),
        flags: str = _ALONE,
        data: str = "",
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = address
        self._enter = enter
        self._flags = flags
        self._data = data or str(folder / "etcd")
        self.kubeconfig = folder / "kubeconfig"
        self._token = secrets.token_hex(16)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._context = ssl._create_unverified_context()  # it signs its own certificate

    def start(self) -> None:
        """Starts both. Raises RuntimeError with the end of the log unless ready in time."""
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        key, tokens = self.folder / "sa.key", self.folder / "tokens.csv"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens.write_text(f"{self._token},admin,1,system:masters\n", encoding="ascii")
        self._write_kubeconfig()
        etcd = f"--listen-client-urls {client} --advertise-client-urls {client} "
        etcd += f"--listen-peer-urls {peer} --initial-advertise-peer-urls {peer} "
        etcd += f"--initial-cluster default={peer} --data-dir {self._data}"
        self._spawn("etcd", etcd)
        api = f"--etcd-servers={client} --secure-port={self.port} --cert-dir={self.folder / 'pki'} "
        api += f"--bind-address={self.address} --advertise-address={self.address} {self._flags} "
        api += f"--service-account-key-file={key} --service-account-signing-key-file={key} "
        self._spawn("kube-apiserver", f"{api} --token-auth-file={tokens} {_FLAGS}")
        self._await("/readyz", lambda status, _: status == 200, START_SECONDS)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def request(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Returns status and JSON of the answer. A `body` of text is YAML, any other is sent as
        JSON.
        """
        kind = "yaml" if isinstance(body, str) else "json"
        text = body if isinstance(body, str) else json.dumps(body)
        request = urllib.request.Request(
            f"https://{self.address}:{self.port}{path}",
            data=None if body is None else text.encode(),
            method=method,
            headers={
                "Authorization": f"Bearer {self._token}",
                "Accept": "application/json",
                "Content-Type": f"application/{kind}",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._context) as response:
                return response.status, _decode(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _decode(error.read())

    def define(self, path: Path) -> None:
        """Creates or replaces a CustomResourceDefinition, and waits until it is served."""
        where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # cert-manager ships its definitions as templates, with placeholders in their labels.
        text = "".join(line for line in lines if "{{" not in line)
        status, answer = self.request("POST", where, text)
        if status == 409:
            name = answer["details"]["name"]
            _, old = self.request("DELETE", f"{where}/{name}")
            self._await_kind(old, served=False)
            self._await(f"{where}/{name}", lambda found, _: found == 404, 30)
            status, answer = self.request("POST", where, text)
        assert status == 201, answer
        self._await_kind(answer, served=True)

    def ca_certificate(self) -> Path:
        return self.folder / "pki" / "apiserver.crt"

    def _await_kind(self, crd: Any, *, served: bool) -> None:
        """Waits until objects of the kind are served, and described to clients."""
        spec = crd["spec"]
        version, plural = f"{spec['group']}/{spec['versions'][0]['name']}", spec["names"]["plural"]
        self._await(f"/apis/{version}/{plural}", lambda status, _: (status == 200) == served, 30)

        def is_described(_: int, found: Any) -> bool:
            # The description of a group that has gone is empty for a while.
            paths = found.get("paths", ()) if isinstance(found, dict) else ()
            return any(path.endswith(f"/{plural}") for path in paths) == served

        self._await(f"/openapi/v3/apis/{version}", is_described, 30)

    def _spawn(self, name: str, arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            argv = [*self._enter, BIN / name, *arguments.split()]
            self._processes.append(
                subprocess.Popen(argv, stdout=log, stderr=log, env=dict(os.environ))
            )

    def _await(self, path: str, is_done: Any, seconds: float) -> None:
        """Polls until is_done(status, answer) or the server has ended."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if is_done(*self.request("GET", path)):
                    return
            except OSError:  # it is not listening yet
                pass
            dead = [process.args for process in self._processes if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                log = (self.folder / "kube-apiserver.log").read_text(encoding="utf-8")[-2000:]
                raise RuntimeError(
                    f"GET {path}: not as awaited in {seconds} s; ended: {dead}\n{log}"
                )
            # The end of the process is the only event to wait for, and it ends the wait at once.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[-1].wait(timeout=0.1)

    def _write_kubeconfig(self) -> None:
        server = {"server": f"https://{self.address}:{self.port}", "insecure-skip-tls-verify": True}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": "admin"}}],
            "current-context": "local",
        }
        self.kubeconfig.write_text(json.dumps(content), encoding="ascii")
        self.kubeconfig.chmod(0o600)


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()
