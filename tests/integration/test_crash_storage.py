"""Storage that fails, fills up or lies: committed steps stay good, no wrong value is ever loaded, all is said."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ckpt import release_host_memory
from moe_ckpt.driver import run as driver_run
from moe_ckpt.errors import SaveFailedError, StoreError
from moe_ckpt.format.manifest import MANIFEST_NAME, PART_NAME, STORE_NAME, parse_step_dir
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.session import opening
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import FaultyStorage
from tests.integration.crash_run import Run, StopHere, build, final_state, loaders
from tests.integration.lives import (
    assert_store_sound,
    committed,
    differences,
    fast_directory,
    manifests,
    place,  # noqa: F401 - a fixture
    placed,
    temporaries,
)
from tests.integration.recount import Recount
from tests.support.deleting import delete_tree
from tests.support.tiny_moe import state_of

SHORT = Run(None, samples=12, epochs=1, callback={"when_busy": "wait"})
LONGER = replace(SHORT, epochs=3)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(opening, "StoreReader", partial(StoreReader, patience_secs=0.3))
    monkeypatch.setattr(driver_run, "resume_newest", partial(resume_newest, read_patience_secs=0.3))


def fit(run, **more):
    """One life in this process; (trainer, final state)."""
    trainer, module, _ = build(run, **more)
    trainer.fit(module, *loaders(run))
    return trainer, final_state(trainer, module)


def _failing(monkeypatch, fail_at, persistent):
    """All storage of callbacks made from now on fails at the given call; a list that the storage comes into."""
    made = []

    def opened(path, on_phase=None, **options):
        made.append(FaultyStorage(LocalStorage(path, on_phase), fail_at, persistent=persistent))
        return made[-1]

    monkeypatch.setattr(driver_run, "open_storage", opened)
    return made


def _every_call_fails(monkeypatch, directory, caplog, truth, persistent):
    number = 0
    while True:
        number += 1
        run = replace(SHORT, store=str(directory / f"store_{number}"))
        caplog.clear()
        with monkeypatch.context() as patch:
            made = _failing(patch, number, persistent)
            try:
                fit(run)
                raised = None
            except (StoreError, OSError) as error:
                raised = error
        if not made[0].failures:
            assert raised is None
            assert number > 30, "the loop has seen a whole run"
            return
        verb, path = made[0].calls[number - 1]
        _check_outcome(run, verb, path, raised, caplog)
        _, ended = fit(replace(LONGER, store=run.store))
        assert not list(differences(ended, truth)), f"after failure {number} ({verb} {path})"
        delete_tree(run.store)


def _check_outcome(run, verb, path, raised, caplog):
    """Either training went on, with a message, or it ended with an error that says what to look at."""
    if raised is not None:
        assert isinstance(raised, StoreError), f"{verb} {path}: {raised!r}"
        assert run.store in str(raised) or "step" in str(raised)
    assert temporaries(run.store) == []
    if os.path.isdir(run.store):
        assert_store_sound(run, ended=True)
    if verb == "write" and path.startswith("step_"):
        step = parse_step_dir(path.partition("/")[0])[0]
        said = caplog.text + str(raised)
        assert f"step {step} was not committed" in said
        assert path in said, "the file is named"
        assert "rank 0" in said or path.endswith((MANIFEST_NAME, PART_NAME)), "the rank is named"
        assert path.partition("/")[0] not in committed(run.store)


@pytest.fixture(scope="module")
def truth_of_longer():
    with _temporary() as directory:
        return fit(replace(LONGER, store=f"{directory}/store"))[1]


def _temporary():
    return tempfile.TemporaryDirectory(prefix="moe_ckpt_", dir=fast_directory())


def test_every_storage_call_fails_once(monkeypatch, place, caplog, truth_of_longer):  # noqa: F811
    caplog.set_level(logging.INFO, "moe_ckpt")
    _every_call_fails(monkeypatch, place, caplog, truth_of_longer, persistent=False)


@pytest.mark.slow
def test_the_disk_dies_at_every_storage_call(monkeypatch, place, caplog, truth_of_longer):  # noqa: F811
    caplog.set_level(logging.INFO, "moe_ckpt")
    _every_call_fails(monkeypatch, place, caplog, truth_of_longer, persistent=True)


def test_failures_are_counted_and_training_goes_on(monkeypatch, place):  # noqa: F811
    run = replace(SHORT, samples=40, store=str(place / "store"))
    monkeypatch.setattr(
        driver_run,
        "open_storage",
        lambda path, on_phase=None, **options: FaultyStorage(
            LocalStorage(path, on_phase), 9, persistent=True, verbs={"write"}
        ),
    )
    trainer, module, _ = build(run)
    with pytest.raises(SaveFailedError, match="step 10 "):
        trainer.fit(module, *loaders(run))
    assert trainer.global_step == 10
    assert trainer.callbacks[-1].last.failed_checkpoints in (7, 8), "those that ended before the last step did"
    assert committed(run.store) == ["step_00000001"]


# --- a full disk ---


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_costs_checkpoints_and_nothing_else(small_disk, caplog, truth_of_longer):
    run = replace(SHORT, store=str(small_disk / "store"))
    fit(run)
    before = committed(run.store)
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk)
    # The store's probe needs a few bytes; a checkpoint does not fit.
    ballast.write_bytes(bytes(free.f_bavail * free.f_bsize - 8192))
    longer = replace(LONGER, epochs=2, store=run.store)
    with pytest.raises(SaveFailedError, match="No space left"):
        fit(longer)
    assert re.search(r"step 4 was not committed.*rank 0.*step_00000004\S*safetensors.*No space left", caplog.text)
    assert committed(run.store) == before
    assert temporaries(run.store) == []
    assert_store_sound(run, ended=True)
    ballast.unlink()
    _, ended = fit(replace(LONGER, store=run.store))
    assert not list(differences(ended, truth_of_longer))
    assert max(manifest.step for manifest in manifests(run.store)) == 9


# --- damaged bytes ---


class RealStore:
    """A store that a MoC run wrote, and the truth of every step, kept in memory while it ran."""

    def __init__(self, directory: Path) -> None:
        # The run stops before its end, so that the newest checkpoint is a partial one.
        self.run = replace(placed(SHORT, directory), samples=64, epochs=2, policy=("moc", 1))
        self.root = Path(self.run.store)
        trainer, module, recorder = build(self.run, retention=RetentionPolicy(keep_last=3))
        self.truth: dict[int, dict[str, torch.Tensor]] = {}
        recorder.note = lambda rank, **what: self._note(trainer, module, what)
        with pytest.raises(StopHere):
            trainer.fit(module, *loaders(self.run))
        self.good = directory / "good"
        shutil.copytree(self.root, self.good)
        self.files = sorted(p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file())
        self.files.remove(".lock")
        self.manifests = manifests(self.root)

    def _note(self, trainer, module, what):
        if what["event"] == "batch":
            self.truth[what["step"]] = state_of(module, trainer.optimizers[0])
            if what["step"] == 14:
                raise StopHere("enough")

    def expected(self, step: int) -> dict[str, torch.Tensor]:
        """State of a checkpoint: experts as old as they must be, all else of this very step."""
        versions = Recount(2, 4).expected_versions(step)
        state = {key: value.clone() for key, value in self.truth[step].items()}
        names = list(build(replace(self.run, store=None))[1].named_parameters())
        stacks = {f"optim.{i}": name for i, (name, _) in enumerate(names) if ".experts." in name}
        for key, value in state.items():
            name = key if ".experts." in key else stacks.get(key.rpartition(".")[0])
            if name is None or value.dim() == 0:
                continue
            layer = int(name.split(".")[1])
            for expert in range(4):
                value[expert] = self.truth[versions[layer, expert]][key][expert]
        return state

    def resume(self) -> tuple[int | None, dict[str, torch.Tensor]]:
        """(step, state) that a fresh run comes back with, from storage alone."""
        release_host_memory()  # of the life before, which would serve what is damaged here
        trainer, module, recorder = build(self.run)
        held = {}

        def note(rank, **what):
            held.update(state_of(module, trainer.optimizers[0]), step=trainer.callbacks[-1].restored_step)
            raise StopHere("seen")

        recorder.note = note
        with pytest.raises(StopHere):
            trainer.fit(module, *loaders(self.run))
        return held.pop("step"), held

    def repair(self) -> None:
        delete_tree(self.root)
        shutil.copytree(self.good, self.root)


@pytest.fixture(scope="module")
def real_store():
    with _temporary() as directory:
        yield RealStore(Path(directory))


def _check_flip(store: RealStore, caplog, file: str, place_in_file: float, mask: int) -> None:
    path = store.root / file
    raw = bytearray(path.read_bytes())
    offset = int(place_in_file * len(raw))
    raw[offset] ^= mask
    path.write_bytes(raw)
    caplog.clear()
    try:
        step, state = store.resume()
    finally:
        store.repair()
    where = f"{file} byte {offset} xor {mask}"
    untouched = [m.step for m in store.manifests if file not in m.paths | {f"{m.directory}/{MANIFEST_NAME}"}]
    assert step >= max(untouched), f"{where}: came back to {step}"
    assert not list(differences(state, store.expected(step))), f"{where}: wrong values"
    if step < store.manifests[0].step:
        said = caplog.text
        of_step = parse_step_dir(file.partition("/")[0])[0]
        assert file in said, where
        assert re.search(rf"\bstep {of_step}\b", said), where
        assert re.search(r"\brank 0\b", said), where
    if file == STORE_NAME:
        assert STORE_NAME in caplog.text, where


def test_an_undamaged_store_comes_back_at_its_newest_step(real_store):
    step, state = real_store.resume()
    real_store.repair()
    assert step == real_store.manifests[0].step >= 13
    assert not list(differences(state, real_store.expected(step)))
    assert len(real_store.manifests) >= 4


@pytest.fixture
def warnings_only(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


FLIPS = {
    "where": st.floats(0, 1, exclude_max=True),
    "file": st.floats(0, 1, exclude_max=True),
    "mask": st.integers(1, 255),
}
BETWEEN_EXAMPLES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=60, suppress_health_check=BETWEEN_EXAMPLES)
@given(**FLIPS)
def test_a_flipped_byte_never_gives_a_wrong_value(real_store, warnings_only, file, where, mask):
    _check_flip(real_store, warnings_only, real_store.files[int(file * len(real_store.files))], where, mask)


@pytest.mark.slow
@settings(max_examples=1500, suppress_health_check=BETWEEN_EXAMPLES)
@given(**FLIPS)
def test_many_flipped_bytes_never_give_a_wrong_value(real_store, warnings_only, file, where, mask):
    _check_flip(real_store, warnings_only, real_store.files[int(file * len(real_store.files))], where, mask)


def test_a_flip_in_every_file_that_the_newest_checkpoint_needs(real_store, warnings_only):
    newest = real_store.manifests[0]
    rng = random.Random(5)
    for file in sorted(newest.paths | {f"{newest.directory}/{MANIFEST_NAME}"}):
        _check_flip(real_store, warnings_only, file, rng.random(), 1 << rng.randrange(8))


@pytest.mark.parametrize("what", ["truncated", "gone", "zeroed"])
def test_other_damage(what, real_store, warnings_only):
    newest = real_store.manifests[0]
    path = real_store.root / newest.directory / "rank_00000_non_expert.safetensors"
    if what == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif what == "gone":
        path.unlink()
    else:
        nbytes = path.stat().st_size
        os.truncate(path, nbytes // 2)
        os.truncate(path, nbytes)
    try:
        step, state = real_store.resume()
    finally:
        real_store.repair()
    assert step == real_store.manifests[1].step
    assert not list(differences(state, real_store.expected(step)))
    assert f"{newest.directory}/rank_00000_non_expert.safetensors, step {newest.step}, rank 0" in warnings_only.text
