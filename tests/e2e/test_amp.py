"""Mixed precision through real sidecars and aggregators."""

from __future__ import annotations

from pathlib import Path

from harness import Job, servers

SCRIPT = Path(__file__).parent / "amp_jobs.py"


def run(name: str, tmp_path: Path) -> list[dict]:
    with servers(nodes=2, shards=1) as cluster:
        sockets = [server.address for server in cluster.sidecars]
        return Job(name, cluster, tmp_path, sidecar_of=sockets, jobs=SCRIPT).results()


def test_native_scaler_meets_gradients_that_thalweg_has_averaged(tmp_path):
    for result in run("native_scaler", tmp_path):
        # Two steps of lr 0.25 times (1, 2) + (1, 1).
        assert result["weights"] == [1.0 - 2 * 0.25 * 2.0, 2.0 - 2 * 0.25 * 3.0]


def test_replicas_and_their_masters_have_the_same_bits_and_learn(tmp_path):
    first, second = run("own_scale", tmp_path)
    assert first["digest"] == second["digest"]
    for result in (first, second):
        assert sum(result["losses"][-5:]) < sum(result["losses"][:5]) / 2
