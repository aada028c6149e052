"""Trains the tiny Swin Transformer of the example in this process, as the only worker."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from timm.models.swin_transformer import SwinTransformerBlock
from torch.distributed.fsdp import FSDPModule

import thalweg
from thalweg.examples.swin import (
    SwinError,
    checkpoint,
    loading,
    loop,
    meters,
    precision,
    prepare,
    train,
)
from thalweg.examples.swin.config import Config
from thalweg.examples.swin.parser import parse_file

PLACE = train.Place(0, 0, world_size=1, local_world_size=1, node=0, loopback=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    prepare.prepare(folder, classes=6, train=2, val=2, size=36, quiet=True)
    return folder


@pytest.fixture(autouse=True)
def group(tmp_path, monkeypatch):
    """Makes this process the only one of a process group."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def make(data, output, *pairs):
    config = Config()
    config.merge(["DATA.PATH", str(data), "OUTPUT", str(output), "TAG", "t", "SUFFIX", "s"])
    config.merge(["OUTPUT_SUFFIX", "o", "DATA.BATCH_SIZE", "2", "PRINT_FREQ", "1", *pairs])
    config.check()
    return config


def trained(config):
    """Trains; returns the run as it ended."""
    runs = []

    def keep(*arguments):
        runs.append(set_up(*arguments))
        return runs[-1]

    set_up = train.set_up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "set_up", keep)
        train.train(config, PLACE)
    return runs[0]


def log_of(config):
    return parse_file(Path(config.OUTPUT, "tiny_t", "s", "o", "0", "log"))


LEVELS = {
    "O0": ["AMP_OPT_LEVEL", "O0"],
    "O1": ["AMP_OPT_LEVEL", "O1", "AMP_LOSS_SCALE", "128"],
    "O2": ["AMP_OPT_LEVEL", "O2", "AMP_LOSS_SCALE", "128", "TRAIN.FUSED_OPTIMIZER", "True"],
    "O2 optimised": ["AMP_OPT_LEVEL", "O2", "ACCELERATED", "True"],
    "O2 disabled": ["AMP_OPT_LEVEL", "O2", "AMP_ENABLE", "False"],
}


# How far losses and norms of gradients at O1 and O2 may be from those at O0: in this model about 60
# operations in a row round to float16 in a forward pass, and as many in the backward pass, each by
# 2⁻¹¹ at most. Their errors are independent, and the three updates are too small to add to them:
# √120 of these. Measured were 4e-4.
CLOSE = math.sqrt(120) * 2.0**-11


def test_levels_train_alike_with_accumulation_and_clipping(data, tmp_path):
    more = ["TRAIN.ACCUMULATION_STEPS", "2", "TRAIN.STEPS", "3", "TRAIN.WARMUP_STEPS", "1"]
    losses, norms = {}, {}
    for name, pairs in LEVELS.items():
        config = make(data, tmp_path / name, *pairs, *more)
        run = trained(config)
        assert run.updates == 3
        log = log_of(config)
        losses[name], norms[name] = log.column("loss"), log.column("grad_norm")
        assert losses[name] == pytest.approx(losses["O0"], rel=CLOSE)
        if name != "O2 optimised":  # whose dynamic scale may skip its first steps
            assert norms[name] == pytest.approx(norms["O0"], rel=CLOSE)
    assert losses["O2 disabled"] == losses["O0"]
    dtypes = {parameter.dtype for parameter in run.model.parameters()}
    assert dtypes == {torch.float32}


def test_sharded_model_trains_alike_at_all_levels(data, tmp_path):
    more = ["TRAIN.ACCUMULATION_STEPS", "2", "TRAIN.STEPS", "3", "TRAIN.CLIP_GRAD", "0"]
    expected = make(data, tmp_path / "ddp", *LEVELS["O0"], *more)
    trained(expected)
    for name, pairs in LEVELS.items():
        config = make(data, tmp_path / name, *pairs, *more, "BACKEND", "fsdp")
        run = trained(config)
        assert isinstance(run.model, FSDPModule)
        blocks = [m for m in run.model.modules() if isinstance(m, SwinTransformerBlock)]
        assert len(blocks) == 4
        assert all(isinstance(block, FSDPModule) for block in blocks)
        updated = [p for group in run.optimizer.param_groups for p in group["params"]]
        assert {p.dtype for p in updated} == {torch.float32}
        scaled = "disabled" not in name and name != "O0"
        assert (run.level.loss_scale() != 1) == scaled
        for column in ("loss", "grad_norm"):
            found = log_of(config).column(column)
            assert found == pytest.approx(log_of(expected).column(column), rel=CLOSE)


