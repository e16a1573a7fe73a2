"""A distributed sampler whose position in the epoch is one number, the same for every rank and any number of ranks.

The epoch is one order of the dataset's samples, which depends on seed and epoch only. ``R`` ranks deal it out like
cards: the samples at positions ``consumed + r``, ``consumed + R + r``, ... go to rank ``r``. So the t-th batches of
all ranks together are the next ``R * batch_size`` samples of the order, and what is left after any batch is its rest,
which another number of ranks can deal out just as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from moe_ckpt.errors import ConfigError

__all__ = ["RecoverableDistributedSampler"]

STATE_KEYS = ("epoch", "consumed", "seed", "length", "shuffle")


class RecoverableDistributedSampler(DistributedSampler[int]):
    """Divides a dataset over ranks, and continues at the exact sample after a restart, also with another number of
    ranks.

    Takes the place of ``torch.utils.data.DistributedSampler``, which deals an epoch without a restart in the very same
    way. Under Lightning nothing else is needed: ``MoECheckpoint`` saves the position and puts it back, and the trainer
    tells the epoch. Elsewhere say what was trained on, and keep the state with the checkpoint::

        sampler.load_state_dict(saved)  # after a restart
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                train(batch)
                sampler.advance(len(batch))
                save(sampler.state_dict())

    No sample of an epoch comes twice and none is left out, whatever the stops, numbers of ranks and batch sizes,
    precisely if what is left at the last start within the epoch (all of it, if there was no restart) divides by the
    number of ranks then. Otherwise the end of the epoch is as ``drop_last`` says. It need not divide by the batch size:
    the last batch is smaller, on all ranks alike. ``DataLoader(drop_last=True)`` leaves that one out, and its samples.

    The position counts samples that were trained on, not those that workers have fetched ahead. What workers draw at
    random (augmentation) is not resumed; with ``num_workers=0`` it belongs to the process's RNG, and is. Outside of
    Lightning use an ordinary ``DataLoader``: torchdata's ``StatefulDataLoader`` takes the state of a sampler for what
    was fetched. Give the sampler as ``sampler=``: Lightning does not look into a ``batch_sampler=``, and with several
    ranks replaces it (unless ``Trainer(use_distributed_sampler=False)``).

    Source: the recoverable sampler of MoC-System (ASPLOS '25), extended to other numbers of ranks.

    Args:
        dataset: Anything with a length, the same before and after a restart.
        num_replicas: Number of ranks; give it with ``rank``, or neither. None: that of the process group, looked up
            when it is needed, so that the sampler may be made before the group; without a group, one rank. With tensor
            parallelism give the size of the data-parallel mesh.
        rank: This rank's place among them.
        shuffle: A new order in each epoch, from ``seed + epoch``; otherwise the dataset's own.
        seed: Of the shuffle; equal on all ranks.
        drop_last: What to do when the samples left do not divide by the number of ranks, which must all have as many.
            True leaves out the last few, False repeats as many from the beginning of the epoch's order as are missing;
            fewer than there are ranks in either case.

    Raises:
        ConfigError: The dataset has no length, or only one of ``num_replicas`` and ``rank`` was given.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        # Not DistributedSampler's own __init__: it asks for the process group at once, and fixes the world size.
        Sampler.__init__(self)
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"RecoverableDistributedSampler(dataset={type(dataset).__name__}): it has no length, so its samples "
                "cannot be divided. An iterable dataset keeps its own position (torchdata's StatefulDataLoader)."
            )
        if (num_replicas is None) != (rank is None):
            raise ConfigError(
                f"RecoverableDistributedSampler(num_replicas={num_replicas}, rank={rank}): give both or neither"
            )
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise ConfigError(
                f"RecoverableDistributedSampler(num_replicas={num_replicas}, rank={rank}): rank must be one of "
                f"0 to {num_replicas - 1}"
            )
        self._replicas = None if num_replicas is None or rank is None else (num_replicas, rank)
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.consumed = 0
        """Samples of this epoch that all ranks together have trained on; the next iteration begins behind them."""
        self._dealt_out = False
        self._restored_epoch = 0
        """Of a position that was restored, and not yet iterated from."""

    # --- the world, as it is now ---

    @property
    def follows_process_group(self) -> bool:
        """True if ``num_replicas`` and ``rank`` are looked up in the process group."""
        return self._replicas is None

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Number of ranks that the epoch is divided over."""
        return self._world()[0]

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank among them."""
        return self._world()[1]

    def _world(self) -> tuple[int, int]:
        if self._replicas is not None:
            return self._replicas
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(), dist.get_rank()
        return 1, 0

    # --- dealing ---

    @property
    def length(self) -> int:
        """Samples in the dataset."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Samples that each rank gets in a whole epoch. ``len()`` is the same: it does not shrink by a resume."""
        return self._share(self.length)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Samples that all ranks get in a whole epoch, repeated ones included."""
        return self.num_samples * self.num_replicas

    @property
    def remaining(self) -> int:
        """Samples that each rank still gets in this epoch, counted from ``consumed``."""
        return self._share(self.length - self.consumed)

    def __len__(self) -> int:
        return self.num_samples

    def _share(self, samples: int) -> int:
        """Each rank's part of ``samples``."""
        return samples // self.num_replicas if self.drop_last else -(-samples // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """This rank's samples from ``consumed`` on.

        An epoch that was handed out completely starts again when it is iterated once more, as with torch's
        sampler. This is for callers without ``set_epoch``, and for loaders that are cycled through within one epoch.
        """
        if self._dealt_out:
            self.consumed = 0
        self._dealt_out, self._restored_epoch = False, 0
        mine = self._mine()
        yield from mine[:-1]
        self._dealt_out = True
        yield from mine[-1:]

    def _mine(self) -> list[int]:
        replicas, rank = self._world()
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator, device="cpu")
        else:
            order = torch.arange(self.length, device="cpu")
        positions = self.consumed + rank + replicas * torch.arange(self.remaining, device="cpu")
        again = positions >= self.length  # only in the last place, where the rest does not divide
        positions[again] = (positions[again] - self.length) % max(self.length, 1)
        dealt: list[int] = order[positions].tolist()
        return dealt

    # --- position ---

    def set_epoch(self, epoch: int) -> None:
        """Call before each epoch, on every rank. Another epoch than the one at hand starts at its beginning.

        Raises:
            ConfigError: The position that was restored is in a later epoch.
        """
        if epoch < self._restored_epoch:
            raise ConfigError(
                f"RecoverableDistributedSampler.set_epoch({epoch}): the restored position is in epoch "
                f"{self._restored_epoch}, and would be lost. Begin with the sampler's own epoch, "
                "range(sampler.epoch, epochs). A loader of fabric.setup_dataloaders begins with 0 in each process: "
                "loop over the DataLoader itself"
            )
        if epoch != self.epoch:
            self.epoch, self.consumed, self._dealt_out = epoch, 0, False

    def advance(self, samples: int) -> None:
        """Note that this rank has trained on ``samples`` more, and every other rank on as many.

        Called after each batch by training loops outside Lightning. An iteration under way is not affected.
        """
        if samples < 0:
            raise ConfigError(f"RecoverableDistributedSampler.advance({samples}): training does not go backwards")
        self.consumed = min(self.length, self.consumed + samples * self.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Plain integers, equal on all ranks, valid for any number of ranks."""
        return {name: int(getattr(self, name)) for name in STATE_KEYS}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Inverse of ``state_dict``; the next iteration continues from there.

        Raises:
            ConfigError: The state is of another order: other dataset length, seed or shuffling.
        """
        if set(state_dict) != set(STATE_KEYS):
            raise ConfigError(
                f"this is not the state of a RecoverableDistributedSampler: it has {sorted(state_dict)}, not "
                f"{sorted(STATE_KEYS)}"
            )
        state = {key: int(state_dict[key]) for key in STATE_KEYS}
        mine = self.state_dict()
        for key, what in (("length", "samples in the dataset"), ("seed", "seed"), ("shuffle", "shuffle")):
            if state[key] != mine[key]:
                raise ConfigError(
                    f"{what}: {state[key]} in the saved data position, {mine[key]} in this sampler. The order of the "
                    "epoch would differ, so some samples would be repeated and others left out. Use the settings of "
                    "the saved run, or start a new run."
                )
        if not 0 <= state["consumed"] <= state["length"] or state["epoch"] < 0:
            raise ConfigError(
                f"the saved data position lies outside its epoch: epoch {state['epoch']}, sample {state['consumed']} "
                f"of {state['length']}"
            )
        self.epoch, self.consumed, self._dealt_out = state["epoch"], state["consumed"], False
        self._restored_epoch = self.epoch


def draws_new_order(sampler: object) -> bool:
    """Returns whether a sampler of torch draws a new order for the epoch after a resume, since nothing restores it."""
    drawing = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return isinstance(sampler, drawing) and not hasattr(sampler, "load_state_dict")


def samplers_of(loader: object) -> Iterator[object]:
    """Yields the samplers that decide the loader's order, including one that torchdata's loader has wrapped."""
    candidates = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    seen: set[int] = set()
    while candidates:
        sampler = candidates.pop()
        if sampler is not None and id(sampler) not in seen:
            seen.add(id(sampler))
            yield sampler
            candidates.append(getattr(sampler, "sampler", None))
