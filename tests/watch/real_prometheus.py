"""Runs a real Prometheus that scrapes given servers every second."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "bin"
PROGRAM, TOOL = (
    shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.defpath}")
    for name in ("prometheus", "promtool")
)
SCRAPE_SECONDS = 1.0  # as long as an answer may take: two that are missing would be a shard's end
MINUTE_SECONDS = 2.0  # length of a rule's minute in these tests


def hurried(rules: str) -> str:
    """Returns rules whose minutes take MINUTE_SECONDS. Days are unchanged."""

    def shorter(match: re.Match[str]) -> str:
        return f"{match[1]}{int(int(match[2]) * MINUTE_SECONDS * 1000)}ms"

    return re.sub(r"(\[|for: |offset )(\d+)m\b", shorter, rules)


class Prometheus:
    """Use as a context manager. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Sequence[str]],
        rules: str,
        scrape: Mapping[str, Any],
    ) -> None:
        """Prepares it. `targets`: host:port of the servers of each scrape job; `scrape`: settings
        of all jobs.
        """
        self._folder = folder
        (folder / "rules.yaml").write_text(rules, encoding="utf-8")
        interval = f"{int(SCRAPE_SECONDS * 1000)}ms"
        # Each target has the name of a StatefulSet's pod.
        jobs = [
            {
                "job_name": name,
                "static_configs": [
                    {"targets": [target], "labels": {"pod": f"{name}-{number}"}}
                    for number, target in enumerate(of_job)
                ],
                **scrape,
            }
            for name, of_job in targets.items()
        ]
        config = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
            },
            "rule_files": ["rules.yaml"],
            "scrape_configs": jobs,
        }
        # JSON is YAML.
        (folder / "prometheus.yaml").write_text(json.dumps(config), encoding="utf-8")
        self._url = ""

    def __enter__(self) -> Prometheus:
        assert PROGRAM is not None
        self._log = (self._folder / "log").open("w+b")
        argv = [PROGRAM, "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
        argv += ["--web.listen-address=127.0.0.1:0", "--log.level=debug"]
        self._process = subprocess.Popen(
            argv, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        try:
            self._url = f"http://127.0.0.1:{self._port()}"
            self.wait_for("Prometheus to be ready", self._is_ready, 20)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # its data is removed with its folder
        self._process.wait()
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the instant vector now: a list of {"metric": labels, "value": [time, text]}."""
        return list(self._get("query", query=expression)["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Returns all rules with their state: name, query, type, health, lastError …"""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Returns the names of firing alerts."""
        alerts = self._get("alerts")["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}

    def wait_for(self, what: str, condition: Any, seconds: float) -> None:
        """Polls until `condition()` is true; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._process.poll() is None, f"Prometheus has ended:\n{self.log}"
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
            select.select([], [], [], SCRAPE_SECONDS / 2)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def _port(self) -> int:
        """Returns the port that the system has chosen: the process listens on one TCP port."""
        found: list[int] = []

        def look() -> bool:
            found.extend(listening_ports(self._process.pid))
            return bool(found)

        self.wait_for("Prometheus to listen", look, 20)
        return found[0]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=10):
                return True
        except urllib.error.URLError:
            return False

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return dict(json.load(reply)["data"])


def listening_ports(pid: int) -> list[int]:
    """Returns the TCP ports on which a process listens, from /proc."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(str(fd.readlink()))
        except OSError:  # closed in the meantime
            continue
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports
