"""Tests training scripts that are drawn at random (random_plans.py).

`make test` runs those of 20 seeds. RANDOM_SCRIPTS=0-299 runs 300, and RANDOM_SCRIPTS=17 one alone:

    RANDOM_SCRIPTS=17 .venv/bin/python -m pytest tests/e2e/test_random_scripts.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import Job, servers
from random_plans import read_seeds

SCRIPT = Path(__file__).parent / "random_scripts.py"
SEEDS = read_seeds(os.environ.get("RANDOM_SCRIPTS", "0-19"))
BATCH = 20  # seeds for which processes are started once
DEADLINE = 500.0

pytestmark = pytest.mark.timeout(DEADLINE + 60)


@pytest.fixture(
    scope="module", params=range(0, len(SEEDS), BATCH), ids=lambda at: f"seeds from {SEEDS[at]}"
)
def found(request, tmp_path_factory):
    """What is wrong, by kind, as each worker sees it."""
    seeds = SEEDS[request.param :][:BATCH]
    with servers(nodes=2, shards=2) as cluster:
        sockets = [server.address for server in cluster.sidecars]
        env = {"RANDOM_SCRIPTS": f"{seeds[0]}-{seeds[-1]}"}
        folder = tmp_path_factory.mktemp("scripts")
        job = Job("both", cluster, folder, sidecar_of=sockets, env=env, jobs=SCRIPT)
        return job.results(DEADLINE)


def test_losses_and_parameters_are_those_of_plain_ddp(found):
    for worker in found:
        assert not worker["equal"], "\n".join(worker["equal"])


def test_what_codecs_deliver_and_hold_back_is_what_workers_gave(found):
    for worker in found:
        assert not worker["delivered"], "\n".join(worker["delivered"])
