"""Tests dashboards and alerts on a real Prometheus that scrapes a real job of 2 nodes and 2 shards.

Everything uses TLS, and Prometheus sends a token.
"""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import dashboards
import metrics_doc
import pytest
from certificates import Authority, Secret
from harness import Job, Servers, metric_in, servers
from real_prometheus import PROGRAM, TOOL, Prometheus, hurried

ROOT = dashboards.ROOT
OUT = ROOT / "out" / "metrics"
# The waits of a test, and those of the fixture, take minutes at worst.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]
needs_prometheus = pytest.mark.skipif(
    PROGRAM is None or TOOL is None, reason="there is no prometheus; scripts/setup unpacks it"
)
POLICY = 'tenant { name: "all" spiffe_id: "spiffe://test/all" job: "*" }'
# A job that fails stands for less than 15 of the hurried rules' minutes, 30 s: that would be an
# alert of its own.
TIMEOUTS = {"THALWEG_TIMEOUT": "24", "THALWEG_STEP_TIMEOUT": "24"}
# Grafana would insert these values for the variables.
VALUES = {
    "sidecars": "sidecars",
    "aggregators": "aggregators",
    "node": ".+",
    "shard": ".+",
    "__rate_interval": "12s",
    "__range": "4m",
}
# This splits an alert into its comparisons; between them are expressions that always have a value.
CONDITION = re.compile(
    r"\s+(?:(?:and|or|unless)\b(?: (?:on|ignoring) \([\w, ]+\))?|(?:==|>|<)\s[\d.]+)"
)


class Kubelet:
    """Replaces secrets as a kubelet does: all files at once, by a link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._link = folder / "secret"
        self._authority = Authority(folder / "authority")

    def mount(self, days: int) -> Secret:
        """Makes a new certificate, valid for `days`; the secret's paths stay the same."""
        new = self._folder / "new"
        names = ("127.0.0.1", "spiffe://test/all")
        new.symlink_to(self._authority.issue(f"valid-{days}", *names, days=days).folder)
        new.replace(self._link)
        return Secret(self._link)


class Watched:
    """The job, its servers, and the Prometheus that watches it."""

    def __init__(
        self, cluster: Servers, job: Job, prometheus: Prometheus, kubelet: Kubelet, folder: Path
    ) -> None:
        self.kubelet = kubelet
        self.cluster = cluster
        self.job = job
        self.prometheus = prometheus
        self._mode = folder / "mode"

    def set_mode(self, mode: str) -> None:
        """Sets watch_job.py's mode in one operation: a worker may be reading."""
        new = self._mode.with_suffix(".new")
        new.write_text(mode, encoding="utf-8")
        new.replace(self._mode)

    def value(self, expression: str) -> float:
        """Returns the expression's value; 0 when there is none yet."""
        result = self.prometheus.query(expression)
        return float(result[0]["value"][1]) if result else 0.0

    def has_data(self, expression: str) -> bool:
        """Returns whether there is at least one number."""
        values = [float(sample["value"][1]) for sample in self.prometheus.query(expression)]
        return any(not math.isnan(value) for value in values)

    def pages(self) -> list[str]:
        """Returns /metrics of all servers."""
        cluster = self.cluster
        return [cluster.page(server) for server in [*cluster.aggregators, *cluster.sidecars]]


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watch")
    (folder / "mode").write_text("run", encoding="utf-8")
    (folder / "token").write_text("hunter2\n", encoding="ascii")
    (folder / "policy").write_text(POLICY, encoding="ascii")
    kubelet = Kubelet(folder)
    secret = kubelet.mount(days=60)
    env = secret.environment() | {
        "THALWEG_HTTP_TOKEN_FILE": str(folder / "token"),
        "THALWEG_POLICY": str(folder / "policy"),
    }
    scrape = {
        "scheme": "https",
        "tls_config": {"ca_file": str(secret.ca)},
        "authorization": {"credentials_file": str(folder / "token")},
    }
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(servers(env=env))
        for number in range(2):
            cluster.add_aggregator("--state-dir", str(folder / f"state{number}"))
        for _ in range(2):
            cluster.add_sidecar()
        sockets = [server.address for server in cluster.sidecars]
        script = Path(__file__).with_name("watch_job.py")
        job = Job("watch", cluster, folder, sidecar_of=sockets, jobs=script, env=TIMEOUTS)
        stack.callback(end, job)
        targets = {
            "aggregators": [server.http for server in cluster.aggregators],
            "sidecars": [server.http for server in cluster.sidecars],
        }
        rules = hurried(dashboards.RULES.read_text(encoding="utf-8"))
        prometheus = stack.enter_context(Prometheus(folder, targets, rules, scrape))
        watched = Watched(cluster, job, prometheus, kubelet, folder)
        prometheus.wait_for(
            "the job to compress", lambda: watched.value(TRAINS) > 0 or has_ended(job), 120
        )
        assert not has_ended(job), job.output
        yield watched


