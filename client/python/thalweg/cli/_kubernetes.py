"""Reads the state of Thalweg's pods with kubectl for `thalweg doctor --cluster`."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from thalweg.cli._finding import Finding

_KUBECTL_SECONDS = 15.0
_EVENTS = 5
# These are the chart's labels: of its own pods, and of pods of jobs with a sidecar.
_SELECTORS = ("app.kubernetes.io/part-of=thalweg", "thalweg.io/sidecar")
# These are the places where a definition must declare restartPolicy; otherwise the API server drops
# it from the sidecar and the job hangs. The chart's preflight refuses to install with such a
# definition.
_NATIVE_SIDECARS = {
    "pytorchjobs.kubeflow.org": "pytorchReplicaSpecs.template.spec",
    "clustertrainingruntimes.trainer.kubeflow.org": (
        "template.spec.replicatedJobs.template.spec.template.spec"
    ),
}


class _KubectlError(RuntimeError):
    """Holds kubectl's error message."""


def findings(namespace: str) -> list[Finding]:
    """Returns findings about kubectl's cluster; an empty `namespace` means the context's."""
    if shutil.which("kubectl") is None:
        return [Finding("note", "Kubernetes: not looked at, there is no kubectl")]
    where = ["--namespace", namespace] if namespace else []
    try:
        version = _ask("version")["serverVersion"]["gitVersion"]
        listed = [
            pod for labels in _SELECTORS for pod in _list("pods", "--selector", labels, *where)
        ]
        events = _list("events", "--field-selector", "type=Warning", *where)
    except _KubectlError as error:
        return [Finding("note", f"Kubernetes: not looked at: {error}")]
    # Pods of the DaemonSet bear both labels.
    named = {(pod["metadata"].get("namespace"), pod["metadata"]["name"]): pod for pod in listed}
    pods = [*named.values()]
    result = [Finding("ok", f"Kubernetes: {version}, pods of Thalweg: {len(pods)}")]
    for pod in pods:
        result += _pod(pod)
    result += _definitions()
    return [*result, *_warnings(pods, events)]


def _pod(pod: dict[str, Any]) -> Iterator[Finding]:
    name, status = f"pod {pod['metadata']['name']}", pod.get("status", {})
    phase = status.get("phase", "Unknown")
    if phase == "Succeeded":
        return
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    reasons = [
        f"{container['name']}: {state['reason']}"
        for container in containers
        for state in container.get("state", {}).values()
        if state.get("reason") not in (None, "Completed")
    ]
    ready = {c["type"]: c["status"] for c in status.get("conditions", ())}.get("Ready") == "True"
    if phase != "Running" or not ready:
        why = reasons or [status.get("reason") or "not ready"]
        yield Finding("FAIL", f"{name}: {phase}: {', '.join(why)}")
    for container in containers:
        if container.get("restartCount", 0):
            times = f"has been started {1 + container['restartCount']} times"
            yield Finding("warn", f"{name}: {container['name']} {times}")


def _definitions() -> Iterator[Finding]:
    for name, way in _NATIVE_SIDECARS.items():
        try:
            _kubectl("get", "customresourcedefinition", name)
        except _KubectlError:
            continue  # missing, or not visible to us: `explain` below could not tell which
        kind = name.partition(".")[0]
        try:
            _kubectl("explain", f"{kind}.spec.{way}.initContainers.restartPolicy")
        except _KubectlError as error:
            if "does not exist" not in str(error):
                yield Finding("note", f"{name}: not looked at: {error}")
                continue
            text = "drops restartPolicy of init containers: pods with a native sidecar would hang"
            yield Finding("FAIL", f"{name}: {text}; update the operator (deploy/README.md)")
        else:
            yield Finding("ok", f"{name}: keeps native sidecars")


def _warnings(pods: list[dict[str, Any]], events: list[dict[str, Any]]) -> Iterator[Finding]:
    """Returns the latest events of these pods and of the objects that created them."""
    names = {pod["metadata"]["name"] for pod in pods}
    names |= {owner["name"] for pod in pods for owner in pod["metadata"].get("ownerReferences", ())}
    ours = [event for event in events if event["involvedObject"].get("name") in names]
    ours.sort(key=lambda event: event["metadata"]["creationTimestamp"])
    for event in ours[-_EVENTS:]:
        thing = event["involvedObject"]
        what = f"{thing['kind']} {thing['name']}: {event.get('reason')}: {event.get('message')}"
        yield Finding("warn", f"event of {what}")


def _list(*arguments: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = _ask("get", *arguments)["items"]
    return items


def _ask(*arguments: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(_kubectl(*arguments, "--output=json"))
        return answer
    except ValueError as error:
        raise _KubectlError(f"kubectl {arguments[0]} does not answer in JSON: {error}") from None


def _kubectl(*arguments: str) -> str:
    command = ["kubectl", "--request-timeout=5s", *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_KUBECTL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _KubectlError(str(error)) from None
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"]
        raise _KubectlError(lines[-1])
    return result.stdout
