"""Gives tests a cluster, and lets them use the end-to-end tests' certificates."""

import contextlib
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

NODES = 3


@pytest.fixture(scope="session")
def cluster():
    """A cluster with the training operator, and a release `thalweg` in namespace default."""
    from kube_cluster import Cluster
    from node_images import FOLDER, images
    from training_operator import install

    # Where the images are: the nodes' copies are links.
    folder = FOLDER / "cluster"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = Cluster(folder, images(), NODES)
    with contextlib.ExitStack() as stack:
        stack.callback(made.stop)
        made.start()
        install(made)
        yield made


@pytest.fixture(scope="session")
def release(cluster):
    from release import Release

    made = Release(cluster, "default")
    made.install()
    return made