def test_half_of_a_sharded_model_is_gathered_and_its_logits_are_float32(data, tmp_path):
    config = make(data, tmp_path, *LEVELS["O2"], "BACKEND", "fsdp")
    run = train.set_up(config, PLACE, CPU, loading.load(config, CPU))
    seen = []
    linear = run.model.layers[0].blocks[0].mlp.fc1
    linear.register_forward_hook(
        lambda module, _, out: seen.append((module.weight.dtype, out.dtype))
    )
    assert run.model(torch.zeros(2, 3, 32, 32)).dtype is torch.float32
    assert seen == [(torch.float16, torch.float16)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_channels_are_innermost_where_asked_and_training_is_the_same(data, tmp_path, level):
    losses, weights = [], []
    for last in ("False", "True"):
        pairs = [*LEVELS[level], "TRAIN.STEPS", "3", "MODEL.CHANNELS_LAST", last]
        config = make(data, tmp_path / last, *pairs)
        run = trained(config)
        losses.append(log_of(config).column("loss"))
        weights.append(run.model.module.patch_embed.proj.weight)
    assert [w.is_contiguous(memory_format=torch.channels_last) for w in weights] == [False, True]
    images = torch.zeros(2, 3, 4, 4)
    assert loop.in_order(images, config).is_contiguous(memory_format=torch.channels_last)
    # The order of sums in one convolution differs; torch rounds losses of O1 to 2^-11.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if level == "O0" else 0.01)


def test_compiled_model_of_o2_trains_as_the_one_that_is_not(data, tmp_path, monkeypatch):
    compiled = []

    def compile_quickly(module):
        """Traces everything, and leaves out the C++ compiler, which needs minutes."""
        compiled.append(module)
        call = torch.compile(module._call_impl, backend="aot_eager")
        monkeypatch.setattr(module, "_compiled_call_impl", call)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_quickly)
    losses = []
    for compiles in ("False", "True"):
        pairs = [*LEVELS["O2"], "TRAIN.STEPS", "3", "MODEL.COMPILE", compiles]
        config = make(data, tmp_path / compiles, *pairs, "MODEL.DROP_PATH_RATE", "0.0")
        trained(config)
        losses.append(log_of(config).column("loss"))
    assert len(compiled) == 1
    assert losses[1] == pytest.approx(losses[0], rel=0.01)  # of float16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_reduced_by_hand_carry_the_scale_and_are_clipped_afterwards(
    data, tmp_path, monkeypatch, level
):
    reduced = []

    def halve(gradients, scale, codec):
        reduced.append((scale, codec, torch.nn.utils.get_total_norm(gradients).item()))
        torch._foreach_mul_(gradients, 0.5)

    monkeypatch.setattr(thalweg, "all_reduce", halve)
    pairs = [*LEVELS[level], "BACKEND", "thalweg", "CODEC", "fp16", "TRAIN.STEPS", "1"]
    norms = []
    for hand in ("False", "True"):
        config = make(data, tmp_path / hand, *pairs, "TRAIN.REDUCE_BY_HAND", hand)
        trained(config)
        norms += log_of(config).column("grad_norm")
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-3)
    # Half precision's norm of O2 is rounded.
    assert reduced == [(1.0, "fp16", pytest.approx(128 * norms[0], rel=0.01))]


def test_norm_is_computed_where_nothing_is_clipped(data, tmp_path):
    config = make(data, tmp_path, *LEVELS["O0"], "TRAIN.CLIP_GRAD", "0", "TRAIN.STEPS", "1")
    trained(config)
    assert log_of(config).column("grad_norm")[0] > 0


def test_clipping_bounds_the_norm_and_reports_the_one_before():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert precision.get_grad_norm([parameter]).item() == 5
    assert precision.clip([parameter], 1.0).item() == 5
    assert precision.get_grad_norm([parameter]).item() == pytest.approx(1)


def test_learning_rate_rises_linearly_and_falls_as_a_cosine(data, tmp_path):
    pairs = ["TRAIN.EPOCHS", "2", "TRAIN.WARMUP_STEPS", "2", "TRAIN.BASE_LR", "0.001"]
    config = make(data, tmp_path, *LEVELS["O0"], *pairs, "TRAIN.MIN_LR", "0.0")
    trained(config)
    rates = log_of(config).column("lr")  # after updates 0 to 11 of 12
    assert len(rates) == 12
    assert rates[:3] == pytest.approx([5e-7, 0.5e-3, 1e-3 * (1 + 3**0.5 / 2) / 2], rel=0.01)
    assert rates[3:] == sorted(rates[3:], reverse=True)