STEPS = "min(thalweg_sidecar_steps_total)"
# Compression is on, and a window of every rule has data.
TRAINS = "min(increase(thalweg_sidecar_compressed_buckets_total[20s]))"


def has_ended(job: Job) -> bool:
    return any(worker.process.poll() is not None for worker in job.workers)


def end(job: Job) -> None:
    for worker in job.workers:
        worker.process.kill()
        worker.process.wait()


def filled(expression: str) -> str:
    """Returns a dashboard's expression with its variables' values."""
    return re.sub(r"\$(\w+)", lambda match: VALUES[match[1]], expression)


def balanced(piece: str) -> str:
    """Returns the part of a piece in which every parenthesis has its other one."""
    opened: list[int] = []
    for at, character in enumerate(piece):
        if character == "(":
            opened.append(at)
        elif character == ")":
            if not opened:
                return piece[:at]
            opened.pop()
    return piece[opened[-1] + 1 :] if opened else piece


def parts(alert: str) -> list[str]:
    """Returns the expressions that an alert compares."""
    pieces = [balanced(piece).strip() for piece in CONDITION.split(alert)]
    return [piece for piece in pieces if piece]


def await_data(watched: Watched, expressions: Iterable[tuple[str, str]]) -> None:
    """Waits until each expression has returned data once: windows are short here."""
    empty = list(expressions)

    def all_have_had_data() -> bool:
        empty[:] = [named for named in empty if not watched.has_data(named[1])]
        return not empty

    with contextlib.suppress(AssertionError):
        watched.prometheus.wait_for("data", all_have_had_data, 60)
    assert empty == []


@needs_prometheus
def test_every_expression_of_the_dashboards_returns_data(watched):
    await_data(watched, [(where, filled(e)) for where, e in dashboards.expressions()])


@needs_prometheus
def test_every_expression_of_the_rules_returns_data(watched):
    rules = watched.prometheus.rules()
    assert len(rules) > 10
    await_data(
        watched,
        [
            (rule["name"], piece)
            for rule in rules
            for piece in (parts(rule["query"]) if rule["type"] == "alerting" else [rule["name"]])
        ],
    )
    assert [rule for rule in rules if rule["health"] == "err"] == []


@needs_prometheus
def test_nothing_fires_while_a_job_is_well(watched):
    assert watched.prometheus.firing() == set()


@needs_prometheus
def test_document_says_what_servers_export(watched):
    pages = watched.pages()
    OUT.mkdir(parents=True, exist_ok=True)
    for number, page in enumerate(pages):
        (OUT / f"{number}.txt").write_text(page, encoding="utf-8")
    written = metrics_doc.DOCUMENT.read_text(encoding="utf-8")
    assert metrics_doc.render(pages, written) == written, (
        f"docs/metrics.md is stale: python tests/watch/metrics_doc.py {OUT.relative_to(ROOT)}/*.txt"
    )


