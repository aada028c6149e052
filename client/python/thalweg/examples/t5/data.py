"""Makes a data set of Python's functions: their sources, and the first lines of their docstrings.

    python -m thalweg.examples.t5.data --folder data/functions

writes train.jsonl and test.jsonl with lines {"name", "source", "summary"}, and tokenizer.json with
a vocabulary of byte pairs that is trained on the former. Needs `pip install thalweg[examples]`.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from tqdm import tqdm

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # 0, 1 and 2, as T5 has them
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
_TEST_SHARE = 10  # one of so many functions is for testing
Tokenizer: TypeAlias = Any  # of the optional package
IGNORED = -100  # of a target, for cross_entropy


class Example(NamedTuple):
    """A function without its docstring, and that one's first line."""

    name: str
    source: str
    summary: str


def functions(path: Path, module: str) -> Iterator[Example]:
    """Yields the functions of a file that have a docstring of several words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in old sources
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (ast.get_docstring(node) or "").strip().splitlines()
        node.body = node.body[1:] or [ast.Pass()]
        if lines and len(lines[0].split()) > 2:
            yield Example(f"{module}.{node.name}", ast.unparse(node), lines[0].strip())


def library(limit: int = 0) -> list[Example]:
    """Returns the functions of the standard library's files, at most `limit` files unless 0.

    No two have the same source or the same name. The order is always the same.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    found: dict[str, Example] = {}
    names: set[str] = set()
    for path in tqdm(paths[: limit or None], desc=str(root), unit="file"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for example in functions(path, module):
            if example.name not in names:
                names.add(example.name)
                found.setdefault(example.source, example)
    return list(found.values())


def split(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Returns those to train with and those to test with. A name is always on the same side."""
    parts: tuple[list[Example], list[Example]] = [], []
    for example in examples:
        parts[zlib.crc32(example.name.encode()) % _TEST_SHARE == 0].append(example)
    return parts


def prepare(folder: Path, *, vocabulary: int, limit: int = 0) -> tuple[int, int]:
    """Writes the files; returns how many functions there are to train and to test with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    parts = split(library(limit))
    for name, examples in zip(("train", "test"), parts, strict=True):
        lines = [json.dumps(example._asdict()) + "\n" for example in examples]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for example in parts[0] for text in (example.source, example.summary)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(parts[0]), len(parts[1])


class Functions:
    """One part of the data set, as tokens.

    `sources`, int64 [n, source_length], is filled up with 0; `targets`, int64 [n, target_length],
    ends with 1 and is filled up with IGNORED.
    """

    def __init__(
        self, folder: Path, part: str, tokenizer: Tokenizer, source_length: int, target_length: int
    ) -> None:
        """`tokenizer`: as load_tokenizer() returns. Raises FileNotFoundError."""
        lines = (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
        self.examples = [Example(**json.loads(line)) for line in lines]
        sources = [f"{example.name}: {example.source}" for example in self.examples]
        summaries = [example.summary for example in self.examples]
        self.sources = _rows(tokenizer, sources, source_length, 0)
        self.targets = _rows(tokenizer, summaries, target_length, IGNORED)

    def __len__(self) -> int:
        return len(self.examples)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a data set, or of a folder of weights."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder / "config.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
    )


def _rows(tokenizer: Tokenizer, texts: Sequence[str], length: int, fill: int) -> torch.Tensor:
    rows = torch.full((len(texts), length), fill)
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    for row, tokens in zip(rows, encoded, strict=True):
        kept = [*tokens[: length - 1], tokenizer.eos_token_id]
        row[: len(kept)] = torch.tensor(kept)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("data/functions"))
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens at most")
    parser.add_argument("--files", type=int, default=0, help="read so many files only")
    args = parser.parse_args(argv)
    train, test = prepare(args.folder, vocabulary=args.vocabulary, limit=args.files)
    size = sum(path.stat().st_size for path in args.folder.iterdir()) / 1e6
    print(f"{args.folder}: {train} functions to train with, {test} to test with, {size:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