@pytest.mark.parametrize(("level", "processes"), [("O1", "1"), ("O2", "0")])
def test_resumed_training_has_the_bits_of_one_that_never_stopped(data, tmp_path, level, processes):
    pairs = [*LEVELS[level], "TRAIN.EPOCHS", "2", "SAVE_FREQ", "1", "DATA.NUM_WORKERS", processes]
    whole = trained(make(data, tmp_path / "whole", *pairs))
    saved = tmp_path / "whole/tiny_t/s/o/checkpoint_1"
    config = make(data, tmp_path / "rest", *pairs, "MODEL.RESUME", str(saved))
    rest = trained(config)
    assert log_of(config).column("step") == [7, 8, 9, 10, 11, 12]
    ends = zip(whole.model.state_dict().items(), rest.model.state_dict().values(), strict=True)
    for (name, expected), found in ends:
        assert torch.equal(expected, found), name


def test_epoch_of_loading_processes_is_the_same_whether_or_not_others_came_before(data, tmp_path):
    config = make(data, tmp_path, "DATA.NUM_WORKERS", "1", "AUG.COLLATE_MIXUP", "True")
    before = torch.get_rng_state()

    def images_of_last(*epochs):
        loaders = loading.load(config, CPU)
        for epoch in epochs:
            loaders.begin_epoch(epoch)
            found = torch.cat([images for images, _ in loaders.train])
        return found

    assert torch.equal(images_of_last(0, 1), images_of_last(1))
    assert not torch.equal(images_of_last(1), images_of_last(2))
    assert torch.equal(torch.get_rng_state(), before)  # which a checkpoint has


def saved(data, folder, *pairs):
    """Returns the folder of a checkpoint of a model that has not been trained."""
    config = make(data, folder, *pairs)
    checkpoint.save(train.set_up(config, PLACE, CPU, loading.load(config, CPU)), folder, 1)
    return folder


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_checkpoint_of_another_precision_or_back_end_is_refused_by_name(data, tmp_path, backend):
    folder = saved(data, tmp_path, *LEVELS["O1"], "BACKEND", backend)
    for pairs, text in {
        ("AMP_OPT_LEVEL", "O2"): "AMP_OPT_LEVEL O1, and this training has O2",
        ("AMP_ENABLE", "False"): "AMP_ENABLE True, and this training has False",
    }.items():
        other = make(data, tmp_path, "BACKEND", backend, *pairs)
        run = train.set_up(other, PLACE, CPU, loading.load(other, CPU))
        with pytest.raises(SwinError, match=f"{folder} was saved with {text}"):
            checkpoint.resume(run, str(folder))


def test_checkpoint_that_does_not_say_its_precision_is_resumed_from(data, tmp_path):
    folder = saved(data, tmp_path)
    shared = torch.load(folder / "training.pth", weights_only=True)
    assert shared.pop("settings") == {"BACKEND": "ddp", "AMP_OPT_LEVEL": "O1", "AMP_ENABLE": True}
    torch.save(shared, folder / "training.pth")
    config = make(data, tmp_path)
    run = train.set_up(config, PLACE, CPU, loading.load(config, CPU))
    assert checkpoint.resume(run, str(folder)) == 1


def test_mixing_goes_on_with_the_half_of_a_pair_of_numbers_that_was_not_used(data, tmp_path):
    config = make(data, tmp_path)
    run = train.set_up(config, PLACE, CPU, loading.load(config, CPU))
    np.random.standard_normal()  # NumPy draws two, and keeps one
    checkpoint.save(run, tmp_path, 1)
    expected = np.random.beta(2.0, 2.0)
    np.random.seed(1)
    checkpoint.resume(run, str(tmp_path))
    assert np.random.beta(2.0, 2.0) == expected


def test_training_with_nothing_left_leaves_the_log_as_it_is(data, tmp_path):
    pairs = [*LEVELS["O0"], "SAVE_FREQ", "1", "TRAIN.STEPS", "4"]
    trained(make(data, tmp_path, *pairs))
    saved = tmp_path / "tiny_t/s/o/checkpoint_1"
    config = make(data, tmp_path, *pairs, "MODEL.RESUME", str(saved))
    before = log_of(config)
    trained(config)
    assert log_of(config) == before
    text = before.path.read_text()
    assert f"{saved} has 1 epochs and 4 updates: nothing is left to train" in text
    assert "TRAIN.STEPS cut epoch 0 short: who resumes skips its rest" in text


