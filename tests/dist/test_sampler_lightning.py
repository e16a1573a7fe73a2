"""The recoverable sampler under real Lightning: exact on one rank, no sample twice or left out on another number."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import re
import signal
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.callbacks.data_position import dealer_of
from moe_ckpt.data import RecoverableDistributedSampler
from moe_ckpt.errors import ConfigError, StoreError
from moe_ckpt.policies import Dense, MoEvement
from tests.support import run_ranks, start_ranks
from tests.support.streams import Counted, Stream
from tests.support.tiny_moe import TinyMoE, Tokens, state_of


class Stopped(Exception):
    pass


class Numbered(Dataset):
    """Samples that know their number."""

    def __init__(self, n: int) -> None:
        self.tokens = Tokens(n)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i):
        return *self.tokens[i], i


class Recorded(TinyMoE):
    """Notes the samples of every batch that was trained on, every validation and every epoch's end."""

    def __init__(self, stop: int | None = None, kill: int | None = None, log: str | None = None) -> None:
        super().__init__(layers=1)
        self.stop, self.kill, self.log_path = stop, kill, log
        self.trained: list[tuple[int, int, list[int]]] = []
        self.validations: list[tuple[int, int]] = []
        self.stepped: list[int] = []
        self.ends: list[int] = []
        self.left_open: list[int] = []

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == self.stop:
            raise Stopped

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        parts = batch if isinstance(batch[0], (list, tuple)) else [batch]
        x, y, numbers = (torch.cat(column) for column in zip(*parts, strict=True))
        self.numbers = numbers.tolist()
        return super().training_step((x, y), batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trained.append((self.trainer.current_epoch, batch_idx, self.numbers))
        loop = self.trainer.fit_loop.epoch_loop
        self.stepped.append(loop._batches_that_stepped)
        self.left_open.append(loop.val_loop.batch_progress.total.ready - loop.val_loop.batch_progress.total.completed)
        if self.log_path is not None:
            with open(self.log_path, "a") as file:
                file.write(json.dumps([self.trainer.current_epoch, self.trainer.global_step, self.numbers]) + "\n")

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx + 1))

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_epoch_end(self):
        self.ends.append(self.trainer.current_epoch)


