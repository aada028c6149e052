"""Draws training scripts at random: a seed determines a plan, which random_scripts.py runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

WORLD = 2
DTYPES = ("float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Block:
    """x + tanh(x · A) · B + bias, with A of width by hidden."""

    hidden: int
    dtype: str = "float32"
    shares: int | None = None  # it has the A of this earlier block


@dataclass(frozen=True)
class Step:
    """What happens in a step, in this order."""

    resumes: bool = False  # from a checkpoint, in a new module
    rewraps: tuple[int, ...] | None = None  # wraps anew, after unfreezing these blocks
    adds_group: int | None = None  # a parameter group for this head
    frozen: tuple[tuple[int, ...], ...] = ((),) * WORLD  # blocks, by rank
    heads: tuple[tuple[int, ...], ...] = ()  # that are used in each backward pass: batch · 2 + rank
    infinite: int | None = None  # on this rank the loss is infinite


@dataclass(frozen=True)
class Script:
    """A module and how it is trained."""

    blocks: tuple[Block, ...]
    heads: int
    table: bool  # an embedding comes first
    options: dict[str, object]  # of DistributedDataParallel
    compiled: bool
    frozen_at_first: tuple[int, ...]  # blocks that are frozen before the module is wrapped
    optimizer: str
    set_to_none: bool
    clip: float | None
    chunk_bytes: int | None
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        usual = vars(Step())
        happens = [
            "; ".join(
                f"{name}={value}" for name, value in vars(step).items() if value != usual[name]
            )
            for step in self.steps
        ]
        lines = [f"    step {number}: {text}" for number, text in enumerate(happens)]
        own = ", ".join(
            f"{name}={value}"
            for name, value in vars(self).items()
            if name not in ("steps", "options")
        )
        return "\n".join([f"  {own}, DDP({options})", *lines])


@dataclass(frozen=True)
class Plan:
    seed: int
    width: int
    scale: float | None  # a scaler's first
    start: int  # of lossy codecs
    adversaries: bool  # the first script's loss is the second module's, frozen meanwhile
    scripts: tuple[Script, ...] = field(default=())

    def __str__(self) -> str:
        own = ", ".join(
            f"{name}={value}" for name, value in vars(self).items() if name != "scripts"
        )
        return "\n".join([own, *map(str, self.scripts)])


def draw(seed: int) -> Plan:
    rng = random.Random(seed)
    adversaries = rng.random() < 0.15
    number = 2 if adversaries or rng.random() < 0.2 else 1
    scale = 2.0 ** rng.randrange(2, 7) if rng.random() < 0.35 else None
    width = rng.choice([16, 24, 33, 64])
    count = rng.randrange(5, 9)
    scripts = tuple(
        _draw_script(rng, count, scaled=scale is not None, plain=adversaries) for _ in range(number)
    )
    return Plan(seed, width, scale, rng.randrange(2, 4), adversaries, scripts)


def without_skipped_steps(plan: Plan) -> Plan:
    """Returns the plan without steps that a scaler skips: they lose what codecs held back."""
    scripts = [
        replace(script, steps=tuple(replace(step, infinite=None) for step in script.steps))
        for script in plan.scripts
    ]
    return replace(plan, scripts=tuple(scripts))


def without_float16(plan: Plan) -> Plan:
    """Returns the plan with bfloat16 instead, whose halves are exact.

    Torch sums halves, and those of float16's smallest numbers have no room for their last bit.
    """
    scripts = []
    for script in plan.scripts:
        blocks = [
            replace(block, dtype="bfloat16") if block.dtype == "float16" else block
            for block in script.blocks
        ]
        scripts.append(replace(script, blocks=tuple(blocks)))
    return replace(plan, scripts=tuple(scripts))


def _draw_script(rng: random.Random, count: int, *, scaled: bool, plain: bool) -> Script:
    """`plain`: its passes go through another module, or another's through it. Torch refuses some
    passes through a module that looks for unused parameters and has none that is not frozen.
    """

    def happens(chance: float) -> bool:
        return rng.random() < chance

    kind = rng.choice(["usual", "usual", "unused", "unused", "static"])
    if plain:
        kind = "usual"
    unused = kind == "unused"
    blocks = _draw_blocks(rng, scaled=scaled)
    half = any(block.dtype == "float16" for block in blocks)
    compiled = not plain and happens(0.12)
    heads = rng.randrange(2, 4) if unused else rng.randrange(1, 3)
    options: dict[str, object] = {
        # A compiled module takes no buckets that are smaller than the first one's 1 MB.
        "bucket_cap_mb": 1 if compiled else rng.choice([0.002, 0.01, 0.05, 25]),
        "gradient_as_bucket_view": happens(0.3),
        "find_unused_parameters": unused,
        "static_graph": kind == "static",
    }
    frozen_at_first = _some(rng, len(blocks), 0.5) if happens(0.4) else ()
    # The module has something to train at any time: its heads.
    rewrapped = rng.randrange(1, count) if frozen_at_first and not plain and happens(0.7) else None
    resumed = rng.randrange(1, count) if happens(0.35) and not plain else None
    # A scaler's step needs gradients of the optimizer's parameters: of the heads that are used.
    may_be_late = heads > 1 and not (scaled and unused)
    late_head = rng.randrange(heads) if may_be_late and happens(0.4) else None
    grouped = rng.randrange(1, count) if late_head is not None else None
    accumulates = happens(0.4) and kind != "static"
    infinite = rng.randrange(count) if scaled and happens(0.7) else None
    freezes = unused and happens(0.7)
    frozen: tuple[tuple[int, ...], ...] = ((),) * WORLD
    steps = []
    for number in range(count):
        if freezes and happens(0.4):
            frozen = (_some(rng, len(blocks), 0.4),) * WORLD
            if happens(0.2):
                frozen = (frozen[0], ())
        passes = rng.randrange(1, 4) if accumulates else 1
        steps.append(
            Step(
                resumes=number == resumed,
                rewraps=frozen_at_first if number == rewrapped else None,
                adds_group=late_head if number == grouped else None,
                frozen=frozen,
                heads=_draw_heads(rng, heads, passes, unused),
                infinite=rng.randrange(WORLD) if number == infinite else None,
            )
        )
    return Script(
        blocks=blocks,
        heads=heads,
        table=happens(0.2) and not plain,
        options=options,
        compiled=compiled,
        frozen_at_first=frozen_at_first,
        # Adam divides by zero in float16, whose smallest number is larger than its epsilon.
        optimizer="sgd" if half else rng.choice(["sgd", "sgd", "adam", "adamw"]),
        set_to_none=happens(0.7),
        clip=rng.choice([None, None, 0.5, 5.0]),
        chunk_bytes=rng.choice([None, 4096, 65536]),
        steps=tuple(steps),
    )


def _draw_blocks(rng: random.Random, *, scaled: bool) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for index in range(rng.randrange(1, 5)):
        # A scaler refuses gradients in float16.
        dtype = rng.choice(DTYPES[scaled:]) if rng.random() < 0.2 else "float32"
        alike = [i for i in range(index) if blocks[i].dtype == dtype and blocks[i].shares is None]
        if alike and rng.random() < 0.3:
            shares = rng.choice(alike)
            blocks.append(Block(blocks[shares].hidden, dtype, shares))
        else:
            blocks.append(Block(rng.choice([3, 16, 40, 100, 1500]), dtype))
    return tuple(blocks)


def _draw_heads(
    rng: random.Random, heads: int, passes: int, unused: bool
) -> tuple[tuple[int, ...], ...]:
    everything = tuple(range(heads))
    if not unused:
        return (everything,) * (passes * WORLD)
    alike = rng.random() < 0.5
    used: list[tuple[int, ...]] = []
    for _ in range(passes):
        drawn = [_some(rng, heads, 0.5) or (rng.randrange(heads),) for _ in range(WORLD)]
        used += [drawn[0]] * WORLD if alike else drawn
    return tuple(used)


def _some(rng: random.Random, number: int, chance: float) -> tuple[int, ...]:
    return tuple(index for index in range(number) if rng.random() < chance)


def read_seeds(text: str) -> Sequence[int]:
    """Returns the seeds of "17" or "0-299"."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
