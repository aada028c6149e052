"""Tests the options of the Fashion-MNIST example, without training."""

import pytest

from thalweg.examples import fashion_mnist


def test_baseline_without_thalweg_takes_no_codec(tmp_path, capsys):
    (tmp_path / "train-images-idx3-ubyte.gz").touch()
    with pytest.raises(SystemExit):
        fashion_mnist.main(["--data", str(tmp_path), "--plain", "--codec", "fp16"])
    assert "--plain is without Thalweg, and --codec is Thalweg's" in capsys.readouterr().err