class Planned(Recorded):
    """Asks for the number of steps, so that Lightning makes the loader's iterator before all else."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def plain(samples=32, world=(None, None), sampler=None, **options):
    numbered = Numbered(samples)
    dealt = RecoverableDistributedSampler(numbered, *world, **{"seed": 5, **(sampler or {})})
    return DataLoader(numbered, **{"batch_size": 4, "sampler": dealt, **options})


def batched():
    numbered = Numbered(32)
    return DataLoader(numbered, batch_sampler=BatchSampler(RecoverableDistributedSampler(numbered), 4, False))


def two():
    """The shorter one is cycled through."""
    return CombinedLoader([plain(32), plain(20, batch_size=2, shuffle=None)], "max_size_cycle")


def both_keep_a_position():
    numbered = Numbered(32)
    return StatefulDataLoader(numbered, 4, sampler=RecoverableDistributedSampler(numbered))


def stream(kind=Stream, samples=32, noise=0.0, **options):
    return StatefulDataLoader(kind(Numbered(samples), noise), 4, **options)


def stream_beside_a_sampler():
    return CombinedLoader([stream(), plain(20, batch_size=2, shuffle=None)], "max_size_cycle")


def fit(
    root, make=plain, model=Recorded, stop=None, every=1, beside=(), ckpt_path=None, policy=None, seed=7, **options
):
    pl.seed_everything(7, verbose=False)
    module = model(stop)
    pl.seed_everything(seed, verbose=False)
    checkpoint = MoECheckpoint(policy or Dense(every), root, when_busy="wait")
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, *beside],
        num_sanity_val_steps=0,
        **{"max_epochs": 2, **options},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dataloader is not resumable")
        try:
            trainer.fit(module, make(), DataLoader(Tokens(4), 4), ckpt_path=ckpt_path)
        except Stopped:
            assert stop is not None
        else:
            assert stop is None, "the run ended before it was to be stopped"
    return module, trainer, checkpoint


@functools.cache
def _uninterrupted(make, model, options):
    with tempfile.TemporaryDirectory() as root:
        module, trainer, _ = fit(root, make, model, every=1000, **dict(options))
        return module, state_of(module, trainer.optimizers[0])


def joined(lists):
    return [*itertools.chain.from_iterable(lists)]


def shuffling():
    return StatefulDataLoader(Numbered(32), 4, shuffle=True)


def numbered_pair():
    return CombinedLoader([plain(32), shuffling()], "max_size_cycle")


def recoverable_pair():
    return CombinedLoader([plain(32), both_keep_a_position()], "max_size_cycle")


@pytest.mark.parametrize(
    ("saved", "resumed", "which"),
    [
        (both_keep_a_position, shuffling, "StatefulDataLoader with the sampler RandomSampler"),
        (recoverable_pair, numbered_pair, r"StatefulDataLoader \(number 2 of 2\) with the sampler RandomSampler"),
        (
            both_keep_a_position,
            functools.partial(StatefulDataLoader, Numbered(32), 4, shuffle=True, num_workers=1),
            "StatefulDataLoader with the sampler RandomSampler",
        ),
    ],
)
def test_a_loader_that_refuses_its_state_when_it_begins_is_named(saved, resumed, which, tmp_path):
    root = str(tmp_path / "run")
    fit(root, saved, stop=3)
    with pytest.raises(
        StoreError, match=f"rank_00000_state.json holds state of the training loader {which}"
    ) as refused:
        fit(root, resumed)
    assert "RecoverableDistributedSampler is for any number" in str(refused.value)
    fit(root, saved)


class Failing(Numbered):
    def __getitem__(self, i):
        raise ValueError("no such sample")


@pytest.mark.parametrize("prefetched", [False, True])
def test_what_a_dataset_raises_is_its_own(prefetched, tmp_path):
    """Of a stream Lightning fetches the first batch where the loader begins."""
    root = str(tmp_path / "run")
    fit(root, stream if prefetched else both_keep_a_position, stop=3)
    failing = Failing(32)
    again = StatefulDataLoader(failing, 4, sampler=RecoverableDistributedSampler(failing))
    with pytest.raises(ValueError, match=r"^no such sample"):
        fit(root, functools.partial(stream, FailingStream) if prefetched else lambda: again)


class FailingStream(Stream):
    def __iter__(self):
        raise ValueError("no such sample")
        yield


def assert_as_uninterrupted(lives, make=plain, model=Recorded, **options):
    """All lives together trained on the same samples, with the same losses, to the same parameters."""
    whole, state = _uninterrupted(make, model, tuple(options.items()))
    assert joined(life[0].trained for life in lives) == whole.trained
    assert functools.reduce(dict.__or__, (life[0].losses for life in lives)) == whole.losses
    assert sorted({at for life in lives for at in life[0].validations}) == whole.validations  # one may come again
    assert joined(life[0].stepped for life in lives) == whole.stepped
    found = state_of(lives[-1][0], lives[-1][1].optimizers[0])
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(state[name], found[name])] == []


workers = functools.partial(plain, num_workers=2)
persistent = functools.partial(plain, num_workers=1, persistent_workers=True)
in_order = functools.partial(plain, sampler={"shuffle": False})
counted = functools.partial(stream, Counted)
noisy = functools.partial(stream, noise=1.0)
stream_workers = functools.partial(stream, num_workers=2)
ragged = functools.partial(plain, 30)


def slow(cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


CASES = [
    (plain, Recorded, 11, {}),
    (plain, Recorded, 8, {}),  # right at an epoch's end
    (workers, Recorded, 3, {}),
    (ragged, Recorded, 12, {"accumulate_grad_batches": 1, "val_check_interval": 0.25}),
    (plain, Planned, 4, {"accumulate_grad_batches": 3}),
    (plain, Recorded, 5, {"limit_train_batches": 5, "limit_val_batches": 0}),
    (batched, Recorded, 10, {}),
    (two, Recorded, 9, {}),  # the shorter one is in its second round
    (both_keep_a_position, Recorded, 10, {}),
    (stream, Recorded, 11, {}),
    (stream, Recorded, 8, {}),  # right at an epoch's end
    (functools.partial(stream, samples=30), Recorded, 9, {"val_check_interval": 3}),
    (stream, Recorded, 3, {"accumulate_grad_batches": 3}),
    (stream_workers, Recorded, 8, {}),
    (persistent, Planned, 11, {}),
    (counted, Recorded, 11, {}),
    (noisy, Recorded, 11, {}),
    (stream_beside_a_sampler, Recorded, 10, {}),
]
REPEATED = [
    (in_order, Recorded, 13, {}),
    (plain, Recorded, 5, {"limit_train_batches": 5}),
    (two, Recorded, 10, {}),
    (stream, Recorded, 7, {}),  # its last batch is fetched
    (stream, Recorded, 5, {"limit_train_batches": 5}),
    (stream_workers, Recorded, 11, {}),
]


@pytest.mark.parametrize(("make", "model", "step", "options"), [*CASES, *slow(REPEATED)])
def test_a_resume_is_exact(tmp_path, make, model, step, options):
    lives = [fit(tmp_path, make, model, stop, **options) for stop in (step, None)]
    assert lives[1][2].restored_step == step
    assert_as_uninterrupted(lives, make, model, **options)


@pytest.mark.parametrize(("stop", "first"), [(1, 0), (4, 1), (8, 4)])
def test_steps_of_a_stream_are_computed_again(tmp_path, stop, first):
    """A window is replayed from where its first step's batch was taken, though that was fetched a batch ahead."""
    windows = {"policy": MoEvement(window=3)}
    lives = [fit(tmp_path, noisy, stop=stop, **windows), fit(tmp_path, noisy, seed=8, **windows)]
    whole, state = _uninterrupted(noisy, Recorded, ())
    assert lives[1][0].trained == whole.trained[first:]
    assert {step: whole.losses[step] for step in lives[1][0].losses} == lives[1][0].losses
    found = state_of(lives[1][0], lives[1][1].optimizers[0])
    assert [name for name in state if not torch.equal(state[name], found[name])] == []


