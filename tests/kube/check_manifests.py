"""Checks that the hand-written files in deploy/ agree with the chart and the programs.

Usage: helm template … --set pytorchJob.enabled=true | check_manifests.py COMPOSE_SCHEMA. Exit code
1, and a line for each difference, if they do not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "deploy" / "jobs"
CONFIG_MAP = "thalweg-aggregators"
_VARIABLE = re.compile(r"\b(?:THALWEG|AIAK)_[A-Z_]+\b")


def load(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def sidecars(document: Any) -> Iterator[dict[str, Any]]:
    """Yields every container named thalweg-sidecar."""
    if isinstance(document, dict):
        if document.get("name") == "thalweg-sidecar":
            yield document
        for value in document.values():
            yield from sidecars(value)
    elif isinstance(document, list):
        for value in document:
            yield from sidecars(value)


def containers(document: Any) -> Iterator[dict[str, Any]]:
    """Yields every container that uses a sidecar of the chart."""
    if isinstance(document, dict):
        if any(v.get("name") == "THALWEG_SIDECAR" for v in document.get("env") or ()):
            yield document
        for value in document.values():
            yield from containers(value)
    elif isinstance(document, list):
        for value in document:
            yield from containers(value)


def comparable(sidecar: dict[str, Any], told: dict[str, str]) -> dict[str, Any]:
    """Returns the sidecar without its image and what a ConfigMap of the chart, `told`, tells it."""
    result = {key: value for key, value in sidecar.items() if key not in ("image", "envFrom")}
    result["args"] = [
        re.sub(r"\$\((THALWEG_\w+)\)", lambda name: told[name[1]], a) for a in sidecar["args"]
    ]
    result["env"] = [v for v in sidecar["env"] if v["name"] not in told]
    return result


def differences(chart: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a line for each manifest whose sidecar is not the chart's."""
    told = next(d["data"] for d in chart if d["metadata"]["name"] == CONFIG_MAP)
    expected = comparable(next(sidecars(chart)), told)
    found = 0
    for path in sorted(JOBS.glob("*.yaml")):
        for sidecar in sidecars(load(path.read_text(encoding="utf-8"))):
            found += 1
            ours = comparable(sidecar, told)
            for key in sorted(expected.keys() | ours.keys()):
                if expected.get(key) != ours.get(key):
                    yield f"{path.name}: {key} is {ours.get(key)}, in the chart {expected.get(key)}"
    if found < 4:
        yield f"deploy/jobs has {found} sidecars, expected a Master's and a Worker's in 2 files"


def untold_workers(chart: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a line for each variable that workers have in the chart, and in a manifest neither as
    there nor from the ConfigMap."""
    expected = [v for v in next(containers(chart))["env"] if v["name"].startswith("THALWEG_")]
    for path in sorted(JOBS.glob("*.yaml")):
        for container in containers(load(path.read_text(encoding="utf-8"))):
            ours = {v["name"]: v for v in container["env"]}
            for variable in expected:
                name = variable["name"]
                mine = ours.get(name, {})
                of = mine.get("valueFrom", {}).get("configMapKeyRef", {})
                if mine != variable and (of.get("name"), of.get("key")) != (CONFIG_MAP, name):
                    yield f"{path.name}: {name} is {mine}, in the chart {variable}"


def closed_ports() -> Iterator[str]:
    """Yields a line for each manifest whose policy does not open the ports of hosted shards."""
    for path in sorted(JOBS.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        ports = re.search(r"THALWEG_SHARD_PORTS.*\n\s*value: (\d+)-(\d+)\n", text)
        for policy in (d for d in load(text) if d["kind"] == "NetworkPolicy"):
            opened = [port for rule in policy["spec"]["ingress"] for port in rule["ports"]]
            pairs = [(str(port["port"]), str(port.get("endPort"))) for port in opened]
            if ports is None or ports.groups() not in pairs:
                yield f"{path.name}: the policy opens {pairs}, THALWEG_SHARD_PORTS is {ports}"


def unknown_variables() -> Iterator[str]:
    """Yields a line for each variable that deploy/ or the chart sets and no program knows."""
    known = set(_VARIABLE.findall((ROOT / "docs" / "zero_code.md").read_text(encoding="utf-8")))
    known |= set(_VARIABLE.findall((ROOT / "core" / "base" / "env.cc").read_text(encoding="utf-8")))
    files = [*(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "helm" / "thalweg").rglob("*.yaml")]
    files += (ROOT / "helm" / "thalweg").rglob("*.tpl")
    for path in sorted(files):
        for name in sorted(set(_VARIABLE.findall(path.read_text(encoding="utf-8"))) - known):
            if not name.endswith("_"):  # AIAK_… in prose
                yield f"{path.relative_to(ROOT)}: nothing knows {name}"


def compose_errors(schema: Path) -> Iterator[str]:
    """Yields a line for each element of the compose file that the specification does not define."""
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text(encoding="utf-8")))
    compose = load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))[0]
    for error in validator.iter_errors(compose):
        yield f"compose.yaml: {'.'.join(map(str, error.absolute_path))}: {error.message}"


def main() -> int:
    chart = load(sys.stdin.read())
    wrong = [*differences(chart), *untold_workers(chart), *closed_ports(), *unknown_variables()]
    wrong += compose_errors(Path(sys.argv[1]))
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
