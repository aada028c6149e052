"""Defines the settings of a training, and `KEY VALUE` pairs that change them."""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from thalweg import codecs, policy
from thalweg.examples.swin import SwinError

BACKENDS = ("ddp", "thalweg", "fsdp", "ps")
# The smallest values of numbers, and of those that are shares, which are 1 at most.
_LEAST = {
    "DATA.BATCH_SIZE": 1,
    "DATA.NUM_WORKERS": 0,
    "DATA.PREFETCH": 1,
    "TRAIN.EPOCHS": 1,
    "TRAIN.STEPS": 0,
    "TRAIN.WARMUP_STEPS": 0,
    "TRAIN.BASE_LR": 0,
    "TRAIN.WARMUP_LR": 0,
    "TRAIN.MIN_LR": 0,
    "TRAIN.WEIGHT_DECAY": 0,
    "TRAIN.CLIP_GRAD": 0,
    "TRAIN.ACCUMULATION_STEPS": 1,
    "AUG.MIXUP": 0,
    "AUG.CUTMIX": 0,
    "PRINT_FREQ": 1,
    "SAVE_FREQ": 0,
}
_SHARES = (
    "MODEL.DROP_PATH_RATE",
    "MODEL.LABEL_SMOOTHING",
    "AUG.MIXUP_PROB",
    "AUG.MIXUP_SWITCH_PROB",
)
_CODEC = "CODEC (--codec)"


@dataclass
class Data:
    PATH: str = "data"  # has train/ and val/, each with a folder per class
    BATCH_SIZE: int = 8  # images per worker and micro-batch
    NUM_WORKERS: int = 0  # processes that load images, per worker
    PREFETCH: int = 2  # batches that are copied to the device ahead


@dataclass
class Model:
    NAME: str = "tiny"  # a key of model.MODELS
    DROP_PATH_RATE: float = 0.1
    LABEL_SMOOTHING: float = 0.1
    RESUME: str = ""  # a checkpoint to go on from
    COMPILE: bool = False
    CHANNELS_LAST: bool = False  # images and weights of convolutions with channels innermost


@dataclass
class Train:
    EPOCHS: int = 1
    STEPS: int = 0  # ends the training after so many updates, if it is not 0
    WARMUP_STEPS: int = 10
    BASE_LR: float = 5e-4
    WARMUP_LR: float = 5e-7
    MIN_LR: float = 5e-6
    WEIGHT_DECAY: float = 0.05
    CLIP_GRAD: float = 5.0  # 0: the norm is computed, and nothing is clipped
    ACCUMULATION_STEPS: int = 1  # micro-batches per update
    FUSED_OPTIMIZER: bool = False
    REDUCE_BY_HAND: bool = False  # with thalweg.all_reduce() after backward, not beside it


@dataclass
class Augmentation:
    MIXUP: float = 0.8
    CUTMIX: float = 1.0
    CUTMIX_MINMAX: tuple[float, float] | None = None
    MIXUP_PROB: float = 1.0
    MIXUP_SWITCH_PROB: float = 0.5
    MIXUP_MODE: str = "batch"
    COLLATE_MIXUP: bool = False  # mix where batches are collated, in the loader's processes

    @property
    def mixes(self) -> bool:
        return self.MIXUP > 0 or self.CUTMIX > 0 or self.CUTMIX_MINMAX is not None


