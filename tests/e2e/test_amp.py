"""Tests mixed precision through real sidecars and aggregators."""

from __future__ import annotations

from pathlib import Path

import on_nodes
import pytest
from harness import Job, metric, servers

SCRIPT = Path(__file__).parent / "amp_jobs.py"


def run(name: str, tmp_path: Path) -> list[dict]:
    return on_nodes.run(SCRIPT, name, tmp_path, (1, 1), shards=1)


def test_native_scaler_meets_gradients_that_thalweg_has_averaged(tmp_path):
    for result in run("native_scaler", tmp_path):
        # The parameters move by two steps of lr 0.25 times (1, 2) + (1, 1).
        assert result["weights"] == [1.0 - 2 * 0.25 * 2.0, 2.0 - 2 * 0.25 * 3.0]


def test_replicas_and_their_masters_have_the_same_bits_and_learn(tmp_path):
    first, second = run("own_scale", tmp_path)
    assert first["digest"] == second["digest"]
    for result in (first, second):
        assert sum(result["losses"][-5:]) < sum(result["losses"][:5]) / 2


@pytest.mark.parametrize("env", [{}, {"THALWEG_ENABLE": "1"}], ids=["attached", "zero_code"])
def test_sidecars_show_the_scale_and_the_skipped_steps_of_gradscaler(env, tmp_path):
    with servers(nodes=2, shards=1) as cluster:
        sockets = [server.address for server in cluster.sidecars for _ in range(2)]
        job = Job("overflows", cluster, tmp_path, sidecar_of=sockets, env=env, jobs=SCRIPT)
        for result in job.results():
            assert (result["scale"], result["made"]) == (2.0**14, 2)
            assert result["stats"]["loss_scale"] == 2.0**14
            assert result["stats"]["skipped_steps"] == 2
        # The last report came before the last step's gradients, which have been averaged.
        for server in cluster.sidecars:
            assert metric(server, "thalweg_sidecar_loss_scale") == 2.0**14
            assert metric(server, "thalweg_sidecar_skipped_steps_total") == 2