def test_a_resume_of_a_resume_by_ckpt_path(tmp_path):
    first = fit(tmp_path / "a", workers, stop=9)
    second = fit(tmp_path / "b", workers, stop=11, ckpt_path=tmp_path / "a" / "step_00000009")
    third = fit(tmp_path / "b", workers)
    assert_as_uninterrupted([first, second, third], workers)


def test_a_checkpoint_of_lightnings_own_callback_has_the_position(tmp_path):
    ordinary = ModelCheckpoint(tmp_path / "own", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(tmp_path / "a", workers, stop=12, beside=[ordinary])
    resumed = fit(tmp_path / "b", workers, ckpt_path=tmp_path / "own" / "step=9.ckpt")
    assert resumed[2].restored_step is None
    whole, _ = _uninterrupted(workers, Recorded, ())
    assert resumed[0].trained == whole.trained[9:]


class Paced(Recorded):
    """With a scheduler that steps once per epoch."""

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        configured["lr_scheduler"]["interval"] = "epoch"
        return configured


HALF, THREE, SIX, TWO = ({"val_check_interval": interval} for interval in (0.5, 3, 6, 2))
ELSEWHERE = [  # samples, ranks, steps, ranks then, options -> batches of the epoch then, validations then
    (64, 2, 3, 1, {}, range(6, 16), [(0, 16), (1, 16)]),
    (64, 1, 5, 2, {}, range(2, 8), [(0, 8), (1, 8)]),  # the rest, 44 samples, is no multiple of 8
    (64, 1, 1, 8, {}, range(2), [(0, 2), (1, 2)]),  # less than one batch of all ranks was done
    (64, 2, 8, 1, {}, [], [(0, 16), (1, 16)]),  # the epoch is done, its validation not
    (64, 2, 4, 1, HALF, range(8, 16), [(0, 8), (0, 16), (1, 8), (1, 16)]),  # due then and now
    (64, 2, 3, 1, SIX, range(6, 16), [(0, 12), (1, 6), (1, 12)]),  # due now, not then
    (40, 2, 5, 1, TWO, [], [(1, 2), (1, 4), (1, 6), (1, 8), (1, 10)]),  # likewise, at the end of the epoch
    (64, 2, 3, 1, {"limit_train_batches": 5, "limit_val_batches": 0}, [], []),
    (30, 1, 6, 2, {"drop_last": True}, [], [(0, 3), (1, 3)]),  # of the 6 samples left no rank gets a batch
]
ELSEWHERE_TOO = [
    (64, 1, 6, 2, {}, range(3, 8), [(0, 8), (1, 8)]),
    (64, 3, 2, 2, {}, range(3, 8), [(0, 8), (1, 8)]),
    (64, 2, 3, 1, THREE, range(6, 16), [(0, 6), (0, 9), (0, 12), (0, 15), (1, 3), (1, 6), (1, 9), (1, 12), (1, 15)]),
    (64, 1, 6, 2, SIX, range(3, 8), [(0, 6), (1, 6)]),  # due then, not now
    (64, 2, 3, 1, {"limit_train_batches": 0.5}, range(6, 8), [(0, 8), (1, 8)]),
    (64, 2, 3, 1, {"limit_train_batches": 5}, [], [(0, 5), (1, 5)]),  # more than five of the batches now
]


@pytest.mark.parametrize(
    ("samples", "ranks", "steps", "then", "options", "batches", "validations"), [*ELSEWHERE, *slow(ELSEWHERE_TOO)]
)
def test_the_loops_go_on_as_those_of_another_number_of_ranks(
    tmp_path, samples, ranks, steps, then, options, batches, validations
):
    """Of all ranks only the last is there, so this is about the loops; what all train on is tested with real ones."""
    options = dict(options)
    drop_last = options.pop("drop_last", False)
    made = [
        functools.partial(plain, samples, (world, world - 1), drop_last=drop_last, num_workers=number)
        for number, world in enumerate((ranks, then))
    ]
    first, _, _ = fit(tmp_path, made[0], Paced, steps, **options)
    second, trainer, _ = fit(tmp_path, made[1], Paced, **options)
    assert [at for epoch, at, _ in second.trained if epoch == 0] == list(batches)
    assert [at for epoch, at, _ in second.trained if epoch == 1] == list(range(trainer.num_training_batches))
    assert second.validations == validations
    assert second.left_open[0] == (len(batches) > 0 and (0, batches[0]) in validations)  # as Lightning leaves it
    assert second.ends == [0, 1]
    assert first.stepped + second.stepped == list(range(len(first.trained) + len(second.trained)))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(5)).tolist()
    rest = order[steps * 4 * ranks :]
    missing = -len(rest) % then
    mine = rest[then - 1 :: then] + order[:missing][-1:]  # the last rank's
    trained = joined(numbers for epoch, _, numbers in second.trained if epoch == 0)
    assert trained == mine[: len(trained)]
    assert len(trained) == len(mine) or "limit_train_batches" in options or drop_last