@dataclass
class Config:
    """All settings. A key is the path to one, such as AUG.MIXUP."""

    DATA: Data = field(default_factory=Data)
    MODEL: Model = field(default_factory=Model)
    TRAIN: Train = field(default_factory=Train)
    AUG: Augmentation = field(default_factory=Augmentation)
    AMP_OPT_LEVEL: str = "O1"
    AMP_ENABLE: bool = True  # False: computes in float32, whatever the level
    AMP_LOSS_SCALE: float | str = "dynamic"
    BACKEND: str = "ddp"
    CODEC: str = ""  # of BACKEND thalweg; "": PowerSGD on several nodes, fp32 on one
    ACCELERATED: bool = False  # --kernel-opt or USE_TORCHACC
    OUTPUT: str = "output"
    TAG: str = ""
    SUFFIX: str = ""
    OUTPUT_SUFFIX: str = ""
    SEED: int = 0
    PRINT_FREQ: int = 10  # updates between two lines of the log
    SAVE_FREQ: int = 0  # epochs between two checkpoints; 0: none

    def merge(self, pairs: Sequence[str]) -> None:
        """Applies KEY, VALUE, KEY, VALUE, …; values are written as in Python, quotes may be left
        out.

        Raises SwinError for an unknown key, a value of another type, or a key without a value.
        """
        if len(pairs) % 2:
            raise SwinError(f"--opts: {pairs[-1]} has no value: expected KEY VALUE pairs")
        for key, text in zip(pairs[::2], pairs[1::2], strict=True):
            self._set(key, text)

    def accelerate(self) -> None:
        """Chooses the optimised run."""
        self.ACCELERATED = self.TRAIN.FUSED_OPTIMIZER = True
        self.BACKEND = "thalweg"

    def complete(self, nodes: int, workers: int) -> None:
        """Chooses what depends on the job where nothing is chosen: the codec, and the names of the
        folders of the run's log. `workers` are per node.
        """
        # Codecs shorten what crosses a network, and on one node nothing does.
        compresses = self.BACKEND == "thalweg" and nodes > 1
        chosen = "fp16" if self._by_hand_with_checkpoints else "powersgd:rank=4,start=100"
        self.CODEC = self.CODEC or (chosen if compresses else "fp32")
        how = "optimised" if self.ACCELERATED else "baseline"
        self.TAG = self.TAG or f"{nodes}x{workers}_bs{self.DATA.BATCH_SIZE}"
        self.SUFFIX = self.SUFFIX or f"{how}_{self.BACKEND}_{self.AMP_OPT_LEVEL}"
        self.OUTPUT_SUFFIX = self.OUTPUT_SUFFIX or f"seed{self.SEED}"

    @property
    def _by_hand_with_checkpoints(self) -> bool:
        """Whether checkpoints lack what a codec keeps from step to step."""
        return self.TRAIN.REDUCE_BY_HAND and bool(self.SAVE_FREQ or self.MODEL.RESUME)

    def check(self) -> None:
        """Raises SwinError for values that make no sense."""
        _check_choice("BACKEND", self.BACKEND, BACKENDS)
        _check_choice("AMP_OPT_LEVEL", self.AMP_OPT_LEVEL, ("O0", "O1", "O2"))
        _check_choice("AUG.MIXUP_MODE", self.AUG.MIXUP_MODE, ("batch", "pair", "elem"))
        if self.TRAIN.REDUCE_BY_HAND and self.BACKEND != "thalweg":
            raise SwinError(f"TRAIN.REDUCE_BY_HAND is for BACKEND thalweg, not {self.BACKEND}")
        if self.BACKEND == "fsdp":
            self._check_sharded()
        if self.BACKEND == "ps":
            self._check_served()
        self._check_codec()
        self._check_numbers()
        if self.AUG.mixes and self.DATA.BATCH_SIZE % 2:
            raise SwinError(
                f"DATA.BATCH_SIZE is {self.DATA.BATCH_SIZE}, expected an even number: images are "
                "mixed in pairs (AUG.MIXUP 0 and AUG.CUTMIX 0 switch that off)"
            )

    def _check_numbers(self) -> None:
        """Raises SwinError for a number that is out of range."""
        values = dict(self.items())
        for key, least in _LEAST.items():
            if values[key] < least:
                raise SwinError(f"{key} is {values[key]}, expected {least} or more")
        for key in _SHARES:
            if not 0 <= values[key] <= 1:
                raise SwinError(f"{key} is {values[key]}, expected a number from 0 to 1")
        scale = self.AMP_LOSS_SCALE
        if scale != "dynamic" and not _is_scale(scale):
            raise SwinError(f"AMP_LOSS_SCALE is {scale!r}, expected dynamic or a number above 0")

    def _check_codec(self) -> None:
        """Raises SwinError for a codec that would be ignored, or that a checkpoint would lack."""
        if self.BACKEND == "ddp" and self.CODEC not in ("", "fp32"):
            raise SwinError(
                f"{_CODEC} is {self.CODEC}, expected none: nothing is compressed with BACKEND ddp; "
                "--kernel-opt or --backend thalweg takes it"
            )
        if self.BACKEND != "thalweg" or not self.CODEC:
            return
        try:
            found = policy.parse(self.CODEC, _CODEC).codecs
        except ValueError as error:
            raise SwinError(str(error)) from None
        kept = [codec.name for codec in found if codec.name not in codecs.WIRE_TYPES]
        if kept and self._by_hand_with_checkpoints:
            raise SwinError(
                f"{_CODEC} is {self.CODEC}, expected {', '.join(codecs.WIRE_TYPES)}: with "
                f"TRAIN.REDUCE_BY_HAND a checkpoint (SAVE_FREQ, MODEL.RESUME) lacks what {kept[0]} "
                "keeps from step to step"
            )

    def _check_sharded(self) -> None:
        """Raises SwinError for what does not go together with BACKEND fsdp."""
        if self.CODEC not in ("", "fp32"):
            raise SwinError(
                f"{_CODEC} is {self.CODEC}, expected none: nothing is compressed with BACKEND "
                "fsdp; AMP_OPT_LEVEL O2 halves what it sends"
            )
        for key in ("COMPILE", "CHANNELS_LAST"):
            if getattr(self.MODEL, key):
                raise SwinError(f"MODEL.{key} is not supported with BACKEND fsdp: leave it out")

    def _check_served(self) -> None:
        """Raises SwinError for what does not go together with BACKEND ps."""
        if self.CODEC not in ("", "fp32", "bf16", "fp16"):
            raise SwinError(
                f"{_CODEC} is {self.CODEC}, expected fp32, bf16 or fp16 with BACKEND ps"
            )
        if self.AMP_OPT_LEVEL == "O2" and self.AMP_ENABLE:
            raise SwinError(
                "AMP_OPT_LEVEL is O2, expected O0 or O1 with BACKEND ps: shards have the masters"
            )
        if self.MODEL.CHANNELS_LAST:
            raise SwinError("MODEL.CHANNELS_LAST is not supported with BACKEND ps: leave it out")

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yields all keys with their values."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if is_dataclass(value):
                for inner in fields(value):
                    yield f"{entry.name}.{inner.name}", getattr(value, inner.name)
            else:
                yield entry.name, value

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _set(self, key: str, text: str) -> None:
        keys = dict(self.items())
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}"
            raise SwinError(f"there is no key {key}: {hint}")
        group, _, name = key.rpartition(".")
        setattr(getattr(self, group) if group else self, name, _convert(key, keys[key], text))


def _convert(key: str, old: object, text: str) -> object:
    """Returns the value that `text` stands for, of the type of `old`."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if key == "AUG.CUTMIX_MINMAX":
        return _check_minmax(key, value)
    if key == "AMP_LOSS_SCALE":
        fits = isinstance(value, int | float | str)
    elif isinstance(old, bool):
        fits = isinstance(value, bool)
    elif isinstance(old, float):
        value = float(value) if type(value) is int else value
        fits = isinstance(value, float)
    elif isinstance(old, str):
        value, fits = text, True
    else:
        fits = type(value) is type(old)
    if not fits:
        raise SwinError(f"{key} is {text!r}, expected a value such as {old!r}")
    return value


def _check_minmax(key: str, value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    if isinstance(value, tuple | list) and len(value) == 2:
        low, high = value
        if all(isinstance(end, int | float) for end in (low, high)) and 0 < low <= high <= 1:
            return float(low), float(high)
    raise SwinError(f"{key} is {value!r}, expected None or two shares such as (0.2,0.8)")


def _is_scale(value: float | str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < float(value) < math.inf


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise SwinError(f"{key} is {value!r}, expected one of {', '.join(choices)}")
