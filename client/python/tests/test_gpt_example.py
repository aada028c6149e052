"""Tests the parts of the GPT example that need no workers."""

import json

import pytest
import torch

from thalweg.examples import gpt_local
from thalweg.examples.gpt import plot, text
from thalweg.examples.gpt.model import Gpt


@pytest.fixture(scope="module")
def library():
    return text.load()


def test_text_is_sources_and_no_file_is_on_both_sides(library):
    train, test = (bytes(part[:200_000].tolist()) for part in library)
    assert len(library.train) > 10 * len(library.test) > 0
    assert b"\ndef " in train
    assert b"\ndef " in test
    assert test[:1000] not in train


def test_pieces_are_those_of_the_text_and_differ_by_seed(library):
    pieces = library.batch(4, 32, seed=1)
    assert pieces.shape == (4, 33)
    assert torch.equal(pieces, library.batch(4, 32, seed=1))
    assert not torch.equal(pieces, library.batch(4, 32, seed=2))
    whole = bytes(library.train.tolist())
    assert all(bytes(piece.tolist()) in whole for piece in pieces)
    tests = library.tests(5, 32)
    assert bytes(tests[0].tolist()) == bytes(library.test[:33].tolist())
    assert bytes(tests[-1].tolist()) == bytes(library.test[-33:].tolist())


def test_model_has_three_million_parameters_and_begins_with_no_preference():
    torch.manual_seed(0)
    model = Gpt()
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_241_472
    loss = model(torch.randint(256, (8, 65)))
    # The loss of 256 equally likely bytes is log 256, 5.545; the scores begin with a deviation of
    # 0.02 sqrt(256) = 0.32, whose square's half, 0.05, comes to that.
    assert loss.item() == pytest.approx(5.6, abs=0.1)


def test_prediction_of_a_byte_knows_none_that_follow():
    torch.manual_seed(0)
    model = Gpt(width=32, blocks=2, heads=2)
    tokens = torch.randint(256, (1, 33))
    other = tokens.clone()
    other[0, 20:] = (other[0, 20:] + 1) % 256
    # The first 19 predictions are of bytes 1 to 19, from bytes 0 to 18.
    assert torch.equal(model(tokens[:, :20]), model(other[:, :20]))
    assert not torch.equal(model(tokens), model(other))
    loss = model(tokens[:, :20])
    gradient = torch.autograd.grad(loss, model.places.weight)[0]
    assert gradient[:19].abs().amin(1).gt(0).all()
    assert not gradient[19:].any()


def write(folder, way, seed, *points):
    curve = [{"step": s, "loss": loss, "sent": sent} for s, loss, sent in points]
    kept = {"way": way, "seed": seed, "curve": curve}
    (folder / f"{way}-{seed}.json").write_text(json.dumps(kept), "utf-8")


def test_table_compares_with_the_same_seed_and_a_picture_is_drawn(tmp_path, capsys):
    write(tmp_path, "ddp", 1, (10, 3.0, 1e6), (20, 2.0, 2e6))
    write(tmp_path, "ddp", 2, (10, 3.0, 1e6), (20, 1.0, 2e6))
    write(tmp_path, "50", 1, (10, 3.1, 1e4), (20, 2.2, 4e4))
    write(tmp_path, "50", 2, (10, 3.1, 1e4), (20, 1.2, 4e4))
    assert plot.main([str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0] == "| ddp | 2 | 1.5000 | +0.0 % (+0.0 to +0.0) | 100000 | 1.0x |"
    assert rows[1] == "| 50 | 2 | 1.7000 | +15.0 % (+10.0 to +20.0) | 2000 | 50.0x |"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_of_other_lengths_are_drawn_as_far_as_all_go(tmp_path):
    write(tmp_path, "ddp", 1, (10, 3.0, 1e6), (20, 2.0, 2e6))
    write(tmp_path, "ddp", 2, (10, 3.0, 1e6))
    assert plot.main([str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ways", "ddp", "dpp"], "--ways has 'dpp', expected ddp or a number of steps"),
        (["--ways", "0:int8"], "--ways has '0:int8'"),
        (["--steps", "0"], "--steps is 0, expected 1 or more"),
        (["--look", "0"], "--look is 0, expected 1 or more"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_trained(options, message, capsys):
    with pytest.raises(SystemExit):
        gpt_local.parse(options)
    assert message in capsys.readouterr().err
    assert gpt_local.parse(["--ways", "ddp", "50:sparse:0.02"]).ways == ["ddp", "50:sparse:0.02"]


def test_folder_without_the_first_way_is_refused(tmp_path, capsys):
    write(tmp_path, "50", 1, (10, 3.1, 1e4))
    assert plot.main([str(tmp_path)]) == 2
    assert "has no ddp-SEED.json: train with --ways ddp" in capsys.readouterr().err