def test_the_position_is_kept_where_no_number_of_whole_batches_leads(tmp_path):
    """20 samples by one rank, 8 by two, the rest by three; 12 of the next epoch, then one rank again."""
    fit(tmp_path, functools.partial(plain, 64, (1, 0)), stop=5)
    fit(tmp_path, functools.partial(plain, 64, (2, 0)), stop=6)
    module, _, _ = fit(tmp_path, functools.partial(plain, 64, (3, 0)), stop=10)
    assert [at for epoch, at, _ in module.trained if epoch == 0] == [3, 4, 5]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()
    assert joined(numbers for epoch, _, numbers in module.trained if epoch == 0) == order[28::3]
    module, _, _ = fit(tmp_path, functools.partial(plain, 64, (1, 0)))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(6)).tolist()
    assert joined(numbers for _, _, numbers in module.trained) == order[12:]


def test_a_validation_made_after_a_restart_is_not_taken_for_one_that_broke_off(tmp_path):
    """At the end of its epoch, in which none is due, with other ranks by whose count one is."""
    two_ranks, one = (functools.partial(plain, 40, (world, 0)) for world in (2, 1))
    lives = [fit(tmp_path, make, stop=stop, **TWO)[0] for make, stop in ((two_ranks, 4), (two_ranks, 5), (one, None))]
    assert lives[1].validations == [(0, 4)]
    assert lives[2].validations[0] == (1, 2)
    assert joined(life.stepped for life in lives) == list(range(15))


