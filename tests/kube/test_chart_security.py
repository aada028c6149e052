"""Runs the chart's configuration of TLS and token with the real programs on this machine.

Secrets are folders with what cert-manager would make of the chart's Certificates; a path in a
container's environment is mapped to the secret that its pod mounts there. Ports become 0, the
shards' names their real addresses.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from chart_programs import addresses, environment, start, torchrun
from rendered import TLS, needs_helm, pod_of, the

from thalweg import _binaries
from thalweg._job._processes import Server

pytestmark = needs_helm
TOKEN = "hunter2"


@dataclass
class Release:
    """Secrets by name, and the programs that run."""

    folder: Path
    secrets: dict[str, Path]
    aggregators: list[Server] = field(default_factory=list)

    def variables(self, pod: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
        """Returns the container's variables that are paths in its secrets, mapped to here."""
        volumes = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
        folders = {
            mount["mountPath"]: self.secrets[volumes[mount["name"]]]
            for mount in container["volumeMounts"]
            if mount["name"] in volumes
        }
        values = {variable["name"]: variable["value"] for variable in container["env"]}
        return {
            name: str(folders[str(Path(value).parent)] / Path(value).name)
            for name, value in values.items()
            if str(Path(value).parent) in folders
        }


@pytest.fixture
def release() -> Iterator[Release]:
    """Yields two shards whose certificate names this machine too."""
    with tempfile.TemporaryDirectory(prefix="kube-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        authority = Authority(folder / "authority")
        made = [
            authority.fulfil(the("Certificate", "-aggregator", TLS), "127.0.0.1"),
            authority.fulfil(the("Certificate", "-sidecar", TLS)),
        ]
        token = folder / "page"
        token.mkdir()
        (token / "token").write_text(TOKEN, encoding="ascii")
        secrets = {secret.folder.name: secret.folder for secret in made}
        found = Release(folder, secrets | {"page": token})
        pod = pod_of("StatefulSet", settings=TLS)
        for _ in range(2):
            container = pod["containers"][0]
            env = found.variables(pod, container)
            found.aggregators.append(start(_binaries.AGGREGATOR, container, folder, **env))
            stack.callback(found.aggregators[-1].stop, 20)
        yield found


def endpoint(kind: str) -> dict[str, Any]:
    """Returns how a monitor scrapes servers."""
    spec = the(kind, settings=TLS)["spec"]
    return dict(spec.get("endpoints", spec.get("podMetricsEndpoints"))[0])


def server_name(kind: str) -> str:
    return str(endpoint(kind)["tlsConfig"]["serverName"])


def scrape(server: Server, kind: str, release: Release) -> str:
    """Returns the status line of an answer to a request like Prometheus's."""
    how = endpoint(kind)
    assert how["scheme"] == "https"
    ca, token = how["tlsConfig"]["ca"]["secret"], how["authorization"]["credentials"]
    context = ssl.create_default_context(cafile=release.secrets[ca["name"]] / ca["key"])
    bearer = (release.secrets[token["name"]] / token["key"]).read_text(encoding="ascii")
    host, _, port = server.http.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 10) as connection,
        context.wrap_socket(connection, server_hostname=server_name(kind)) as tls,
    ):
        request = f"GET {how['path']} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {bearer}"
        tls.sendall(f"{request}\r\nConnection: close\r\n\r\n".encode())
        return tls.makefile("r", encoding="utf-8").readline().strip()


def probe(server: Server, container: dict[str, Any], kind: str) -> int:
    """Returns the status for a kubelet, which checks no certificate and has no token."""
    get = container[kind]["httpGet"]
    url = f"{get['scheme'].lower()}://{server.http}{get['path']}"
    context = ssl._create_unverified_context()
    with urllib.request.urlopen(url, timeout=10, context=context) as reply:
        return int(reply.status)


def test_probes_and_monitors_reach_shards_and_strangers_do_not(release):
    server = release.aggregators[0]
    container = pod_of("StatefulSet", settings=TLS)["containers"][0]
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    assert [probe(server, container, kind) for kind in kinds] == [200] * 3
    assert scrape(server, "ServiceMonitor", release) == "HTTP/1.1 200 OK"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        stranger = ssl._create_unverified_context()
        urllib.request.urlopen(f"https://{server.http}/metrics", timeout=10, context=stranger)


@pytest.mark.parametrize(
    ("kind", "where"), [("PyTorchJob", "initContainers"), ("DaemonSet", "containers")]
)
def test_probes_and_monitors_reach_sidecars(release, kind, where):
    pod = pod_of(kind, settings=TLS)
    container = pod[where][0]
    env = release.variables(pod, container)
    env["THALWEG_AGGREGATORS"] = addresses(release.aggregators)
    server = start(_binaries.SIDECAR, container, release.folder, **env)
    try:
        assert probe(server, container, "livenessProbe") == 200
        assert scrape(server, "PodMonitor", release) == "HTTP/1.1 200 OK"
    finally:
        server.stop(20)


def helm_test(release: Release, env: dict[str, str]) -> Any:
    """Returns the result of the pod of `helm test`, with this environment added to its own."""
    container = the("Pod", "test", TLS)["spec"]["containers"][0]
    script = release.folder / "round.py"
    script.write_text(the("ConfigMap", "test", TLS)["data"]["round.py"], encoding="utf-8")
    arguments = [word.replace("/test/round.py", str(script)) for word in container["command"][1:]]
    shards = addresses(release.aggregators)
    variables = environment(container, release.folder, THALWEG_AGGREGATORS=shards, **env)
    return torchrun(arguments, {name: value for name, value in variables.items() if value})


def test_helm_test_sends_a_round_by_mutual_tls(release):
    spec = the("Pod", "test", TLS)["spec"]
    result = helm_test(release, release.variables(spec, spec["containers"][0]))
    assert result.returncode == 0, result.stderr
    assert "2 nodes got the right mean of 524288 gradients" in result.stdout


def test_helm_test_fails_without_a_certificate(release):
    names = ("TLS_CERT", "TLS_KEY", "TLS_CA", "HTTP_TOKEN_FILE")
    without = {f"THALWEG_{name}": "" for name in names} | {"THALWEG_TIMEOUT": "3"}
    result = helm_test(release, without)
    assert result.returncode != 0
    assert release.aggregators[0].address in result.stderr
