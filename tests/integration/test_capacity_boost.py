"""The capacity boost in real runs under kill -9: who got how many tokens, recounted, and the same bits after a kill."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.format.manifest import state_path
from moe_ckpt.policies import MoEtion
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_losses,
    events,
    fast_directory,
    live,
    live_ranks,
    load,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.support.tiny_moe import TinyMoE, loader

STALE = Run(
    None,
    policy=("moetion", 1),
    options={"experts": 1, "capacity_boost": 0.5},
    epochs=6,
    model={"experts": 4},
    callback={"when_busy": "wait", "save_last": False},
)
ALL_SAVED = {"experts": 4, "capacity_boost": 0.5}
"""From here on every checkpoint is exact, so that a later kill loses nothing but time."""


def _failed_once(run: Run) -> Run:
    """A run that was killed when most experts were stale; from now on it saves all of them."""
    assert live(replace(run, crash=("manifest", 9))) == KILLED, output(run)
    return replace(run, options=ALL_SAVED)


def _copied(run: Run, there: Path) -> Run:
    """The same run, as it is now, in another directory."""
    there.mkdir(exist_ok=True)
    shutil.copytree(run.store, there / "store")
    for path in Path(run.log).parent.glob(f"{Path(run.log).name}*"):
        shutil.copy(path, there / path.name)
    return replace(run, store=str(there / "store"), log=str(there / Path(run.log).name), out=str(there / "final.pt"))


def _with_truth(run: Run) -> tuple[Run, Run]:
    """A run that failed once, and the same gone on to its end."""
    untouched = _copied(run, Path(run.store).parent / "untouched")
    assert live(untouched) == 0, output(untouched)
    return run, untouched


@pytest.fixture(scope="module")
def failed() -> Iterator[tuple[Run, Run]]:
    """``_with_truth`` of ``STALE``, to be copied: most tests here begin with it."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_", dir=fast_directory()) as directory:
        yield _with_truth(_failed_once(placed(STALE, Path(directory))))


def _lacking(life: list[dict]) -> np.ndarray:
    """Tokens that each expert lacks at the begin of a life, by the manifest that it goes on from."""
    manifest = life[0]["manifest"]
    return np.array(manifest["tokens"]["applied"]) - np.array(manifest["tokens"]["saved"]["storage"])


def _extra(batches: list[dict]) -> np.ndarray:
    """``[steps, L, E]`` tokens of each expert beyond what the router's own scores gave it."""
    return np.array([np.array(line["routed"]) - np.array(line["scored"]) for line in batches])


