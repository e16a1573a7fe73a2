"""Readers of a store whose run trains: what retention removes under them is not damaged, and they take newer steps."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import torch

from moe_ckpt import newest_step
from moe_ckpt.callbacks import checkpoint_io
from moe_ckpt.cli.main import main
from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.errors import DamagedError, NoCheckpointError, StepRemovedError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest, step_dir
from moe_ckpt.interop.dcp import MoEStorageReader
from moe_ckpt.interop.export import export
from moe_ckpt.interop.weights import load_weights
from moe_ckpt.ledger import retention
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.reading import reader
from moe_ckpt.reading.reader import StoreReader, newest_good, open_step
from moe_ckpt.reading.step_storage import MOST_LISTINGS
from moe_ckpt.reading.verify import verify_steps
from moe_ckpt.storage import LocalStorage
from tests.support.collecting import collect
from tests.support.store_builder import LiveState, TinyRun, example
from tests.support.verifying import verify_store
from tests.unit.engine_parts import ThreadRanks, run_threads

OLDEST, OLDER, NEWEST, COMING = (step_dir(step, 0) for step in range(1, 5))
KEEP_ONE = RetentionPolicy(keep_last=1)


@pytest.fixture(autouse=True)
def no_spares(monkeypatch):
    monkeypatch.setattr(retention, "_spares", lambda ordered: [])


FILES = ("MANIFEST.json", "PART.json", "rank_00001_expert.safetensors", "rank_00000_state.json")
"""Of the newest step, in the order in which they are read."""


class LiveStorage(LocalStorage):
    """A store that changes just before the file ``at`` is read for the first time.

    Args:
        root: Of the store.
        at: Path of the file.
        change: What happens then; returns the next ``at``, or None if nothing more happens.
    """

    def __init__(self, root: Path, at: str, change: Callable[[], str | None]) -> None:
        super().__init__(root)
        self.at: str | None = at
        self._change = change
        self._lock = threading.RLock()

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytearray:
        self._train(path)
        return super().read(path, offset, nbytes)

    def size(self, path: str) -> int:
        self._train(path)
        return super().size(path)

    def _train(self, path: str) -> None:
        with self._lock:
            if path == self.at:
                self.at = self._change()


def training(run: TinyRun, at: str, times: int = 1) -> LiveStorage:
    """The store of a run that commits a step, and removes the others, when the newest step's file ``at`` is read."""
    steps = iter(range(4, 4 + times))

    def change() -> str | None:
        directory = run.save(next(steps))
        collect(LocalStorage(run.root), KEEP_ONE)
        return f"{directory}/{at}" if directory != step_dir(3 + times, 0) else None

    return LiveStorage(run.root, f"{NEWEST}/{at}", change)


def remove(root: Path, directory: str, also: Collection[str] = ()) -> None:
    """Removes a step as retention does: its manifest first."""
    for name in (MANIFEST_NAME, *also):
        os.unlink(root / directory / name)


def open_as(monkeypatch: pytest.MonkeyPatch, storage: LiveStorage) -> LiveStorage:
    """Every reader of a path or URL gets this storage."""
    monkeypatch.setattr(reader, "open_storage", lambda path: storage)
    return storage


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return example(tmp_path / "store")


@pytest.fixture(params=FILES)
def live(run: TinyRun, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyRun]:
    """A run that removes the newest step when a reader comes to one of its files; each file in turn."""
    storage = open_as(monkeypatch, training(run, request.param))
    yield run
    assert storage.at is None, "nothing was removed"


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([str(each) for each in argv])
    out, err = capsys.readouterr()
    return code, out, err


# --- readers of a store ---


def test_verify_leaves_removed_steps_out(live, capsys):
    code, out, err = call(capsys, "verify", live.root)
    assert (code, err) == (0, "")
    assert "damaged" not in out.replace("undamaged", "")
    assert "1 step undamaged" in out  # the store was listed again, for no step was left of the first listing


@pytest.mark.parametrize("at", FILES)
def test_the_library_verifies_too(run, at):
    storage = training(run, at)
    assert verify_store(storage) == []
    assert storage.at is None


@pytest.mark.parametrize("name", [MANIFEST_NAME, "rank_00000_non_expert.safetensors", "rank_00000_state.json"])
def test_verify_counts_a_removed_step_neither_as_good_nor_as_bad(run, monkeypatch, capsys, name):
    """The newest step needs files of this one, which stay."""
    gone = {name} - {MANIFEST_NAME}
    open_as(monkeypatch, LiveStorage(run.root, f"{OLDER}/{name}", lambda: remove(run.root, OLDER, gone)))
    code, out, _ = call(capsys, "verify", run.root, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["damages"], facts["removed"]) == ([], [OLDER])
    assert facts["steps"] == facts["usable"] == [NEWEST, OLDEST]


