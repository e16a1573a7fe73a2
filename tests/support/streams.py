"""A dataset that does not know its length, which Lightning fetches ahead of."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Stream(IterableDataset[Any]):
    """Samples in order, dealt to ranks and to the loader's workers; its position is kept.

    Args:
        samples: Tuples, the first of each a tensor.
        noise: How much random numbers of all three generators change that.
        part: Which samples are of this rank: (number of ranks, this one).
    """

    def __init__(self, samples: Sequence[Any], noise: float = 0.0, part: tuple[int, int] = (1, 0)) -> None:
        self.samples, self.noise, self.part = samples, noise, part
        self.start = self.next = 0

    def __iter__(self) -> Iterator[Any]:
        ranks, rank = self.part
        worker = get_worker_info()
        every, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        self.next, self.start = self.start, 0
        while (at := (self.next * every + first) * ranks + rank) < len(self.samples):
            self.next += 1
            x, *others = self.samples[at]
            drawn = torch.rand(1).item() + random.random() + np.random.rand() if self.noise else 0.0
            yield x + self.noise * drawn if self.noise else x, *others

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]


class Counted(Stream):
    """One that knows its length."""

    def __len__(self) -> int:
        return len(self.samples) // self.part[0]
