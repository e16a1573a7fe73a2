"""Text as tokens, without a download: by default the English that every Python carries.

``stdlib_corpus`` reads the docstrings of the standard library's sources (parsed, never imported) and the
help topics of ``pydoc``: about 2 MB of technical English, the same on every machine with the same Python.
Whole files are held out for validation. ``data=wikitext data.path=...`` reads local text instead.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

# Directories of the standard library that hold no prose, or that are not there on every installation.
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "ensurepip"}
VALIDATION_SHARE = 20  # one file in this many is held out
SEPARATOR = "\x00"  # ends every document; never part of the text


@dataclass(frozen=True)
class Corpus:
    """Two texts and where they came from. ``sha256`` covers both texts."""

    train: str
    validation: str
    source: str

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.train.encode())
        digest.update(b"\x00validation\x00" + self.validation.encode())
        return digest.hexdigest()


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, in file order."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, holders) and (text := ast.get_docstring(node)):
            yield text


def stdlib_documents() -> Iterator[tuple[str, str]]:
    """(name, text) of every standard-library file with docstrings, and of every pydoc topic, in name order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if SKIPPED.intersection(name.parts) or any(part.startswith("config-") for part in name.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            texts = (
                list(pydoc_topics(source))
                if name.as_posix() == "pydoc_data/topics.py"
                else [("", "\n\n".join(docstrings(source)))]
            )
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # a file of another Python, or unreadable: not part of the corpus
        for topic, text in texts:
            if text:
                yield f"{name.as_posix()}{topic}", text.replace(SEPARATOR, "")


def pydoc_topics(source: str) -> Iterator[tuple[str, str]]:
    """The entries of the literal ``topics = {...}`` in ``pydoc_data/topics.py``."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key, text in ast.literal_eval(node.value).items():
                yield f"#{key}", text


def held_out(name: str) -> bool:
    """True for the files of the validation set: a fixed choice by name, so it never moves between sets."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % VALIDATION_SHARE == 0


def stdlib_corpus(cache_dir: str | os.PathLike[str] | None = None) -> Corpus:
    """The default corpus; parsed once (seconds) and then read from ``cache_dir``.

    Deterministic for one Python version and the files its distribution ships; ``Corpus.sha256`` tells.
    """
    source = f"docstrings and pydoc topics of Python {platform.python_version()}"
    cached = None
    if cache_dir is not None:
        root_id = hashlib.sha256(sysconfig.get_path("stdlib").encode()).hexdigest()[:8]
        cached = Path(cache_dir).expanduser() / f"stdlib-{platform.python_version()}-{root_id}.txt"
        if (corpus := _read_cache(cached, source)) is not None:
            return corpus
    documents = list(stdlib_documents())
    seen: set[str] = set()
    sets: dict[bool, list[str]] = {False: [], True: []}
    # Validation files first: a text that occurs in both sets must only be in the held-out one.
    for name, text in sorted(documents, key=lambda d: (not held_out(d[0]), d[0])):
        if text not in seen:
            seen.add(text)
            sets[held_out(name)].append(text + SEPARATOR)
    corpus = Corpus("".join(sets[False]), "".join(sets[True]), source)
    if cached is not None:
        try:
            _write_cache(cached, corpus)
        except OSError as error:  # a home that is read-only, or full: the next start parses again
            print(f"{cached} cannot be written, so the corpus is not cached: {error.strerror}", file=sys.stderr)
    return corpus


def _read_cache(path: Path, source: str) -> Corpus | None:
    """The cached corpus, or None if there is none or its hash does not fit its text."""
    try:
        digest, lengths, text = path.read_bytes().decode("utf-8").split("\n", 2)
        corpus = Corpus(text[: int(lengths)], text[int(lengths) :], source)
    except (OSError, ValueError):
        return None
    return corpus if corpus.sha256 == digest else None


def _write_cache(path: Path, corpus: Corpus) -> None:
    """Several ranks may do this at once: each writes its own file and renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(f"{corpus.sha256}\n{len(corpus.train)}\n{corpus.train}{corpus.validation}".encode())
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def text_corpus(path: str | os.PathLike[str], column: str = "text") -> Corpus:
    """A local directory, or one file, of ``.txt`` / ``.parquet``.

    Files with "valid" in their name are the validation set, those with "test" are left alone; without
    any, every twentieth line is held out.

    Raises:
        FileNotFoundError: nothing readable is there.
    """
    root = Path(path).expanduser()
    files = [root] if root.is_file() else sorted(f for s in ("*.txt", "*.parquet") for f in root.rglob(s))
    files = [f for f in files if "test" not in f.stem or f == root]
    if not files:
        raise FileNotFoundError(
            f"data.path={str(path)!r}: no .txt or .parquet file there. Give a local file or directory, or "
            "data.download=true to fetch WikiText-2 from the Hugging Face hub."
        )
    validation = [f for f in files if "valid" in f.stem]
    train = "\n".join(_read_text(f, column) for f in files if f not in validation)
    if validation:
        return Corpus(train, "\n".join(_read_text(f, column) for f in validation), str(root))
    lines = train.splitlines(keepends=True)
    held = lines[::VALIDATION_SHARE]
    del lines[::VALIDATION_SHARE]
    return Corpus("".join(lines), "".join(held), str(root))


def _read_text(path: Path, column: str) -> str:
    if path.suffix != ".parquet":
        return path.read_text(encoding="utf-8")
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"reading {path} needs the package 'pyarrow': pip install pyarrow") from error
    return "".join(parquet.read_table(path, columns=[column])[column].to_pylist())


def download_wikitext() -> Corpus:
    """WikiText-2 from the Hugging Face hub. Only called for ``data.download=true``."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("data.download=true needs the package 'datasets': pip install datasets") from error
    sets = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
    return Corpus("".join(sets["train"]["text"]), "".join(sets["validation"]["text"]), "wikitext-2-raw-v1")


def tokenize(text: str, tokenizer: str = "bytes") -> npt.NDArray[np.uint16]:
    """Token ids. ``bytes``: one token per UTF-8 byte; otherwise the path of a ``tokenizer.json``."""
    if tokenizer == "bytes":
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"data.tokenizer={tokenizer!r} needs the package 'tokenizers'") from error
    return np.asarray(Tokenizer.from_file(tokenizer).encode(text).ids, dtype=np.uint16)


