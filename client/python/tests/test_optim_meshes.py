"""Tests fused optimizers on DTensors of a mesh with two dimensions: four processes over Gloo, CPU.

Placements by hand, fully_shard() with replicas (HSDP), and fully_shard() of layers that are split
by columns and rows (FSDP and tensor parallelism).
"""

import pytest
from gloo_workers import run_workers
from optim_cases import bound

WAYS = ("by hand", "hybrid", "tensor")
# These processes hold the same part of a parameter, by its index.
FIRST, SECOND, ALL = ((0, 2), (1, 3)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)  # replicated dimensions
REPLICAS = {
    "by hand": {3: FIRST, 4: SECOND, 5: ALL},
    "hybrid": dict.fromkeys(range(6), FIRST),
    "tensor": dict.fromkeys((3, 4, 5), SECOND),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns the workers' results."""
    folder = tmp_path_factory.mktemp("store")
    return run_workers("optim_mesh_worker.py", 4, folder, timeout=110, OMP_NUM_THREADS="1")


def test_model_is_split_along_both_dimensions(results):
    for result in results:
        assert result["hybrid"]["AdamW"]["placed"] == ["(Replicate(), Shard(dim=0))"]
        placed = " ".join(result["tensor"]["AdamW"]["placed"])
        assert "StridedShard" in placed
        assert "(Shard(dim=0), Shard(dim=1))" in placed
        assert "(Shard(dim=0),)" in placed  # on one dimension of the mesh only


@pytest.mark.parametrize(("way", "kind"), [("by hand", "SGD"), *((way, "AdamW") for way in WAYS)])
def test_shards_become_the_bits_of_whole_parameters(results, way, kind):
    for result in results:
        assert result[way][kind]["same bits"]


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("by hand", "clipped AdamW"),
        *((way, kind) for way in WAYS for kind in ("LAMB", "clipped SGD")),
    ],
)
def test_norms_go_over_both_dimensions(results, way, kind):
    """LAMB moves by 0.01·‖p‖, clipped gradients by less: a wrong norm would show in that."""
    for result in results:
        ours, whole = map(float.fromhex, result[way][kind]["norms"])
        assert ours == pytest.approx(whole, rel=1e-12)
        assert ours > 0.5  # and is clipped
        assert result[way][kind]["distance"] <= bound(10, 0.1)


def test_half_precision_shards_are_clipped_like_whole_ones(results):
    for result in results:
        ours, whole = map(float.fromhex, result["half"]["norms"])
        assert ours == pytest.approx(whole, rel=1e-12)
        # The bound is one rounding to the other neighbour: 2⁻⁸ of up to 4.
        assert result["half"]["distance"] <= 2.0**-8 * 4


@pytest.mark.parametrize("way", WAYS)
def test_replicas_stay_equal(results, way):
    for index, sets in REPLICAS[way].items():
        for kind in results[0][way]:
            for replicas in sets:
                assert len({results[rank][way][kind]["held"][index] for rank in replicas}) == 1


@pytest.mark.parametrize("kind", ["LAMB", "clipped SGD"])
@pytest.mark.parametrize("way", WAYS)
def test_all_processes_clip_by_the_same_bits(results, way, kind):
    assert len({result[way][kind]["norms"][0] for result in results}) == 1
