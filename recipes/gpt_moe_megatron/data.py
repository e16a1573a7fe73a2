"""Batches that depend on the number of consumed samples alone, so that a resumed run reads what an unbroken one reads.

Sample ``i`` of a run is the same for every layout. A global batch takes the next ``global_batch`` of them; of each
micro-batch, data-parallel rank ``d`` takes the ``d``-th part, as Megatron's sampler deals them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from recipes.gpt_moe_megatron.config import DataConfig

Tokens = npt.NDArray[np.int64]

TOPICS = 16
NOISE = 0.1


class Samples(Protocol):
    """A source of samples, numbered from 0 without end."""

    def rows(self, indices: Tokens) -> Tokens:
        """Samples ``indices`` [B] as tokens [B, seq + 1]: inputs, and each one's successor."""
        ...


@dataclass(frozen=True)
class Synthetic:
    """Each sample is a walk through the vocabulary by the rule of its topic, a tenth of its steps at random.

    Topics are not equally frequent (1, 1/2, 1/3 ...), so neither are experts equally popular.
    """

    vocab: int
    seq: int
    seed: int = 0

    def rows(self, indices: Tokens) -> Tokens:
        frequency = 1 / np.arange(1, TOPICS + 1)
        drawings = [np.random.default_rng([self.seed, int(index)]) for index in indices]
        topics = np.array([g.choice(TOPICS, p=frequency / frequency.sum()) for g in drawings])
        noise = np.stack([g.random(self.seq) < NOISE for g in drawings])
        strays = np.stack([g.integers(self.vocab, size=self.seq + 1) for g in drawings])
        rows = np.empty((len(indices), self.seq + 1), dtype=np.int64)
        rows[:, 0] = strays[:, 0]
        for at in range(self.seq):
            following = (rows[:, at] * (4 * topics + 5) + 2 * topics + 3) % self.vocab
            rows[:, at + 1] = np.where(noise[:, at], strays[:, at + 1], following)
        return rows


@dataclass(frozen=True)
class TokenFile:
    """Windows of a flat file of token ids, in an order of its own in every epoch.

    Raises:
        ValueError: the file is shorter than one window, or a token is not in the vocabulary (when it is read).
    """

    path: str
    dtype: str
    vocab: int
    seq: int
    seed: int = 0
    tokens: npt.NDArray[np.integer] = field(init=False, repr=False)
    _order: dict[int, Tokens] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.memmap(self.path, dtype=self.dtype, mode="r"))
        if self.windows < 1:
            raise ValueError(
                f"data.path={self.path}: {len(self.tokens)} tokens are less than one window of {self.seq + 1}"
            )

    @property
    def windows(self) -> int:
        """Per epoch."""
        return (len(self.tokens) - 1) // self.seq

    def rows(self, indices: Tokens) -> Tokens:
        rows = np.stack([self._window(int(index)) for index in indices])
        if rows.min() < 0 or rows.max() >= self.vocab:
            raise ValueError(
                f"data.path={self.path}: read as {self.dtype} it holds token {rows.max()}, but "
                f"model.vocab={self.vocab}; set data.dtype or model.vocab"
            )
        return rows

    def _window(self, index: int) -> Tokens:
        epoch, position = divmod(index, self.windows)
        if epoch not in self._order:
            self._order.clear()  # samples are read in order: one epoch, but for a batch that spans two
            self._order[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
        start = int(self._order[epoch][position]) * self.seq
        return self.tokens[start : start + self.seq + 1].astype(np.int64)


def source(config: DataConfig, vocab: int, seq: int, seed: int) -> Samples:
    if config.name == "synthetic":
        return Synthetic(vocab, seq, seed)
    return TokenFile(str(config.path), config.dtype, vocab, seq, seed)


@dataclass(frozen=True)
class Feed:
    """This rank's share of the samples.

    needed: False for ranks in the middle of the pipeline, which see neither inputs nor labels: they get None.
    """

    samples: Samples
    micro_batch: int
    microbatches: int
    rank: int
    ranks: int
    needed: bool = True

    def iteration(self, consumed_samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor] | None]:
        """The micro-batches of the iteration that begins there: (inputs, labels), each [micro_batch, seq]."""
        for micro in range(self.microbatches):
            if not self.needed:
                yield None
                continue
            first = consumed_samples + (micro * self.ranks + self.rank) * self.micro_batch
            rows = torch.from_numpy(self.samples.rows(np.arange(first, first + self.micro_batch)))
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
