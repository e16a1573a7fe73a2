"""A real Lightning run's state files, edited and sealed again: the next start takes them or says what is wrong."""

from __future__ import annotations

import random
import stat
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest

from moe_ckpt.driver import run as driver_run
from moe_ckpt.errors import DamagedError, MoECheckpointError, StoreError
from moe_ckpt.format.sealed import digest, seal, unseal
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import FaultyStorage
from tests.integration.crash_run import Run, StopHere, build, loaders
from tests.support.deleting import delete_tree
from tests.unit.test_edited_documents import DELETED, edited, places

RUN = Run(None, samples=8, epochs=1, beside=("modelcheckpoint",))
LONGER = replace(RUN, epochs=3)
WRONG = (DELETED, None, "x", 7, -1, 1.5, [], [None], {}, {"a": {"b": None}}, {"$": "float", "v": "nan"})


class StopAtFirstBatch(pl.Callback):
    """By then everything has been given back."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        raise StopHere


class RunStore:
    """The store of a run that ended, whose newest state file can be edited."""

    def __init__(self, root: Path) -> None:
        self.root = root
        run = replace(RUN, store=str(root))
        trainer, module, _ = build(run)
        trainer.fit(module, *loaders(run))
        (root / "finished.json").unlink(missing_ok=True)  # as if it had been killed right after its last checkpoint
        self.directory = StoreReader(LocalStorage(root)).directories()[0]
        self.state = f"{self.directory}/rank_00000_state.json"
        self.manifest, self.part = f"{self.directory}/MANIFEST.json", f"{self.directory}/PART.json"
        self.files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        self.body = unseal(self.files[self.state], self.state)

    def restore(self) -> None:
        delete_tree(self.root)
        for name, raw in self.files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_bytes(raw)

    def edit(self, at: tuple, new: object) -> None:
        raw = seal(edited(self.body, at, new))
        (self.root / self.state).write_bytes(raw)
        part, manifest = (unseal(self.files[name], name) for name in (self.part, self.manifest))
        [row] = part["states"]
        row[1:] = [len(raw), digest(raw)]
        raw = seal(part)
        (self.root / self.part).write_bytes(raw)
        manifest["parts"][0][1:] = [len(raw), digest(raw)]
        (self.root / self.manifest).write_bytes(seal(manifest))

    def start(self) -> pl.Trainer:
        """Come back and stop at the first batch; raises what the start raises."""
        trainer, module, _ = build(replace(LONGER, store=str(self.root)))
        trainer.callbacks = [StopAtFirstBatch(), *trainer.callbacks]
        with pytest.raises(StopHere):
            trainer.fit(module, *loaders(LONGER))
        return trainer


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return RunStore(tmp_path_factory.mktemp("edited") / "store")


def sweep(store: RunStore, number: int, seed: int) -> int:
    """Starts after ``number`` edits; how many of them were refused."""
    # What a loader says of its position only that loader can read, which Lightning makes later.
    found = (at for at in places(store.body["state"]) if at and "combined_loader" not in at[:-1])
    edits = [(at, new) for at in found for new in WRONG]
    refused = 0
    for at, new in random.Random(seed).sample(edits, min(number, len(edits))):
        store.restore()
        store.edit(("state", *at), new)
        for only in StoreReader(LocalStorage(store.root)).directories()[1:]:
            (store.root / only / "MANIFEST.json").unlink()  # nothing to fall back to: the error must come out
        try:
            store.start()
        except MoECheckpointError:
            refused += 1
        except pytest.fail.Exception:
            pass  # by the edited counts there was nothing left to train
        except Exception as error:
            raise AssertionError(f"{at} = {new!r} gave {type(error).__name__}: {error}") from error
    return refused


def test_edited_states_of_a_real_run_give_no_error_but_ours(store):
    assert sweep(store, 24, seed=3) > 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_edited_states_of_a_real_run_give_no_error_but_ours(store):
    assert sweep(store, 800, seed=5) > 100


@pytest.mark.parametrize(
    ("at", "new", "says"),
    [
        (("checkpoint", "loops", "fit_loop", "epoch_progress", "current", "processed"), "x", "the fit loop's state"),
        (("checkpoint", "loops", "fit_loop", "state_dict", "combined_loader"), 1.5, "combined_loader is 1.5, but"),
        (("checkpoint", "global_step"), None, "field checkpoint.global_step is None, but must be a whole number"),
        (("plain", "optimizers", 0, "param_groups", 0, "lr"), "x", "lr is 'x', but must be a number"),
        (("rng", "torch"), {"$": "tensor", "v": "plain/no"}, "cannot be decoded"),
        (("plain", "buffers"), [], "field plain.buffers is"),
        (("configured", "optimizers"), "x", "field configured.optimizers is 'x', but must be a list"),
    ],
)
def test_what_no_run_writes_is_passed_over_before_anything_is_loaded(store, at, new, says, caplog):
    store.restore()
    store.edit(("state", *at), new)
    store.start()
    assert f"cannot use checkpoint {store.directory}: {store.state}" in caplog.text
    assert says in caplog.text


def test_what_only_a_callback_can_tell_names_it_and_the_file(store):
    store.restore()
    callbacks = store.body["state"]["checkpoint"]["callbacks"]
    [key] = [name for name in callbacks if name.startswith("ModelCheckpoint")]
    store.edit(("state", "checkpoint", "callbacks", key), {"dirpath": 1})
    with pytest.raises(StoreError, match=f"{store.state} holds state of the callback ModelCheckpoint") as caught:
        store.start()
    assert isinstance(caught.value.__cause__, KeyError)


def test_one_failed_read_costs_no_step_and_no_start(store, monkeypatch, caplog):
    store.restore()
    made = []

    def opened(path, on_phase=None, **options):
        inner = LocalStorage(path, on_phase, **options)
        made.append(FaultyStorage(inner, 8, TimeoutError(110, "timed out"), verbs=["read"]))
        return made[-1]

    monkeypatch.setattr(driver_run, "open_storage", opened)
    trainer = store.start()
    assert made[0].failures == 1
    assert trainer.global_step == int(store.directory.removeprefix("step_").partition("_g")[0])
    assert "retrying in" in caplog.text


def test_access_reaches_every_file_of_a_run(tmp_path):
    run = replace(RUN, store=str(tmp_path / "store"), callback={"access": "group"})
    trainer, module, _ = build(run)
    trainer.fit(module, *loaders(run))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o640}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o750}
    assert len(modes) > 6


def test_a_damaged_step_named_by_hand_says_so(store):
    store.restore()
    store.edit(("state", "rng", "python"), [])
    trainer, module, _ = build(replace(LONGER, store=str(store.root)))
    with pytest.raises(DamagedError, match=f"{store.state}.*rng.python"):
        trainer.fit(module, *loaders(LONGER), ckpt_path=str(store.root / store.directory))
