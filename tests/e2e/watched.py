"""Provides a cluster with a job that steps on command, and a browser."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness import Job, Servers, metric, servers
from playwright.sync_api import ConsoleMessage, Page, expect, sync_playwright

expect.set_options(timeout=60_000)  # a page asks seldom, and a busy machine answers late
CHROMIUM = "/usr/bin/chromium"  # Debian's
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
NODES = 2
JOB = "watched/50% <b>"  # this name is no path, no URL and no HTML


@dataclass
class Watched:
    """A job that steps only when told to: its figures do not change in between."""

    cluster: Servers
    job: Job
    orders: IO[str]
    done: IO[str]

    def step(self, count: int) -> None:
        """Returns when all workers have made `count` steps."""
        self.orders.write(f"{count}\n")
        assert self.done.readline() == f"{count}\n", self.job.output

    @property
    def http(self) -> str:
        return self.cluster.aggregators[0].http

    def shard_metric(self, name: str, label: str = "") -> float:
        return metric(self.cluster.aggregators[0], name, label)

    def sent(self, kind: str) -> float:
        """Returns the sidecars' counts of sent bytes, "raw" or "wire"."""
        name = f"thalweg_sidecar_{kind}_bytes_total"
        return sum(metric(server, name, 'direction="sent"') for server in self.cluster.sidecars)


@contextlib.contextmanager
def watched_job(
    folder: Path, server_env: Mapping[str, str] | None = None, *, hosted: bool = False
) -> Iterator[Watched]:
    """Runs a job on one aggregator, or on shards that its sidecars host."""
    with servers(shards=0 if hosted else 1, env=server_env) as cluster:
        for _ in range(NODES):
            cluster.add_sidecar(*(["--shard-listen", "127.0.0.1:0"] if hosted else []))
        env = {"THALWEG_JOB": JOB}
        for name in ("orders", "done"):
            os.mkfifo(folder / name)
            env[f"WATCHED_{name.upper()}"] = str(folder / name)
        sockets = [server.address for server in cluster.sidecars]
        script = Path(__file__).parent / "watched_jobs.py"
        job = Job("watched", cluster, folder, sidecar_of=sockets, env=env, jobs=script)
        # Both pipes are opened for reading too, so that neither end waits for the other or outlives
        # it.
        with (folder / "orders").open("r+b", 0) as raw, (folder / "done").open("r+b", 0) as back:
            orders = os.fdopen(os.dup(raw.fileno()), "w", buffering=1)
            done = os.fdopen(os.dup(back.fileno()))
            with orders, done:
                try:
                    yield Watched(cluster, job, orders, done)
                finally:
                    orders.write("0\n")
                    job.results()


@dataclass
class Browser:
    page: Page
    complaints: list[str] = field(default_factory=list)  # errors and warnings of the console


@contextlib.contextmanager
def browser(**options: Any) -> Iterator[Browser]:
    """Opens a browser page; `options` are those of Playwright's new_page()."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = chromium.new_page(viewport={"width": 1180, "height": 900}, **options)
        result = Browser(page)

        def listen(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                result.complaints.append(message.text)

        page.on("console", listen)
        page.on("pageerror", lambda error: result.complaints.append(str(error)))
        yield result
        chromium.close()


def api(http: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{http}/api/v1/{path}", timeout=10) as reply:
        assert reply.headers["Content-Type"] == "application/json"
        return json.load(reply)
