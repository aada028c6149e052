"""Tests the parts of the T5 example that need neither workers nor transformers."""

import json

import pytest
import torch

from thalweg.examples import t5_fsdp
from thalweg.examples.t5 import compare, data, loop, losses, model
from thalweg.examples.t5.model import Setup
from thalweg.examples.t5.rouge import rouge

SOURCE = '''
def add(first, second):
    """Return the sum of both.

    More words.
    """
    return first + second

def silent():
    return 1

class Thing:
    async def wait(self):
        """Wait until it is there."""

def short():
    """Two words."""
'''


def test_rouge_counts_words_neighbours_and_the_longest_subsequence():
    scores = rouge(["Return the sum now."], ["return sum of the list"])
    # Common are three words of 4 and 5, no neighbours, and in order "return", "sum".
    assert scores["rouge1"] == pytest.approx(2 * 3 / 9)
    assert scores["rouge2"] == 0
    assert scores["rougeL"] == pytest.approx(2 * 2 / 9)


def test_rouge_of_equal_texts_is_one_and_of_empty_ones_nothing():
    assert set(rouge(["A b, c!"], ["a b c"]).values()) == {1.0}
    assert set(rouge([""], ["a b c"]).values()) == {0.0}
    assert rouge([], []) == {}


def test_rouge_counts_repeated_words_as_often_as_both_have_them():
    assert rouge(["the the the"], ["the cat"])["rouge1"] == pytest.approx(2 * 1 / 5)


def test_functions_lose_their_docstring_and_keep_its_first_line(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE, encoding="utf-8")
    assert [tuple(example) for example in data.functions(path, "module")] == [
        (
            "module.add",
            "def add(first, second):\n    return first + second",
            "Return the sum of both.",
        ),
        ("module.wait", "async def wait(self):\n    pass", "Wait until it is there."),
    ]


def test_no_function_is_in_both_parts_and_about_one_of_ten_is_for_testing():
    examples = [data.Example(f"m.f{number}", f"def f{number}()", "a b c") for number in range(2000)]
    train, test = data.split(examples)
    assert sorted(train + test) == sorted(examples)
    # A binomial variable: 200 with a standard deviation of 13.4; six of these.
    assert abs(len(test) - 200) < 81


def test_data_set_is_prepared_and_read_as_tokens(tmp_path):
    counts = data.prepare(tmp_path, vocabulary=300, limit=20)
    tokenizer = data.load_tokenizer(tmp_path)
    parts = [data.Functions(tmp_path, part, tokenizer, 24, 10) for part in ("train", "test")]
    assert (len(parts[0]), len(parts[1])) == counts
    for part in parts:
        assert part.sources.shape == (len(part), 24)
        row = part.targets[0]
        tokens = row[row != data.IGNORED]
        assert tokens[-1] == tokenizer.eos_token_id == 1
        words = tokenizer.decode(tokens[:-1]).strip()
        assert part.examples[0].summary.startswith(words)
        assert len(words) > 3