def test_document_has_every_metric_in_the_sources():
    listed = subprocess.run(
        ["git", "ls-files", "server/*.cc", "core/*.cc"], cwd=ROOT, capture_output=True, check=True
    )
    sources = [name for name in listed.stdout.decode().split() if not name.endswith("_test.cc")]
    names = set()
    for name in sources:
        text = (ROOT / name).read_text(encoding="utf-8")
        names |= set(re.findall(r'"(thalweg_(?:sidecar|shard|grpc|build|tls)_\w+)"', text))
    document = metrics_doc.DOCUMENT.read_text(encoding="utf-8")
    assert len(names) > 30
    assert {name for name in names if f"| `{name}` |" not in document} == set()


@needs_prometheus
def test_promtool_finds_nothing_wrong_with_the_metrics(watched):
    for page in watched.pages():
        checked = subprocess.run(
            [str(TOOL), "check", "metrics"], input=page, capture_output=True, text=True
        )
        assert (checked.returncode, checked.stderr) == (0, "")


def await_alerts(watched: Watched, *names: str) -> None:
    with contextlib.suppress(AssertionError):
        watched.prometheus.wait_for(
            f"{names} to fire", lambda: watched.prometheus.firing() >= set(names), 160
        )
    assert watched.prometheus.firing() == set(names)


@needs_prometheus
def test_slow_node_fires_the_straggler_alert_and_no_other(watched):
    watched.set_mode("slow")
    await_alerts(watched, "ThalwegStraggler")
    share = watched.prometheus.query("instance_node:thalweg_shard_waited_for:share_rate5m")
    slowest = max(share, key=lambda sample: float(sample["value"][1]))
    assert slowest["metric"]["node"] == "1"  # of the last rank


@needs_prometheus
def test_loss_that_is_no_number_fires_the_non_finite_alert_and_no_other(watched):
    watched.set_mode("nan")
    watched.prometheus.wait_for(
        "the earlier fault to pass",
        lambda: "ThalwegStraggler" not in watched.prometheus.firing(),
        80,
    )
    await_alerts(watched, "ThalwegNonFinite")


@needs_prometheus
def test_certificate_that_expires_soon_fires_its_alert_and_a_new_one_ends_it(watched):
    watched.set_mode("run")
    prometheus = watched.prometheus
    prometheus.wait_for("the earlier fault to pass", lambda: not prometheus.firing(), 80)
    watched.kubelet.mount(days=2)
    await_alerts(watched, "ThalwegCertificateExpiring")
    alerts = prometheus.query('ALERTS{alertname="ThalwegCertificateExpiring",alertstate="firing"}')
    labels = [(a["metric"]["certificate"], a["metric"]["severity"]) for a in alerts]
    assert set(labels) == {("own", "warning")}
    steps = watched.value(STEPS)
    watched.kubelet.mount(days=61)
    prometheus.wait_for("the alert to end", lambda: not prometheus.firing(), 160)
    prometheus.wait_for("the job to go on", lambda: watched.value(STEPS) > steps, 80)


@needs_prometheus
def test_killed_shard_fires_shard_down_and_jobs_failing(watched):
    watched.set_mode("run")
    watched.prometheus.wait_for(
        "the earlier fault to pass", lambda: not watched.prometheus.firing(), 80
    )
    watched.cluster.aggregators[1].process.kill()
    await_alerts(watched, "ThalwegShardDown", "ThalwegJobsFailing")
    down = watched.prometheus.query('ALERTS{alertname="ThalwegShardDown"}')
    assert [a["metric"]["instance"] for a in down] == [watched.cluster.aggregators[1].http]
    name = "thalweg_sidecar_jobs_ended_total"
    for server in watched.cluster.sidecars:
        page = watched.cluster.page(server)
        assert metric_in(page, name) == 1
        assert metric_in(page, name, 'outcome="ok"') == 0
