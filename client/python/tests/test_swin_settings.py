"""Tests the settings of the Swin example, and the commands that its launcher runs."""

import shutil
import sys

import pytest
from PIL import Image

from thalweg.examples.swin import SwinError, launch_single_task, prepare
from thalweg.examples.swin.config import Config

BY_HAND = ("BACKEND", "thalweg", "TRAIN.REDUCE_BY_HAND", "True")
SMALL = {"classes": 2, "train": 3, "val": 1, "size": 16, "quiet": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    prepare.prepare(folder, **SMALL)
    return folder


def launched(*arguments, data="data"):
    """Returns the settings, and the command, for arguments of the launcher."""
    args = launch_single_task._parser().parse_args(["--data", str(data), *arguments])
    config = launch_single_task.settings(args)
    return config, launch_single_task.command_of(args, config)


def test_images_are_made_once_and_are_jpegs_in_folders_by_class(tmp_path):
    assert prepare.prepare(tmp_path, **SMALL) == 8
    paths = sorted(tmp_path.glob("*/*/*"))
    assert [str(path.relative_to(tmp_path)) for path in paths[:2]] == [
        "train/n00000000/00000.JPEG",
        "train/n00000000/00001.JPEG",
    ]
    for path in paths:
        with Image.open(path) as image:
            assert (image.format, image.size) == ("JPEG", (16, 16))
    before = {path: path.read_bytes() for path in paths}
    paths[0].unlink()
    assert prepare.prepare(tmp_path, **SMALL) == 1
    assert {path: path.read_bytes() for path in paths} == before


@pytest.mark.parametrize(
    ("pairs", "key", "value"),
    [
        (["AUG.MIXUP", "0"], "AUG.MIXUP", 0.0),
        (["AUG.CUTMIX_MINMAX", "(0.2,0.8)"], "AUG.CUTMIX_MINMAX", (0.2, 0.8)),
        (["AUG.CUTMIX_MINMAX", "None"], "AUG.CUTMIX_MINMAX", None),
        (["AUG.COLLATE_MIXUP", "True"], "AUG.COLLATE_MIXUP", True),
        (["AMP_LOSS_SCALE", "dynamic"], "AMP_LOSS_SCALE", "dynamic"),
        (["AMP_LOSS_SCALE", "128"], "AMP_LOSS_SCALE", 128),
        (["TRAIN.EPOCHS", "2", "TRAIN.EPOCHS", "4"], "TRAIN.EPOCHS", 4),
        (["TAG", "123"], "TAG", "123"),
    ],
)
def test_pairs_change_keys_and_the_last_one_counts(pairs, key, value):
    config = Config()
    config.merge(pairs)
    assert dict(config.items())[key] == value
    assert type(dict(config.items())[key]) is type(value)


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        (["AUG.MIXUPS", "1"], r"there is no key AUG.MIXUPS: did you mean AUG.MIXUP\?"),
        (["AUG", "1"], "there is no key AUG"),
        (["NOTHING.LIKE.IT", "1"], "there is no key NOTHING.LIKE.IT: the keys are DATA.PATH, "),
        (["AUG.MIXUP"], "AUG.MIXUP has no value"),
        (["AUG.MIXUP", "much"], "AUG.MIXUP is 'much', expected a value such as 0.8"),
        (["TRAIN.EPOCHS", "1.5"], "TRAIN.EPOCHS is '1.5', expected a value such as 1"),
        (["AMP_ENABLE", "yes"], "AMP_ENABLE is 'yes', expected a value such as True"),
        (["AUG.CUTMIX_MINMAX", "0.2"], "AUG.CUTMIX_MINMAX is 0.2, expected None or two shares"),
    ],
)
def test_malformed_pairs_are_refused_with_what_to_write(pairs, text):
    with pytest.raises(SwinError, match=text):
        Config().merge(pairs)


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        (["AMP_OPT_LEVEL", "O4"], "AMP_OPT_LEVEL is 'O4', expected one of O0, O1, O2"),
        (["AMP_LOSS_SCALE", "large"], "AMP_LOSS_SCALE is 'large', expected dynamic or a number"),
        (["AMP_LOSS_SCALE", "0"], "AMP_LOSS_SCALE is 0, expected dynamic or a number above 0"),
        (["AMP_LOSS_SCALE", "-8"], "AMP_LOSS_SCALE is -8, expected dynamic or a number above"),
        (["AMP_LOSS_SCALE", "1e999"], "AMP_LOSS_SCALE is inf, expected dynamic or a number above"),
        (["AMP_LOSS_SCALE", "True"], "AMP_LOSS_SCALE is True, expected dynamic or a number above"),
        (["MODEL.LABEL_SMOOTHING", "3."], "LABEL_SMOOTHING is 3.0, expected a number from 0 to 1"),
        (["AUG.MIXUP_PROB", "7"], "AUG.MIXUP_PROB is 7.0, expected a number from 0 to 1"),
        (["AUG.MIXUP_SWITCH_PROB", "-1"], "MIXUP_SWITCH_PROB is -1.0, expected a number from 0"),
        (["AUG.CUTMIX", "-1"], "AUG.CUTMIX is -1.0, expected 0 or more"),
        (["TRAIN.WARMUP_STEPS", "-3"], "TRAIN.WARMUP_STEPS is -3, expected 0 or more"),
        (["TRAIN.CLIP_GRAD", "-1"], "TRAIN.CLIP_GRAD is -1.0, expected 0 or more"),
        (["TRAIN.STEPS", "-3"], "TRAIN.STEPS is -3, expected 0 or more"),
        (["SAVE_FREQ", "-1"], "SAVE_FREQ is -1, expected 0 or more"),
        (["DATA.BATCH_SIZE", "3"], "DATA.BATCH_SIZE is 3, expected an even number"),
        (["TRAIN.EPOCHS", "0"], "TRAIN.EPOCHS is 0, expected 1 or more"),
        (["BACKEND", "mpi"], "BACKEND is 'mpi', expected one of ddp, thalweg"),
        (
            ["BACKEND", "fsdp", "CODEC", "fp16"],
            r"CODEC \(--codec\) is fp16, expected none: nothing",
        ),
        (
            ["BACKEND", "fsdp", "MODEL.COMPILE", "True"],
            "MODEL.COMPILE is not supported with BACKEND",
        ),
        (
            ["BACKEND", "fsdp", "MODEL.CHANNELS_LAST", "True"],
            "MODEL.CHANNELS_LAST is not supported",
        ),
        (
            ["BACKEND", "fsdp", "TRAIN.REDUCE_BY_HAND", "True"],
            "REDUCE_BY_HAND is for BACKEND thalweg",
        ),
        (["TRAIN.REDUCE_BY_HAND", "True"], "REDUCE_BY_HAND is for BACKEND thalweg, not ddp"),
        (["CODEC", "int8"], r"CODEC \(--codec\) is int8, expected none: .* with BACKEND ddp"),
        (["CODEC", "nonsense"], r"CODEC \(--codec\) is nonsense, expected none"),
        (
            ["BACKEND", "thalweg", "CODEC", "nonsense"],
            r"CODEC \(--codec\) is 'nonsense', expected one of fp32, ",
        ),
        (
            [*BY_HAND, "CODEC", "int8", "SAVE_FREQ", "1"],
            r"is int8, expected fp32, fp16, bf16: with TRAIN.REDUCE_BY_HAND a checkpoint .* int8 ",
        ),
        (
            [*BY_HAND, "CODEC", "fp16;*.bias=topk", "MODEL.RESUME", "folder"],
            r"is fp16;\*.bias=topk, expected fp32, fp16, bf16: .* lacks what topk keeps",
        ),
        (["BACKEND", "ps", "CODEC", "int8"], "CODEC .* is int8, expected fp32, bf16 or fp16"),
        (["BACKEND", "ps", "AMP_OPT_LEVEL", "O2"], "AMP_OPT_LEVEL is O2, expected O0 or O1"),
        (["BACKEND", "ps", "MODEL.CHANNELS_LAST", "True"], "CHANNELS_LAST is not supported"),
    ],
)
def test_settings_that_make_no_sense_are_refused(pairs, text):
    config = Config()
    config.merge(pairs)
    with pytest.raises(SwinError, match=text):
        config.check()


