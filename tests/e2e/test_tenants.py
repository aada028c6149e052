"""Tests a policy: which certificates take part in which jobs, and how much they may use."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import secrets
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
import torch
from averaging import Averaging
from certificates import Authority
from harness import TIMEOUT, metric_in, servers
from shard_nodes import ELEMENTS, offers, session, train
from waiting import pass_time, until

from thalweg import _binaries

POLICY = """\
tenant {{
  name: "a"
  spiffe_id: "spiffe://test/a/*"
  job: "a-*"
  {quotas}
}}
tenant {{ name: "b" common_name: "b" job: "b-*" }}
"""


class Shared:
    """An aggregator with a policy, and sidecars of its tenants."""

    def __init__(self, folder, cluster, authority, quotas):
        self.policy = folder / "policy"
        self.write(quotas)
        self.authority = authority
        self.cluster = cluster
        cluster.env = authority.issue("shard", "127.0.0.1").environment()
        self.shard = cluster.add_aggregator("--policy", str(self.policy))

    def write(self, quotas):
        # Readers see the old file or the new one, as with a ConfigMap.
        new = self.policy.with_suffix(".new")
        new.write_text(POLICY.format(quotas=quotas), encoding="ascii")
        new.rename(self.policy)

    def sidecar(self, name, *names, flags=()):
        """Returns the socket of a sidecar whose certificate has these names."""
        secret = self.authority.issue(name, "127.0.0.1", *names)
        return self.cluster.add_sidecar(*flags, env=secret.environment()).address

    def jobs(self):
        return json.loads(self.cluster.page(self.shard, "/api/v1/jobs"))["jobs"]

    def refused(self, reason):
        page = self.cluster.page(self.shard)
        return metric_in(page, "thalweg_shard_refused_total", f'reason="{reason}"')


@contextlib.contextmanager
def shared(folder, quotas=""):
    authority = Authority(folder / "authority")
    with servers(env={}) as cluster:
        yield Shared(folder, cluster, authority, quotas)


def of_one(sidecar, job, **settings):
    """Trains a job of one node on the aggregator."""
    mean = train(sidecar, 0, [], [], secrets.token_hex(32), job=job, nodes=1, **settings)
    assert torch.equal(mean, torch.ones(ELEMENTS))


def test_tenant_trains_its_own_jobs_and_another_is_refused_logged_once_and_counted(tmp_path, capfd):
    with shared(tmp_path) as running:
        a = running.sidecar("node", "spiffe://test/a/one")
        b = running.sidecar("b")
        of_one(a, "a-1")
        of_one(b, "b-1")
        capfd.readouterr()
        with pytest.raises(RuntimeError, match="tenant 'b'") as raised:
            of_one(b, "a-1")
        expected = (
            "job 'a-1': certificate 'CN=b' belongs to tenant 'b', which may take part in jobs "
            "'b-*' only"
        )
        assert expected in str(raised.value)
        assert running.refused("job") == 1
        told = [line for line in capfd.readouterr().err.splitlines() if "refused: " in line]
        assert len(told) == 1 and expected in told[0], told
        of_one(a, "a-2")


def test_tenant_beyond_its_quota_is_refused_while_others_go_on(tmp_path):
    with shared(tmp_path, "max_jobs: 1") as running:
        a = running.sidecar("node", "spiffe://test/a/one")
        b = running.sidecar("b")
        first = session(a, 0, [], [], secrets.token_hex(32), job="a-1", nodes=1)
        with contextlib.closing(first):
            with pytest.raises(RuntimeError, match=r"tenant 'a' has 1 jobs .* quota is 1"):
                of_one(a, "a-2")
            assert running.refused("quota") == 1
            of_one(b, "b-1")
            [mean] = Averaging(first, [ELEMENTS]).means([torch.ones(ELEMENTS)])
            assert torch.equal(mean, torch.ones(ELEMENTS))
        until("the end of the jobs", lambda: not running.jobs(), TIMEOUT, every=0.02)
        of_one(a, "a-3")


def await_told(capfd, text):
    """Returns when a server has logged the text."""
    told = []

    def is_told():
        told.append(capfd.readouterr().err)
        return text in "".join(told)

    until(f"'{text}' in the log", is_told, TIMEOUT, lambda: "".join(told), every=0.05)


def test_changed_policy_counts_without_a_restart_and_a_bad_one_does_not(tmp_path, capfd):
    with shared(tmp_path, "max_memory_bytes: 1") as running:
        a = running.sidecar("node", "spiffe://test/a/one")
        for quotas, answer in (
            ("max_memory_bytes: none", f"{running.policy}:5:21: "),
            ("max_memory_bytes: 2", "has changed: 2 tenants"),
        ):
            with pytest.raises(RuntimeError, match="of the quota of tenant 'a' of 1 are free"):
                of_one(a, "a-1")
            running.write(quotas)
            await_told(capfd, answer)
        with pytest.raises(RuntimeError, match="of the quota of tenant 'a' of 2 are free"):
            of_one(a, "a-1")
        running.write("")
        await_told(capfd, "has changed: 2 tenants")
        of_one(a, "a-1")


def test_hosted_shard_takes_the_nodes_of_its_tenant_only(tmp_path):
    with shared(tmp_path) as running:
        listen = ["--shard-listen", "127.0.0.1:0", "--policy", str(running.policy)]
        own = [running.sidecar(f"node{k}", f"spiffe://test/a/{k}", flags=listen) for k in range(2)]
        theirs = running.sidecar("b")
        secret = secrets.token_hex(32)
        with (
            offers(own, secret, "a-1") as shards,
            concurrent.futures.ThreadPoolExecutor(2) as pool,
        ):
            with pytest.raises(RuntimeError, match="belongs to tenant 'b'"):
                session(theirs, 1, [shards[0]], [0], secret, job="a-1").close()
            trained = [
                pool.submit(train, path, node, shards, [0, 1], secret, job="a-1")
                for node, path in enumerate(own)
            ]
            for mean in [future.result(2 * TIMEOUT) for future in trained]:
                assert torch.equal(mean, torch.full((ELEMENTS,), 1.5))


def is_answered(address, trusted, secret):
    """Connects as a client with the certificate, or with none; an HTTP/2 server speaks first."""
    context = ssl.create_default_context(cafile=trusted)
    context.set_alpn_protocols(["h2"])
    if secret:
        context.load_cert_chain(secret.folder / "tls.crt", secret.folder / "tls.key")
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), TIMEOUT) as connection,
        context.wrap_socket(connection, server_hostname=host) as tls,
        # In TLS 1.3 the client has finished before the server has judged its certificate.
        contextlib.suppress(ssl.SSLError, ConnectionResetError),
    ):
        return tls.recv(1) != b""
    return False


@pytest.mark.parametrize("kind", ["none", "of another CA", "expired"])
def test_client_without_a_good_certificate_is_refused_logged_once_and_counted(
    kind, tmp_path, capfd
):
    with shared(tmp_path) as running:
        secret = None
        if kind == "of another CA":
            stranger = Authority(tmp_path / "stranger")
            secret = stranger.issue("node", "127.0.0.1", "spiffe://test/a/one")
        if kind == "expired":
            secret = running.authority.issue("late", "spiffe://test/a/one")
            running.authority.let_expire(secret)
            pass_time(2)  # certificates count whole seconds
        good = running.authority.issue("good", "127.0.0.1")
        assert is_answered(running.shard.address, good.ca, good)
        capfd.readouterr()
        assert not is_answered(running.shard.address, good.ca, secret)
        page = running.cluster.page(running.shard)
        assert metric_in(page, "thalweg_grpc_handshakes_failed_total") == 1
        told = [line for line in capfd.readouterr().err.splitlines() if "Handshake failed" in line]
        assert len(told) == 1, told


def started_with(*arguments, **env):
    """Returns how an aggregator ends that cannot start."""
    argv = [str(_binaries.find(_binaries.AGGREGATOR)), "--listen=127.0.0.1:0", *arguments]
    variables = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(
        argv, env=variables, capture_output=True, text=True, timeout=20, check=False
    )


def test_policy_without_tls_is_an_error(tmp_path):
    path = tmp_path / "policy"
    path.write_text(POLICY.format(quotas=""), encoding="ascii")
    for ended in (started_with("--policy", str(path)), started_with(THALWEG_POLICY=str(path))):
        assert ended.returncode == 2
        assert f"the policy '{path}' needs TLS" in ended.stderr + ended.stdout


def test_policy_that_is_missing_or_wrong_is_an_error_with_its_line(tmp_path):
    env = Authority(tmp_path / "authority").issue("shard", "127.0.0.1").environment()
    path = tmp_path / "policy"
    missing = started_with("--policy", str(path), **env)
    assert missing.returncode == 2
    assert f"cannot read the policy '{path}'" in missing.stderr + missing.stdout
    path.write_text(POLICY.format(quotas="max_jobs: many"), encoding="ascii")
    wrong = started_with("--policy", str(path), **env)
    assert wrong.returncode == 2
    assert f"{path}:5:13: " in wrong.stderr + wrong.stdout


@pytest.mark.parametrize(
    ("page", "begin"), [("docs/security.md", "```proto\n"), ("deploy/README.md", "  policy: |\n")]
)
def test_example_of_the_documentation_is_a_policy(page, begin, tmp_path):
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    example = text.partition(begin)[2].partition("```")[0]
    assert "tenant {" in example
    with shared(tmp_path) as running:
        path = tmp_path / "example"
        path.write_text(example, encoding="utf-8")
        running.cluster.add_aggregator("--policy", str(path))