def test_accumulation_after_a_restart_with_another_number_of_ranks(tmp_path):
    """Two batches were done, one of twice the ranks: the first step is of one batch, the others of two again."""
    options = {"accumulate_grad_batches": 2, "max_epochs": 1}
    fit(tmp_path, functools.partial(plain, 64, (1, 0)), stop=1, **options)
    module, trainer, _ = fit(tmp_path, functools.partial(plain, 64, (2, 0)), **options)
    assert [at for _, at, _ in module.trained] == list(range(1, 8))
    assert module.stepped == [1, 2, 2, 3, 3, 4, 4]
    assert trainer.global_step == 5


def test_another_seed_is_refused_before_training(tmp_path):
    fit(tmp_path, stop=3)
    with pytest.raises(ConfigError, match=r"seed: 5 .* 6 "):
        fit(tmp_path, functools.partial(plain, sampler={"seed": 6}))


def test_other_loaders_are_refused(tmp_path):
    fit(tmp_path, two, stop=3)
    with pytest.raises(ConfigError, match="2 training loaders, this run has 1"):
        fit(tmp_path)


def test_a_run_from_the_beginning_takes_no_position_from_before(tmp_path):
    """The same loader in another run, which was broken off after a resume."""
    loader = plain()
    fit(tmp_path / "a", lambda: loader, stop=3)
    fit(tmp_path / "a", lambda: loader, stop=5)
    module, _, _ = fit(tmp_path / "b", lambda: loader)
    assert module.trained == _uninterrupted(plain, Recorded, ())[0].trained


class Buckets(BatchSampler):
    pass


def test_what_is_known_of_loaders():
    """Only where batches are the sampler's next samples the position follows from their number."""
    numbered = Numbered(8)
    dealt = RecoverableDistributedSampler(numbered)
    assert dealer_of(DataLoader(numbered, None, sampler=dealt)).batch_size == 1
    assert dealer_of(DataLoader(numbered, 3, sampler=dealt, drop_last=True)).whole == 2
    assert dealer_of(DataLoader(numbered, batch_sampler=BatchSampler(dealt, 3, False))).whole == 3
    assert dealer_of(DataLoader(numbered, batch_sampler=Buckets(dealt, 3, False))) is None
    assert dealer_of(DataLoader(numbered, 3)) is None


def buckets():
    numbered = Numbered(32)
    return DataLoader(numbered, batch_sampler=Buckets(RecoverableDistributedSampler(numbered), 4, False))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (plain, None),
        (two, None),
        (stream, None),
        (buckets, "Buckets makes batches in its own way"),
        (lambda: DataLoader(Numbered(32), 4), "DataLoader keeps no position .*RecoverableDistributedSampler"),
    ],
)
def test_warns_when_training_starts(tmp_path, caplog, make, words):
    fit(tmp_path, make, max_steps=1)
    said = [record.getMessage() for record in caplog.records if "will not be exact" in record.getMessage()]
    assert len(said) == (words is not None)
    if words is not None:
        assert re.search(words, said[0])


def _ranks(rank: int, world_size: int, root: str, log: str, stop: int | None, kill: int | None) -> dict:
    """One life of real DDP ranks; ``kill``: all die at that step, in the middle of the batch."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    pl.seed_everything(7, verbose=False)
    module = Recorded(stop, kill, f"{log}.{rank}")
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    checkpoint = MoECheckpoint(Dense(2), root, when_busy="wait")  # of 1, a batch of one might be left
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        max_epochs=2,
        logger=False,
        callbacks=[checkpoint],
        strategy=DDPStrategy(process_group_backend="gloo") if world_size > 1 else "auto",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    try:
        trainer.fit(module, plain(48, batch_size=2, num_workers=rank))  # 12 batches of two ranks
    except (Stopped, SystemExit):  # Lightning ends its ranks with the latter
        assert stop is not None
    warned = [message for message in warned if "is of world size" in message]
    return {"restored": checkpoint.restored_step, "steps": trainer.global_step, "warned": warned}


def _trained(log: Path, ranks: int, epoch: int, up_to: float = math.inf) -> list[int]:
    """Samples of ``epoch`` that a life's ranks trained on until step ``up_to``."""
    lines = [json.loads(line) for rank in range(ranks) for line in Path(f"{log}.{rank}").read_text().splitlines()]
    return [number for at, step, numbers in lines if at == epoch and step <= up_to for number in numbers]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((1, 2), marks=SLOW), pytest.param((2, 1, 2), marks=SLOW)])