def test_verify_says_which_step_was_removed(run, monkeypatch, capsys):
    name = "rank_00000_non_expert.safetensors"
    open_as(monkeypatch, LiveStorage(run.root, f"{OLDER}/{name}", lambda: remove(run.root, OLDER, [name])))
    code, out, _ = call(capsys, "verify", run.root)
    assert code == 0
    assert out == f"removed by retention while it was read, not checked: {OLDER}\n2 steps undamaged\n"


def test_inspect_leaves_a_removed_step_out(run, monkeypatch, capsys):
    path = f"{OLDER}/{MANIFEST_NAME}"
    open_as(monkeypatch, LiveStorage(run.root, path, lambda: remove(run.root, OLDER)))
    code, out, err = call(capsys, "inspect", run.root, "--json")
    steps = json.loads(out)["steps"]
    assert (code, err) == (0, "")
    assert [step["directory"] for step in steps] == [NEWEST, OLDEST]
    assert not any("damage" in step for step in steps)


@pytest.mark.parametrize("at", FILES[:2])
def test_inspect_shows_what_has_come_since(run, capsys, monkeypatch, at):
    open_as(monkeypatch, training(run, at))
    code, out, err = call(capsys, "inspect", run.root, "--json")
    assert (code, err) == (0, "")
    assert [step["directory"] for step in json.loads(out)["steps"]] == [COMING]


@pytest.mark.parametrize("to", ["safetensors", "dcp", "lightning"])
def test_export_takes_the_step_that_has_come_since(live, to, tmp_path, capsys):
    code, _, err = call(capsys, "export", live.root, "--to", to, "-o", tmp_path / "out")
    assert code == 0
    assert f"step 4 ({COMING})" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"], "nothing half-written is left"


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_export_begins_again_if_the_step_is_removed_between_two_tensors(run, to, tmp_path):
    taken: list[str] = []

    def progress(done: int, total: int) -> None:
        if COMING not in run.manifests:
            run.save(4)
            collect(LocalStorage(run.root), KEEP_ONE)

    export(run.root, to, tmp_path / "out", progress, chosen=lambda manifest: taken.append(manifest.directory))
    assert taken == [NEWEST, COMING]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_other_readers_of_a_store(live):
    assert open_step(live.root)[1].directory == COMING


@pytest.mark.parametrize("at", FILES[:2])
def test_newest_step(run, monkeypatch, at):
    open_as(monkeypatch, training(run, at))
    assert newest_step(run.root) == 4


def test_dcp_load_opens_the_newer_step(live):
    assert MoEStorageReader(live.root)._open().manifest.directory == COMING


def test_weights_come_from_the_newer_step(live):
    state = LiveState()
    assert load_weights(live.root, state, SoloCommunicator(), {}, strict=False).title.startswith("step 4 ")
    for tensor in state.tensors():
        assert torch.equal(tensor.local, live.views[COMING][tensor.key])


@pytest.mark.parametrize("times", [1, 3])
def test_ranks_load_the_same_newer_step(run, monkeypatch, times):
    """Only one rank reads the file that is missed, or none does: rank 0 looks, and all list again."""
    open_as(monkeypatch, training(run, FILES[2], times))
    wanted = f"step {3 + times} "
    states = [LiveState(rank, 2) for rank in range(2)]
    loaded = run_threads(
        ThreadRanks(2), lambda comm: load_weights(run.root, states[comm.rank], comm, {}, strict=False).title
    )
    assert all(title.startswith(wanted) for title in loaded)


def test_evaluation_loads_the_newer_step(live):
    def load(found: StoreReader, manifest: Manifest) -> str:
        reader.check_checkpoint(found, manifest)
        return manifest.directory

    assert checkpoint_io.load_named(live.root, load) == COMING


def test_ranks_that_evaluate_take_the_same_newer_step(run, monkeypatch):
    open_as(monkeypatch, training(run, FILES[2], 2))
    ranks, here = ThreadRanks(2), threading.local()
    monkeypatch.setattr(checkpoint_io, "make_communicator", lambda timeout_secs: here.comm)

    def load(found: StoreReader, manifest: Manifest) -> str:
        if here.comm.rank == 1:  # rank 0 misses nothing itself
            reader.check_checkpoint(found, manifest)
        return manifest.directory

    def body(comm) -> str:
        here.comm = comm
        return checkpoint_io.load_named(run.root, load)

    assert run_threads(ranks, body) == ["step_00000005"] * 2