@pytest.mark.parametrize(
    "pairs",
    [
        ["CODEC", "fp32"],
        ["BACKEND", "thalweg", "CODEC", "int8", "SAVE_FREQ", "1"],
        [*BY_HAND, "CODEC", "int8"],
        [*BY_HAND, "CODEC", "fp16", "SAVE_FREQ", "1"],
        [*BY_HAND, "SAVE_FREQ", "1"],
        [*BY_HAND, "MODEL.RESUME", "folder"],
        ["TRAIN.BASE_LR", "0", "TRAIN.WARMUP_LR", "0", "TRAIN.MIN_LR", "0", "AUG.MIXUP_PROB", "1"],
        ["AMP_LOSS_SCALE", "0.5", "MODEL.LABEL_SMOOTHING", "0", "TRAIN.WARMUP_STEPS", "0"],
    ],
)
def test_settings_that_go_together_are_accepted(pairs):
    config = Config()
    config.merge(pairs)
    config.complete(2, 2)
    config.check()


def test_baseline_is_torchs_and_the_optimised_run_is_ours(data):
    baseline, _ = launched("--amp_level=O1", "--batch_size=4", data=data)
    assert (baseline.BACKEND, baseline.AMP_OPT_LEVEL) == ("ddp", "O1")
    assert not baseline.TRAIN.FUSED_OPTIMIZER
    assert launch_single_task.environment(baseline)["THALWEG_ENABLE"] == "0"
    optimised, _ = launched("--amp_level=O2", "--kernel-opt", "--batch_size=4", data=data)
    assert (optimised.BACKEND, optimised.AMP_OPT_LEVEL) == ("thalweg", "O2")
    assert optimised.TRAIN.FUSED_OPTIMIZER
    assert baseline.TAG == optimised.TAG
    assert baseline.SUFFIX != optimised.SUFFIX