def test_worker_started_by_torchrun_itself_follows_the_switch_and_names_its_run(
    data, tmp_path, monkeypatch
):
    started = []
    variables = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"GROUP_RANK": "1", "MASTER_ADDR": "node0.example", "USE_TORCHACC": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", lambda config, place: started.append((config, place)))
        patch.setattr(dist, "init_process_group", lambda _: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        assert train.main(["--opts", "DATA.BATCH_SIZE", "4"]) == 0
    ((config, place),) = started
    assert place == train.Place(3, 1, world_size=4, local_world_size=2, node=1, loopback=False)
    assert (config.BACKEND, config.TRAIN.FUSED_OPTIMIZER) == ("thalweg", True)
    names = (config.TAG, config.SUFFIX, config.OUTPUT_SUFFIX)
    assert names == ("2x2_bs4", "optimised_thalweg_O1", "seed0")
    monkeypatch.delenv("RANK")
    with pytest.raises(SwinError, match="RANK is not set: start this with python -m"):
        train.Place.from_env()


def test_process_group_is_that_of_the_back_end(monkeypatch):
    sharded = Config(BACKEND="fsdp")
    assert [train._group(c) for c in (Config(), sharded)] == ["gloo", "thalweg"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train._group(Config()) == "cpu:gloo,cuda:nccl"
    with pytest.raises(SwinError, match="BACKEND fsdp trains on CPUs, and there is a GPU"):
        train._group(sharded)


def test_checkpoint_that_is_not_there_is_named(data, tmp_path):
    config = make(data, tmp_path, *LEVELS["O0"], "MODEL.RESUME", str(tmp_path / "none"))
    with pytest.raises(SwinError, match=r"there is no .*none/training.pth: MODEL.RESUME is the"):
        trained(config)


def test_collate_and_loop_mix_as_configured(data, tmp_path):
    collated = loading.load(make(data, tmp_path, "AUG.COLLATE_MIXUP", "True"), CPU)
    assert collated.mixup is None
    images, targets = next(iter(collated.train))
    assert (images.shape, targets.shape) == ((2, 3, 32, 32), (2, 6))
    looped = loading.load(make(data, tmp_path), CPU)
    assert looped.mixup is not None
    assert next(iter(looped.train))[1].shape == (2,)
    plain = loading.load(make(data, tmp_path, "AUG.MIXUP", "0", "AUG.CUTMIX", "0"), CPU)
    assert plain.mixup is None


def test_validation_counts_every_image_once(data, tmp_path, monkeypatch):
    config = make(data, tmp_path, *LEVELS["O0"])
    loaders = loading.load(config, CPU)
    run = train.set_up(config, PLACE, CPU, loaders)

    class First(torch.nn.Module):
        """Finds class 0 likeliest, then 1, 2, and so on."""

        def forward(self, images):
            return -torch.arange(6.0).expand(len(images), 6)

    run.model.module = First()
    found = loop.validate(run, loaders)
    assert (found["top1"], found["top5"]) == (pytest.approx(100 / 6), pytest.approx(500 / 6))

    counts = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums: counts.append(sums[-1].item()))
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 5)
    for rank in range(5):  # of 12 images
        monkeypatch.setattr(dist, "get_rank", lambda *_, rank=rank: rank)
        loop.validate(run, loading.load(config, CPU))
    assert counts == [3, 3, 2, 2, 2]


def test_truncated_image_is_named(data, tmp_path):
    shutil.copytree(data, tmp_path / "images")
    broken = next((tmp_path / "images/val").glob("*/*"))
    broken.write_bytes(broken.read_bytes()[:300])
    config = make(tmp_path / "images", tmp_path, *LEVELS["O0"], "TRAIN.STEPS", "1")
    with pytest.raises(SwinError, match=f"{broken} cannot be read as an image: .*delete it"):
        trained(config)


def test_folders_that_do_not_fit_are_named(data, tmp_path):
    shutil.copytree(data, tmp_path / "images")
    shutil.rmtree(tmp_path / "images/val/n00000003")
    with pytest.raises(SwinError, match="have different classes, such as n00000003"):
        loading.load(make(tmp_path / "images", tmp_path), CPU)
    (tmp_path / "empty/train").mkdir(parents=True)
    with pytest.raises(SwinError, match="empty/train has no images in folders by class"):
        loading.load(make(tmp_path / "empty", tmp_path), CPU)
    with pytest.raises(SwinError, match="too few for one update"):
        loading.load(make(data, tmp_path, "DATA.BATCH_SIZE", "64"), CPU)


def test_bytes_are_those_of_loopback_or_of_all_other_interfaces(tmp_path):
    table = tmp_path / "dev"
    table.write_text(
        "Inter-| Receive | Transmit\n face |bytes ...\n"
        "    lo: 10 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\n"
        "  eth0: 30 1 0 0 0 0 0 0 40 1 0 0 0 0 0 0\n"
        "  eth1:50 1 0 0 0 0 0 0 60 1 0 0 0 0 0 0\n"
    )
    assert meters.sent_bytes(loopback=True, table=table) == 20
    assert meters.sent_bytes(loopback=False, table=table) == 100