class Windows(Dataset[Tensor]):
    """Non-overlapping windows of ``context + 1`` tokens (inputs and their successors), as int64."""

    def __init__(self, tokens: npt.NDArray[np.uint16], context: int) -> None:
        self.tokens = tokens
        self.context = context
        if len(self) < 1:
            raise ValueError(f"a text of {len(tokens)} tokens is shorter than one window of {context + 1}")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        return torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))


class ShardedShuffle(Sampler[int]):
    """This rank's share of a shuffle that all ranks compute alike from (seed, epoch).

    It holds no random state of its own: a restored loader only has to skip what was already read, and
    the rest is the same as it would have been. Ends unevenly divided by the ranks are left out.
    """

    def __init__(self, size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0, shuffle: bool = True) -> None:
        self.size, self.rank, self.world_size, self.seed, self.shuffle = size, rank, world_size, seed, shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning when an epoch begins, also on resume."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size // self.world_size

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.size)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        return iter(order[self.rank : len(self) * self.world_size : self.world_size].tolist())


@dataclass(frozen=True)
class DataConfig:
    """What to read and how to batch it. ``batch_size`` is per rank."""

    name: str = "stdlib"
    path: str | None = None
    column: str = "text"
    download: bool = False
    tokenizer: str = "bytes"
    batch_size: int = 8
    num_workers: int = 0
    cache_dir: str | None = "~/.cache/moe_ckpt"

    def corpus(self) -> Corpus:
        """Raises ``ValueError`` when no local path is given and a download was not asked for."""
        if self.name == "stdlib":
            return stdlib_corpus(self.cache_dir)
        if self.path is not None:
            return text_corpus(self.path, self.column)
        if self.download:
            return download_wikitext()
        raise ValueError(
            f"data={self.name} needs data.path=<local .txt or .parquet file or directory>; nothing is downloaded "
            "unless you ask for it with data.download=true."
        )


class TextData(LightningDataModule):
    """Batches ``[batch_size, context + 1]`` whose order survives a restart in the middle of an epoch."""

    def __init__(self, config: DataConfig, context: int, seed: int = 0) -> None:
        super().__init__()
        self.config, self.context, self.seed = config, context, seed
        self._corpus: Corpus | None = None

    def setup(self, stage: str | None = None) -> None:
        if self._corpus is None:
            self._corpus = self.config.corpus()
            self.train_windows = Windows(tokenize(self.corpus.train, self.config.tokenizer), self.context)
            self.validation_windows = Windows(tokenize(self.corpus.validation, self.config.tokenizer), self.context)

    @property
    def corpus(self) -> Corpus:
        """What was read. Raises ``RuntimeError`` before ``setup``."""
        if self._corpus is None:
            raise RuntimeError("setup() has not been called yet")
        return self._corpus

    def _loader(self, windows: Windows, *, train: bool) -> StatefulDataLoader[Tensor]:
        sampler = ShardedShuffle(
            len(windows),
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
            seed=self.seed,
            shuffle=train,
        )
        return StatefulDataLoader(
            windows,
            batch_size=self.config.batch_size,
            sampler=sampler,
            num_workers=self.config.num_workers,
            drop_last=train,
        )

    def train_dataloader(self) -> StatefulDataLoader[Tensor]:
        return self._loader(self.train_windows, train=True)

    def val_dataloader(self) -> StatefulDataLoader[Tensor]:
        return self._loader(self.validation_windows, train=False)