def test_codec_is_chosen_by_what_there_is_to_compress(data):
    codecs = {
        (): "fp32",
        ("--kernel-opt",): "fp32",  # one node
        ("--kernel-opt", "--nodes=2"): "powersgd:rank=4,start=100",
        ("--kernel-opt", "--nodes=2", "--codec=fp16"): "fp16",
        ("--kernel-opt", "--nodes=2", "--backend=fsdp"): "fp32",
    }
    found = {options: launched(*options, data=data)[0].CODEC for options in codecs}
    assert found == codecs
    with pytest.raises(SwinError, match=r"CODEC \(--codec\) is int8, expected none"):
        launched("--backend=fsdp", "--codec=int8", data=data)


def test_repeated_option_takes_its_last_value(data):
    once = ["--nproc_per_node=1", "--amp_level=O2", "--kernel-opt", "--batch_size=4"]
    _, command = launched(*once, "--nproc_per_node=8", data=data)
    assert command[command.index("--nproc-per-node") + 1] == "8"


def test_use_torchacc_means_the_optimised_run(data, monkeypatch):
    monkeypatch.setenv("USE_TORCHACC", "1")
    assert launched(data=data)[0].BACKEND == "thalweg"
    monkeypatch.setenv("USE_TORCHACC", "0")
    assert launched(data=data)[0].BACKEND == "ddp"


def test_nodes_of_one_machine_are_run_by_thalweg_and_hosts_by_torchrun(data):
    _, command = launched("--nodes", "2", "--shards", "1", data=data)
    assert command[1:9] == ["-m", "thalweg", "run", "--nodes", "2", "--nproc", "1", "--shards"]
    hosts = ["--nodes", "2", "--node_rank", "1", "--master_addr", "a.example"]
    _, command = launched(*hosts, data=data)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[command.index("--node-rank") + 1] == "1"
    with pytest.raises(SwinError, match="--node_rank is 2, expected 0 to 1"):
        launched("--nodes", "2", "--node_rank", "2", data=data)


def test_missing_folder_is_named_with_the_command_that_makes_it(data, tmp_path, capsys):
    shutil.copytree(data / "train", tmp_path / "train")
    assert launch_single_task.main(["--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"there is no folder {tmp_path / 'val'}" in said
    assert f"python -m thalweg.examples.swin.prepare --folder {tmp_path} makes" in said