def test_loss_of_a_batch_is_that_of_its_tokens_however_short_its_targets_are(tmp_path):
    data.prepare(tmp_path, vocabulary=300, limit=20)
    part = data.Functions(tmp_path, "train", data.load_tokenizer(tmp_path), 24, 10)
    net = model.build(None, "tiny", 300).eval()
    rows = torch.arange(3)
    part.targets[rows, 6:] = data.IGNORED
    sources, targets = part.sources[rows], part.targets[rows]
    whole = net(input_ids=sources, attention_mask=(sources != 0).long(), labels=targets).loss
    # Without padding the same values are summed in another order; a loss is about 6.
    assert loop.loss_of(net, part, rows).item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "ddp", "--precision", "bf16"], "trains in fp32 only"),
        (["--prefetch", "none"], "--prefetch none is for FSDP1"),
        (["--resume", "nowhere"], "there is no complete checkpoint"),
        (["--strategy", "half"], "invalid choice: 'half'"),
        (["--losses", "--codecs", "onebit", "zip"], "--codec is 'zip', expected one of fp32"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message, tmp_path, capsys):
    (tmp_path / "test.jsonl").touch()
    with pytest.raises(SystemExit):
        t5_fsdp.parse(["--data", str(tmp_path), *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("functions", [5, 15])
def test_batches_for_which_there_are_too_few_functions_are_refused(functions, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    few = range(functions)
    with pytest.raises(ValueError, match=f"--batch-size is 4 on 4 workers, with {functions} "):
        loop.batches(few, 4, 0, 0)
    with pytest.raises(ValueError, match="--test-batch-size, with --test-limit, is 4 on 4"):
        loop.tests_of(range(100), 4, functions)
    assert loop.batches(range(33), 4, 0, 0).shape == (2, 4)


def test_missing_data_set_is_refused_with_the_command_that_makes_it(tmp_path, capsys):
    with pytest.raises(SystemExit):
        t5_fsdp.parse(["--data", str(tmp_path / "none")])
    said = " ".join(capsys.readouterr().err.split())
    assert f"run python -m thalweg.examples.t5.data --folder {tmp_path}/none" in said


def test_table_is_written_as_text_json_and_picture(tmp_path):
    rows = [
        compare.Measured(precision, strategy, 1234.5, 2.0, 30.0, 5.25)
        for precision in ("fp32", "bf16")
        for strategy in ("full", "hybrid")
    ]
    compare.write(tmp_path, rows, {"workers": 4})
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| bf16 | hybrid | 1234 | 2.00 | 30 | 5.250 |" in text
    table = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert table["about"] == {"workers": 4}
    assert table["rows"][3]["strategy"] == "hybrid"
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_all_is_compared_but_replicas_in_other_types():
    names = {(setup.precision, setup.strategy) for setup in compare.setups(2)}
    assert len(names) == 13
    assert ("fp32", "ddp") in names
    assert ("bf16", "ddp") not in names
    assert Setup("ddp", "bf16").problem()


def test_codecs_are_for_fully_shard():
    assert Setup(codec="int8").problem() == ""
    assert "--codec int8 is for --fsdp 2" in Setup(codec="int8", kind=1).problem()
    assert Setup("ddp", codec="bf16").problem()


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (Setup("hybrid", codec="powersgd:4"), ""),
        (Setup("full", codec="int8:start=0"), ""),
        (Setup("full", codec="powersgd:4"), "--codec powersgd:4 is for --strategy hybrid"),
        (Setup("hybrid", codec="zip"), "--codec is 'zip', expected one of fp32"),
        (Setup("hybrid", codec="onebit;*.bias=fp32"), ""),
        (Setup("full", codec="int8;*.bias=fp32"), "is for --strategy hybrid"),
        (Setup("hybrid", kind=1, codec="int8"), "is for --fsdp 2"),
    ],
)
def test_codecs_that_a_strategy_does_not_have_are_refused_by_name(setup, said):
    assert said in setup.problem()
    assert bool(setup.problem()) == bool(said)


def test_losses_are_compared_for_every_codec_that_a_strategy_has_beside_an_exact_one():
    made = [(setup.strategy, setup.codec) for setup in losses.setups([])]
    assert made[0] == ("full", "fp32")
    assert {codec for strategy, codec in made if strategy == "full"} == set(model.SHARD_CODECS)
    names = {codec.partition(":")[0] for strategy, codec in made if strategy == "hybrid"}
    assert names == {"fp32", "fp16", "bf16", "int8", "onebit", "topk", "powersgd"}
    chosen = [(setup.strategy, setup.codec) for setup in losses.setups(["onebit", "int8"])]
    assert chosen == [
        *(("full", "fp32"), ("full", "int8")),
        *(("hybrid", "fp32"), ("hybrid", "onebit"), ("hybrid", "int8")),
    ]


def test_table_of_losses_has_the_part_above_float32_of_each_seed_and_of_the_means(tmp_path):
    rows = [
        losses.Trained("full", "fp32", [4.0, 2.0]),
        losses.Trained("full", "int8", [4.4, 1.9]),
        losses.Trained("hybrid", "fp32", [2.0, 2.0]),
        losses.Trained("hybrid", "onebit", [2.0, 3.0]),
    ]
    losses.write(tmp_path, rows, {"steps": 7})
    lines = (tmp_path / "losses.md").read_text(encoding="utf-8").splitlines()
    assert lines[3] == "| full | int8 | 4.4000 | 1.9000 | +10.00 -5.00 | +5.00 |"
    assert lines[5] == "| hybrid | onebit | 2.0000 | 3.0000 | +0.00 +50.00 | +25.00 |"
    content = json.loads((tmp_path / "losses.json").read_text(encoding="utf-8"))
    assert content["about"] == {"steps": 7}
    assert content["rows"][1]["losses"] == [4.4, 1.9]
