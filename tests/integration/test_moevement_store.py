"""What a store of sparse windows survives and says: damage, retention, an end during a replay, other readers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.cli.main import main
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.interop.dcp import MoEStorageReader
from moe_ckpt.policies import Catalog, MoC, MoEvement, Needs, PolicyContext, SnapshotPlan
from moe_ckpt.storage import open_storage
from tests.integration.crash_run import Run, build, loaders
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    committed,
    events,
    live,
    manifests,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.support.tiny_moe import TinyMoE, Tokens
from tests.support.verifying import verify_store

W = 3
RUN = Run(None, policy=("moevement", W), epochs=3, callback={"when_busy": "wait"})
LAG = 2
"""Steps whose snapshots may be under way."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Windows2Then:
    """A policy of a user's own: windows of two, and from step 6 on one expert per layer."""

    needs: ClassVar[Needs] = Needs(windows=True, partial=True)

    def check(self, catalog: Catalog) -> None:
        MoEvement(window=2).check(catalog)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        return (MoEvement(window=2) if context.run.step < 6 else MoC(k=1)).plan(context)

    def describe(self) -> dict[str, Any]:
        return {"name": "windows, then parts"}


def test_the_first_partial_checkpoint_behind_windows_holds_everything(place, caplog):  # noqa: F811
    pl.seed_everything(1, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    checkpoint = MoECheckpoint(Windows2Then(), place / "store", save_last=False, when_busy="wait")
    trainer = pl.Trainer(accelerator="cpu", max_steps=8, callbacks=[checkpoint], **quiet)
    trainer.fit(TinyMoE(layers=1), StatefulDataLoader(Tokens(32), 4))
    stored = manifests(place / "store")
    steps = {each.step: sorted({op.step for op in each.operators.values()}) for each in stored}
    assert "not committed" not in caplog.text
    assert (steps[6], steps[8]) == ([6], [6, 7, 8])


@pytest.fixture
def killed(place):  # noqa: F811
    """A run that died with two windows in its store, and the dense checkpoint that it began with.

    At the commit of the fourth window: what the third one supersedes is deleted before that, at any speed.
    """
    run = placed(RUN, place)
    assert live(replace(run, crash=("manifest", 5))) == KILLED
    assert [len(manifest.slots) for manifest in manifests(run.store)] == [W, W, 1]
    return run


def _damage(store: str, path: str, how: str) -> None:
    file = Path(store) / path
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        content = bytearray(file.read_bytes())
        content[-5] ^= 4  # in the last slice of a shard, in the text of a state file
        file.write_bytes(content)


def _files(manifest: Manifest, slot: int) -> list[str]:
    """Shards and states of one step of the window."""
    directory = manifest.slots[slot].directory
    return sorted(path for path in manifest.paths if path.startswith(f"{directory}/"))


def _comes_back_to(run: Run, older: Manifest) -> None:
    assert live(run) == 0, output(run)
    assert split_lives(events(run))[-1][0]["step"] == older.step
    assert "is skipped; the next older one is tried" in output(run)
    assert_same_run(run)


# --- damage ---


@pytest.mark.parametrize(
    ("slot", "how", "kind"),
    [
        (0, "flipped", "expert"),
        (1, "truncated", "expert"),
        (2, "missing", "non_expert"),
        (1, "flipped", "state"),
        *(
            pytest.param(slot, how, kind, marks=pytest.mark.slow)
            for slot in range(W)
            for how in ("flipped", "truncated", "missing")
            for kind in ("expert", "non_expert", "state")
        ),
    ],
)
@pytest.mark.quick("0-flipped-expert0", "1-flipped-expert", "2-missing-non_expert0")
def test_an_older_window_stands_in_for_a_damaged_one(killed, slot, how, kind):
    newest, older, _ = manifests(killed.store)
    [path] = [path for path in _files(newest, slot) if path.rpartition("/")[2].startswith(f"rank_00000_{kind}.")]
    _damage(killed.store, path, how)
    found = verify_store(open_storage(killed.store))
    assert [(damage.path, damage.affects) for damage in found] == [(path, (newest.directory,))]
    _comes_back_to(killed, older)


def test_everything_damaged_is_said_and_nothing_is_trained(killed):
    for manifest, how in zip(manifests(killed.store), ("flipped", "truncated", "missing"), strict=True):
        _damage(killed.store, _files(manifest, -1)[0], how)
    before = len(events(killed))
    with pytest.raises(AssertionError, match="exit code 1"):
        live(killed)
    assert "NoCheckpointError: no checkpoint in" in output(killed)
    assert len(events(killed)) == before


def test_damaged_while_it_is_computed_again_is_no_wrong_result(killed):
    """The window was verified, and breaks before its last step is read: the run stops; the older window is used."""
    newest, older, _ = manifests(killed.store)
    trainer, module, _ = build(killed)

    class Breaks(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            _damage(killed.store, next(path for path in _files(newest, W - 1) if "expert" in path), "flipped")

    trainer.callbacks.append(Breaks())
    with pytest.raises(Exception, match="checksum"):
        trainer.fit(module, *loaders(killed))
    _comes_back_to(killed, older)


# --- what stays and what goes ---


class Counts(pl.Callback):
    """The number of step directories after each batch."""

    def __init__(self, store: str) -> None:
        self.store = Path(store)
        self.seen: list[int] = []

    def on_train_batch_end(self, *_):
        self.seen.append(len(list(self.store.glob("step_*"))))


def test_no_files_are_left_over(place):  # noqa: F811
    """Two windows, the one under way, the newest dense checkpoint, and what is being written."""
    run = placed(replace(RUN, epochs=8), place)
    trainer, module, _ = build(run)
    counts = Counts(run.store)
    trainer.callbacks.insert(0, counts)
    trainer.fit(module, *loaders(run))
    assert len(counts.seen) == 80
    assert max(counts.seen) <= 3 * W + 1 + LAG
    kept = manifests(run.store)
    assert [len(manifest.slots) for manifest in kept] == [1, W]
    named = {f"{run.store}/{path}" for manifest in kept for path in manifest.paths}
    named |= {f"{run.store}/{manifest.directory}/MANIFEST.json" for manifest in kept}
    assert {str(path) for path in Path(run.store).glob("step_*/*")} == named


def test_nothing_is_left_of_windows_that_were_begun(killed):
    """However often a life dies in a window, the next one clears away what it began."""
    for n in (7, 7, 7, 7):
        assert live(replace(killed, crash=("compute", n))) == KILLED
    assert len(list(Path(killed.store).glob("step_*"))) <= 3 * W + 1 + LAG
    assert live(killed) == 0
    assert_store_sound(killed, ended=True)
    assert len(list(Path(killed.store).glob("step_*"))) == 1 + W
    assert_same_run(killed)


# --- the end of training during a replay ---


@pytest.mark.parametrize("past", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_training_that_ends_in_the_middle_of_a_replay_leaves_the_window(killed, past):
    first = manifests(killed.store)[0].slots[0].step
    before = committed(killed.store)
    assert live(replace(killed, trainer={"max_steps": first + past})) == 0
    if past < W - 1:
        assert committed(killed.store) == before
    assert live(killed) == 0, output(killed)
    assert_promises_kept(killed)
    assert_same_run(killed)


# --- other policies and readers ---


@pytest.mark.parametrize("policy", [("dense", 1), pytest.param(("moc", 4), marks=pytest.mark.slow)])
def test_another_policy_goes_on_from_a_window(killed, policy):
    """It brings the window back first, then saves as it does; and the other way round."""
    other = replace(killed, policy=policy)
    assert live(replace(other, crash=("compute", 9))) == KILLED
    assert len(manifests(killed.store)[0].slots) == 1
    assert live(killed) == 0, output(killed)
    assert_store_sound(killed, ended=True)
    assert_same_run(killed)


def test_readers_of_one_state_refuse_a_window(killed, tmp_path, capsys):
    step = f"{killed.store}/{manifests(killed.store)[0].directory}"
    trainer, module, _ = build(placed(RUN, tmp_path))
    with pytest.raises(UnsupportedError, match="is a sparse window of the steps"):
        trainer.fit(module, *loaders(killed), ckpt_path=step)
    state = {"model": {name: torch.zeros_like(value) for name, value in module.state_dict().items()}}
    with pytest.raises(UnsupportedError, match="is a sparse window of the steps"):
        dcp.load(state, storage_reader=MoEStorageReader(step))
    dense = manifests(killed.store)[-1].directory
    assert main(["export", killed.store, "--to", "safetensors", "-o", str(tmp_path / "dense")]) == 0
    assert f"({dense})" in capsys.readouterr().err, "of a store the newest that is dense"
    shutil.rmtree(Path(killed.store, dense))
    for path in (step, killed.store):
        for form in ("dcp", "safetensors", "lightning"):
            capsys.readouterr()
            assert main(["export", path, "--to", form, "-o", str(tmp_path / form)]) == 2
            assert "is a sparse window of the steps" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name in ("dcp", "safetensors", "lightning")) == []


def test_the_command_line_knows_windows(killed, capsys):
    newest = manifests(killed.store)[0]
    assert main(["verify", killed.store]) == 0
    assert "3 steps undamaged" in capsys.readouterr().out
    assert main(["verify", f"{killed.store}/{newest.directory}"]) == 0
    assert main(["inspect", killed.store]) == 0
    said = capsys.readouterr().out
    first, last = newest.slots[0].step, newest.step
    assert f"{newest.directory} is a sparse window: resuming computes steps {first + 1} to {last} again" in said
    shutil.rmtree(Path(killed.store) / newest.slots[0].directory)
    assert main(["verify", killed.store]) == 1
    assert newest.slots[0].directory in capsys.readouterr().out


def test_what_others_save_during_a_replay_has_no_optimizer_state(killed, tmp_path, caplog):
    """It would not be the run's; so Lightning loads the weights and refuses to train on from them."""
    trainer, module, _ = build(killed)
    newest = manifests(killed.store)[0]
    beside = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer.callbacks.append(beside)
    trainer.fit(module, *loaders(killed))
    steps = [slot.step for slot in newest.slots]
    saved = {path.stem: torch.load(path, weights_only=False) for path in tmp_path.glob("*.ckpt")}
    without = {saved[name]["global_step"] for name in saved if "optimizer_states" not in saved[name]}
    assert without == set(steps[1:])
    assert f"while the sparse window of steps {steps[0]} to {steps[-1]} is computed again" in caplog.text
    trainer, module, _ = build(placed(RUN, tmp_path))
    with pytest.raises(KeyError, match="contains only the model"):
        trainer.fit(module, *loaders(killed), ckpt_path=str(tmp_path / f"step={steps[1]}.ckpt"), weights_only=False)


class TwoPasses(TinyMoE):
    """The second pass reads what the first one's update changed."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        experts = [p for name, p in self.named_parameters() if ".experts." in name]
        others = [p for name, p in self.named_parameters() if ".experts." not in name]
        return [torch.optim.AdamW(experts), torch.optim.AdamW(others)]


def test_a_pass_after_an_update_of_the_same_batch_is_refused(place):  # noqa: F811
    run = placed(RUN, place)
    trainer, _, _ = build(run)
    with pytest.raises(ConfigError, match="all backward passes of a batch to come before its updates"):
        trainer.fit(TwoPasses(), *loaders(run))


def test_a_loader_that_cannot_be_resumed_is_refused_before_training(place):  # noqa: F811
    run = placed(RUN, place)
    trainer, module, recorder = build(run)
    with pytest.raises(ConfigError, match=r"MoEvement computes steps again.*DataLoader keeps no position"):
        trainer.fit(module, DataLoader(Tokens(16), batch_size=4, shuffle=True))
    assert not [line for line in recorder.lines if line["event"] == "batch"]
    assert committed(run.store) == []