def test_a_run_that_is_always_faster_ends_the_reader_with_advice(run, monkeypatch, capsys, tmp_path):
    storage = open_as(monkeypatch, training(run, FILES[3], 1000))
    with pytest.raises(StepRemovedError, match="raise keep_last"):
        newest_good(StoreReader(storage))
    assert max(manifest.step for manifest in run.manifests.values()) == 3 + MOST_LISTINGS
    code, _, err = call(capsys, "export", run.root, "--to", "dcp", "-o", tmp_path / "out")
    assert code == 2
    assert "was removed by retention while it was read" in err
    assert "To start over" not in err


# --- readers of a named step ---


COMMANDS = {("verify",): FILES, ("inspect",): FILES[:2], ("export", "--to", "dcp"): FILES}
"""Which of the files each reads: inspect reads no shards, and no states."""


@pytest.mark.parametrize(("argv", "at"), [(argv, at) for argv, files in COMMANDS.items() for at in files])
def test_a_named_step_that_is_removed_is_a_users_error(run, tmp_path, monkeypatch, capsys, at, argv):
    open_as(monkeypatch, training(run, at))
    monkeypatch.chdir(tmp_path)
    command, *options = argv
    code, out, err = call(capsys, command, run.root / NEWEST, *options)
    assert (code, out) == (2, "")
    assert f"{NEWEST} of {run.root} was removed by retention while it was read" in err
    assert "give the store" in err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("at", FILES)
def test_weights_of_a_named_step(run, monkeypatch, at):
    open_as(monkeypatch, training(run, at))
    with pytest.raises(StepRemovedError, match=NEWEST):
        load_weights(run.root / NEWEST, LiveState(), SoloCommunicator(), {}, strict=False)


@pytest.mark.parametrize("at", FILES)
def test_evaluation_of_a_named_step(run, monkeypatch, at):
    open_as(monkeypatch, training(run, at))
    with pytest.raises(StepRemovedError, match=NEWEST):
        checkpoint_io.load_named(run.root / NEWEST, reader.check_checkpoint)


# --- what is damaged stays so ---


@pytest.mark.parametrize("at", FILES[1:])
def test_a_missing_file_is_damage_while_a_manifest_names_it(run, capsys, at):
    os.unlink(run.root / NEWEST / at)
    [damage] = verify_store(LocalStorage(run.root))
    assert (damage.path, damage.reason, damage.affects) == (f"{NEWEST}/{at}", "is missing", (NEWEST,))
    assert call(capsys, "verify", run.root)[0] == 1
    assert call(capsys, "export", run.root / NEWEST, "--to", "dcp", "-o", run.root / "out")[0] == 1
    with pytest.raises(DamagedError, match="is missing"):
        checkpoint_io.load_named(run.root / NEWEST, reader.check_checkpoint)


def test_a_file_that_another_step_needs_is_damage_though_one_of_its_steps_was_removed(run):
    """Both steps need the shard of the first; only one of them is removed."""
    shard = "step_00000001/rank_00000_expert.safetensors"
    found = StoreReader(LocalStorage(run.root))
    steps = found.directories()
    manifests = [found.manifest(directory) for directory in steps]
    assert all(shard in manifest.paths for manifest in manifests)
    os.unlink(run.root / shard)
    for directory in steps[1:]:
        remove(run.root, directory)
    with pytest.raises(DamagedError, match="is missing"):
        found.headers(manifests[-1])
    remove(run.root, steps[0])
    with pytest.raises(StepRemovedError) as caught:
        found.headers(manifests[0])
    assert caught.value.directories == tuple(steps)


def test_a_step_without_a_manifest_is_what_it_was(run, capsys):
    os.unlink(run.root / NEWEST / MANIFEST_NAME)
    assert call(capsys, "verify", run.root / NEWEST)[0] == 2
    with pytest.raises(NoCheckpointError, match="was not committed"):
        open_step(run.root / NEWEST)
    with pytest.raises(DamagedError, match="is missing"):
        StoreReader(LocalStorage(run.root)).manifest(NEWEST)


def test_other_damage_of_a_step_that_is_then_removed_is_still_reported(run):
    storage = training(run, FILES[3])
    path = run.root / NEWEST / "rank_00001_non_expert.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = StoreReader(storage)
    outcome = verify_steps(found, found.directories())
    assert [damage.path for damage in outcome.damages] == [f"{NEWEST}/{path.name}"]
    assert NEWEST not in outcome.removed


def test_a_storage_that_does_not_answer_the_second_look_is_not_taken_for_a_removal(run):
    class Dead(LocalStorage):
        def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytearray:
            if nbytes == 1:
                raise OSError(5, "Input/output error")
            return super().read(path, offset, nbytes)

    found = StoreReader(Dead(run.root), patience_secs=0.0)
    [newest_of, *_] = found.directories()
    manifest = found.manifest(newest_of)
    remove(run.root, newest_of, [FILES[2]])
    with pytest.raises(DamagedError, match="is missing"):
        found.headers(manifest)