def test_real_ranks_train_on_each_sample_once(tmp_path, worlds):
    """Killed in the middle of a batch of the second epoch; the others go on, the last of them to the end."""
    logs = [tmp_path / f"life{life}" for life in range(len(worlds))]
    at = 12 if worlds[0] == 2 else 24  # steps in the first epoch
    killed = start_ranks(_ranks, worlds[0], str(tmp_path / "store"), str(logs[0]), None, at + 5)
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * worlds[0]
    assert sorted(_trained(logs[0], worlds[0], 0)) == list(range(48))
    restored = []
    for life, world in enumerate(worlds[1:], 1):
        stop = at + 8 if life + 1 < len(worlds) else None
        ranks = run_ranks(_ranks, world, str(tmp_path / "store"), str(logs[life]), stop, None)
        restored += {rank["restored"] for rank in ranks}
        assert [len(rank["warned"]) for rank in ranks] == [1] + [0] * (world - 1)
        assert f"is of world size {worlds[life - 1]}, and this run's is {world}" in ranks[0]["warned"][0]
    assert at <= restored[0] <= at + 5, "two may be under way when the ranks are killed"
    assert restored[1:] in ([], [at + 8])
    lives = [
        _trained(log, world, 1, step) for log, world, step in zip(logs, worlds, [*restored, math.inf], strict=True)
    ]
    assert all(lives)
    assert sorted(joined(lives)) == list(range(48))


def _tensor_parallel(rank: int, world_size: int, root: str) -> str:
    """Two ranks that hold one replica of the model, and a sampler that takes them for two replicas."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))

    class Whole(Recorded):
        def configure_model(self):
            pass

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        max_epochs=1,
        logger=False,
        callbacks=[MoECheckpoint(Dense(1), root)],
        strategy=ModelParallelStrategy(1, world_size, process_group_backend="gloo"),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    with pytest.raises(ConfigError) as refused:
        trainer.fit(Whole(), plain())
    return str(refused.value)


@pytest.mark.slow
def test_ranks_that_share_a_replica_must_be_told_apart(tmp_path):
    for message in run_ranks(_tensor_parallel, 2, str(tmp_path)):
        assert re.search("divides the data among 2 ranks.* trains 1 replicas.* num_replicas= and rank=", message)


def _hidden_wrapper(rank: int, world_size: int, root: str) -> tuple[str, list[str]]:
    """A shuffling StatefulDataLoader on several ranks: Lightning's sampler for them is inside its batch sampler."""
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    logging.getLogger("moe_ckpt").addHandler(Keep())
    refused = ""
    for policy in (Dense(), MoEvement(window=2)):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_steps=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[MoECheckpoint(policy, f"{root}/{type(policy).__name__}")],
        )
        try:
            trainer.fit(TinyMoE(layers=1), StatefulDataLoader(Tokens(32), batch_size=4, shuffle=True))
        except ConfigError as error:
            refused = str(error)
    return refused, told


def test_the_sampler_that_lightning_hides_in_a_batch_sampler_is_seen(tmp_path):
    ranks = run_ranks(_hidden_wrapper, 2, str(tmp_path))
    assert any("draws a new order after a resume" in line for _, told in ranks for line in told), ranks
    for refused, _ in ranks:
        assert "MoEvement computes steps again" in refused
        assert "the sampler that Lightning put into StatefulDataLoader draws a new order after a resume" in refused
