"""Runs the commands of docs/cce.md on a cluster with nodes, which `make test-kube` starts."""

from __future__ import annotations

import re
import shutil

import pytest
from api_server import ROOT
from cluster import needs_nodes
from kube_jobs import losses, outside
from releases import REGISTRY
from rendered import HELM
from timing import timed

PAGE = (ROOT / "docs" / "cce.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^## (.*?)$|(<!-- not run -->\n)?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = needs_nodes(3)


def sections():
    """Returns the commands of each section that has some, by its title."""
    found, title = {}, ""
    for heading, is_left_out, commands in BLOCK.findall(PAGE):
        title = heading or title
        if commands and not is_left_out:
            found[title] = found.get(title, "") + commands
    return found


@pytest.fixture
def clone(tmp_path):
    """A folder with deploy and helm, with requests that two cores can grant."""
    for name in ("deploy", "helm"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in [*tmp_path.glob("deploy/jobs/*.yaml"), tmp_path / "helm/thalweg/values.yaml"]:
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'cpu: "\d"', "cpu: 100m", text), encoding="utf-8")
    return tmp_path


def test_page_leads_from_an_empty_cluster_to_a_job_and_back(cluster, clone):
    cluster.kubectl("delete", "namespace", "ml", "--ignore-not-found")
    (clone / ".docker").mkdir()
    (clone / ".docker" / "config.json").write_text('{"auths": {}}', encoding="utf-8")
    said = {}
    for title, commands in sections().items():
        script = commands.replace("registry.baidubce.com/YOUR_PROJECT", REGISTRY)
        path = f"PATH={HELM.parent}:{ROOT / '.venv' / 'bin'}:$PATH HOME={clone}\ncd {clone}\n"
        with timed(f"docs/cce.md: {title}"):
            done = cluster.run("bash", "-euo", "pipefail", "-c", path + script, seconds=400)
        said[title] = done.stdout
        assert done.returncode == 0, f"{title}: {done.stdout}\n{done.stderr}"
    assert list(said) == [
        "A namespace, and the registry's password",
        "Does the operator keep native sidecars?",
        "The release",
        "The job",
        "Looking at it",
        "The end",
    ]
    assert "restartPolicy" in said["Does the operator keep native sidecars?"]
    assert "2 replicas are bit-identical" in said["The job"]
    assert losses(said["The job"]) == outside()
    assert "0 warn, 0 FAIL" in said["Looking at it"]