def test_stale_experts_get_their_portion_more_until_they_have_made_up_for_what_they_lost(failed):
    _, run = failed
    first, second = split_lives(events(run))
    before, after = ([line for line in life if line["event"] == "batch"] for life in (first, second))
    lacking = _lacking(second)
    assert lacking.sum() > 0
    assert not _extra(before).any(), "no boost without a failure"
    extra = _extra(after)
    behind = lacking.copy()
    for step, line in enumerate(after):
        scored = np.array(line["scored"])
        assert (extra[step][behind == 0] <= 0).all()
        assert (extra[step] <= behind).all(), "nobody makes up more than it lost"
        assert (extra[step][behind > 0] >= 0).all()
        assert (extra[step] <= (scored + 1) // 2).all(), "half of what it gets anyway, with half a token carried"
        assert extra[step].sum() == 0, "no token more or less"
        assert line["owed"] == (behind.sum() if step else None), "the callback tells of the step before"
        behind -= np.where(behind > 0, extra[step], 0)
    assert not behind.any(), "all is made up"
    assert after[-1]["owed"] == 0
    said = Path(f"{run.log}.txt").read_text()
    assert f"get 50 % more tokens until {lacking.sum():,} lost ones are made up" in said
    assert not _extra(after[-3:]).any(), "taken away again"


@pytest.mark.parametrize(
    ("crash", "changed"),
    [
        (("manifest", 3), {}),
        (("copy", 2), {}),
        (("write", 25), {}),
        (("manifest", 6), {"kind": "overflowing"}),
        (("manifest", 3), {"trainer": {"accumulate_grad_batches": 2}, "epochs": 12}),
    ],
    ids=["manifest", "copy", "write", "overflowing", "accumulating"],
)
@pytest.mark.quick("manifest", "copy", "overflowing")
def test_a_kill_in_the_middle_of_a_boost_changes_nothing(place, failed, crash, changed):  # noqa: F811
    if changed:
        run, untouched = _with_truth(_failed_once(placed(replace(STALE, **changed), place)))
    else:
        run, untouched = _copied(failed[0], place), failed[1]
    assert live(replace(run, crash=crash)) == KILLED, output(run)
    assert split_lives(events(run))[-1][-1]["owed"] > 0, "the boost was under way"
    assert live(run) == 0, output(run)
    truth = split_lives(events(untouched))[-1]
    seen = [line for life in split_lives(events(run))[1:] for line in life]
    assert_same_losses(seen, truth)
    of_batch = {line["index"]: line for line in truth if line["event"] == "batch"}
    for line in seen:
        if line["event"] == "batch":
            assert line["routed"] == of_batch[line["index"]]["routed"]
            assert line["owed"] in (None, of_batch[line["index"]]["owed"])
    for name, tensor in load(run).items():
        if hasattr(tensor, "equal"):
            assert tensor.equal(load(untouched)[name]), name


@pytest.mark.parametrize("lacking", ["boost not loaded", "fractions not loaded"])
def test_what_a_restart_must_bring_back_is_missed(place, failed, lacking):  # noqa: F811
    """Each part of the state is needed: without it the comparison above fails."""
    run, untouched = _copied(failed[0], place), failed[1]
    assert live(replace(run, crash=("manifest", 3))) == KILLED, output(run)
    assert live(replace(run, sabotage=lacking)) == 0, output(run)
    with pytest.raises(AssertionError, match="differ from the undisturbed run"):
        assert_same_losses(split_lives(events(run))[-1], split_lives(events(untouched))[-1])


def test_memory_that_outlives_the_process_brings_a_boost_back(place, failed):  # noqa: F811
    """Storage gets every fifth checkpoint only, so that what comes back was in memory."""
    memory = place / "memory"
    memory.mkdir()
    run, untouched = replace(_copied(failed[0], place), memory=str(memory), to_storage=5), failed[1]
    assert live(replace(run, crash=("copy", 5))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert "from memory" in Path(f"{run.log}.txt").read_text()
    seen = [line for life in split_lives(events(run))[1:] for line in life]
    assert_same_losses(seen, split_lives(events(untouched))[-1])


def _fitted(directory: Path, max_steps: int, policy: MoEtion, **fit: Any) -> tuple[pl.Trainer, MoECheckpoint]:
    pl.seed_everything(5, verbose=False)
    checkpoint = MoECheckpoint(policy, str(directory), save_last=False, when_busy="wait")
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=max_steps, callbacks=[checkpoint], logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(TinyMoE(), loader(), **fit)
    return trainer, checkpoint


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_is_named_and_a_trainer_that_fits_on_go_on_with_boosts(tmp_path):
    few, all_of_them = MoEtion(experts=1), MoEtion(experts=4)
    _fitted(tmp_path / "one", 9, few)
    shutil.copytree(tmp_path / "one", tmp_path / "named")
    _, by_itself = _fitted(tmp_path / "one", 14, all_of_them)
    owed = by_itself.last.owed_tokens
    assert owed > 0
    _, named = _fitted(tmp_path / "two", 14, all_of_them, ckpt_path=str(tmp_path / "named"))
    assert named.last.owed_tokens == owed, "what was lost is made up from there, too"
    trainer, fitting = _fitted(tmp_path / "named", 12, all_of_them)
    assert fitting.last.owed_tokens > owed
    trainer.fit_loop.epoch_loop.max_steps = 14
    trainer.fit(trainer.lightning_module, loader())
    assert fitting.last.owed_tokens <= owed + 1
    assert fitting.last.owed_tokens > 0


def test_another_failure_adds_to_what_was_left(place):  # noqa: F811
    run = placed(STALE, place)
    assert live(replace(run, crash=("manifest", 9))) == KILLED, output(run)
    assert live(replace(run, crash=("manifest", 4))) == KILLED, output(run)
    reader = StoreReader(open_storage(run.store))
    newest = reader.manifest(reader.directories()[0])
    stored = reader.state(newest, 0)["boost"]["left"]
    left = np.array([stored[str(layer)].tolist() for layer in range(2)])
    assert left.any(), state_path(newest.directory, 0)
    assert live(run) == 0, output(run)
    third = split_lives(events(run))[-1]
    wanted = int(_lacking(third).sum() + left.sum())
    assert f"until {wanted:,} lost ones are made up" in Path(f"{run.log}.txt").read_text()


def test_two_ranks_make_up_together_what_was_lost_and_repeat_it(place):  # noqa: F811
    run = placed(replace(STALE, ranks=2, epochs=10), place)
    assert KILLED in live_ranks(replace(run, crash=("manifest", 8))), output(run)
    run = replace(run, options=ALL_SAVED)
    assert KILLED in live_ranks(replace(run, crash=("manifest", 3))), output(run)
    assert live_ranks(run) == [0, 0], output(run)
    lives = [split_lives(events(run, rank)) for rank in range(2)]
    lacking = _lacking(lives[0][1])
    assert lacking.sum() > 0
    steps = [{}, {}]
    for rank in range(2):
        for life in lives[rank][1:]:
            for line in life:
                if line["event"] == "batch":
                    known = steps[rank].setdefault(line["step"], (line["routed"], line["loss"]))
                    assert known == (line["routed"], line["loss"]), "computed again, it is the same"
    newest = {}
    for rank in range(2):
        for life in lives[rank][1:]:
            newest |= {(rank, line["step"]): line for line in life if line["event"] == "batch"}
    end = max(step for _, step in newest)
    # Below 0 where an expert gave tokens to another: one that lost none, or has made up for them on that rank.
    extra = sum(_extra([line])[0].clip(min=0) for (_, step), line in newest.items() if step < end - 1)
    assert (extra <= lacking).all()
    owed = [newest[rank, end]["owed"] for rank in range(2)]
    assert owed == [lacking.sum() - extra.sum()] * 2, "of two steps before, alike on both ranks"


def test_a_router_that_cannot_take_a_boost_trains_on_and_says_why(place):  # noqa: F811
    run = placed(replace(STALE, epochs=2, sabotage="chooses by sorting"), place)
    assert live(replace(run, crash=("manifest", 9))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    said = Path(f"{run.log}.txt").read_text()
    for layer in range(2):
        assert f"no capacity boost in MoE layer blocks.{layer}.moe, whose stale experts continue without" in said
    assert "its router, Router, does not support it: it calls no torch.topk (4 experts for the best 2)" in said
    last = split_lives(events(run))[-1]
    assert not _extra([line for line in last if line["event"] == "batch"]).any()
    assert [line["owed"] for line in last if line["event"] == "batch"][-1] == 0


def test_without_a_boost_nobody_gets_more(place):  # noqa: F811
    run = placed(replace(STALE, epochs=2, options={"experts": 1, "capacity_boost": None}), place)
    assert live(replace(run, crash=("manifest", 9))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    last = [line for line in split_lives(events(run))[-1] if line["event"] == "batch"]
    assert not _extra(last).any()
    assert {line["owed"] for line in last} == {None}
    assert "capacity boost" not in Path(f"{run.log}.txt").read_text()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_on_another_number_of_ranks_what_is_left_is_dealt_out_anew(place, before, after):  # noqa: F811
    run = placed(replace(STALE, epochs=8, sampler="recoverable"), place)
    assert KILLED in live_ranks(replace(run, ranks=before, crash=("manifest", 8))), output(run)
    run = replace(run, options=ALL_SAVED)
    assert KILLED in live_ranks(replace(run, ranks=before, crash=("manifest", 3))), output(run)
    reader = StoreReader(open_storage(run.store))
    newest = reader.manifest(reader.directories()[0])
    left = [reader.state(newest, rank)["boost"]["left"] for rank in range(before)]
    total = sum(int(rows.sum()) for each in left for rows in each.values())
    assert total > 0
    assert live_ranks(replace(run, ranks=after)) == [0] * after, output(run)
    assert f"get 50 % more tokens until {total:,} lost ones are made up" in Path(f"{run.log}.txt").read_text()
