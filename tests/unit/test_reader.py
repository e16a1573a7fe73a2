"""Opening stores: what is returned, what is refused, and that no damage ever becomes a wrong value."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import tempfile
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.errors import (
    CoverageError,
    DamagedError,
    FormatVersionError,
    NoCheckpointError,
    StoreError,
)
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.format.sealed import seal, unseal
from moe_ckpt.reading.reader import StoreReader, check_checkpoint, choose, newest_good, open_step
from moe_ckpt.storage import LocalStorage
from tests.support.store_builder import StoreBuilder, TinyRun, example
from tests.support.verifying import verify_store


def reader_of(root: Path) -> StoreReader:
    return StoreReader(LocalStorage(root))


def load(reader: StoreReader, manifest: Manifest) -> dict[str, torch.Tensor]:
    reader.prove(manifest)
    return {key: reader.tensor(manifest, key) for key in reader.index(manifest).tensors}


def expert_shard(run: TinyRun) -> str:
    """The shard that step 3 wrote for expert 2: it holds that expert's slices and nothing else."""
    path = "step_00000003/rank_00001_expert.safetensors"
    assert path in run.manifests["step_00000003"].paths
    return path


def same(left: object, right: object) -> bool:
    """Equality of trees that hold tensors."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_gives_back_its_whole_view(tmp_path, sharded, world_size):
    run = example(tmp_path, sharded=sharded, world_size=world_size)
    reader = reader_of(tmp_path)
    assert reader.directories() == ["step_00000003", "step_00000002", "step_00000001"]
    for directory, view in run.views.items():
        manifest = reader.manifest(directory)
        check_checkpoint(reader, manifest)
        assert same(load(reader, manifest), view)
        for rank, state in enumerate(run.states[directory]):
            assert same(reader.state(manifest, rank), state)


def test_superseded_slices_are_not_in_the_index(tmp_path):
    example(tmp_path)
    reader = reader_of(tmp_path)
    index = reader.index(reader.manifest("step_00000003"))
    stack = index.tensors["model/blocks.0.moe.experts"]
    assert [s.path.split("/")[0] for s in stack] == [f"step_0000000{n}" for n in (2, 2, 3, 1)]


def test_the_newest_generation_comes_first(tmp_path):
    run = example(tmp_path)
    run.save(2, generation=1)
    (tmp_path / "step_00000009_g1").mkdir()
    (tmp_path / "notes").mkdir()
    assert reader_of(tmp_path).directories()[:2] == ["step_00000002_g1", "step_00000003"]


def test_a_step_link_that_leads_out_of_the_store_is_passed_over_with_one_warning(tmp_path, caplog):
    example(tmp_path / "store")
    example(tmp_path / "other")
    os.symlink(tmp_path / "other" / "step_00000003", tmp_path / "store" / "step_00000009")
    for _ in range(2):
        reader = reader_of(tmp_path / "store")
        assert reader.directories() == ["step_00000003", "step_00000002", "step_00000001"]
        assert newest_good(reader).directory == "step_00000003"
    assert verify_store(LocalStorage(tmp_path / "store")) == []
    [warning] = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert f"{tmp_path}/store/step_00000009 is skipped: it leads out of the store" in warning


def test_newest_good_falls_back_and_says_what_was_wrong(tmp_path, caplog):
    run = example(tmp_path)
    path = expert_shard(run)
    raw = bytearray((tmp_path / path).read_bytes())
    raw[20] ^= 1
    (tmp_path / path).write_bytes(raw)
    reader = reader_of(tmp_path)
    with caplog.at_level(logging.WARNING, "moe_ckpt"):
        manifest = newest_good(reader)
    assert manifest is not None
    assert manifest.directory == "step_00000002"
    assert "checkpoint step_00000003 is skipped" in caplog.text
    with pytest.raises(DamagedError) as caught:
        check_checkpoint(reader, reader.manifest("step_00000003"))
    assert (caught.value.path, caught.value.step, caught.value.rank) == (path, 3, 1)
    assert path in caplog.text
    assert "step 3" in caplog.text
    assert "rank 1" in caplog.text


def test_a_shallow_check_leaves_slices_to_the_restore(tmp_path):
    run = example(tmp_path)
    path = expert_shard(run)
    raw = bytearray((tmp_path / path).read_bytes())
    raw[-1] ^= 1
    (tmp_path / path).write_bytes(raw)
    reader = reader_of(tmp_path)
    assert newest_good(reader).directory == "step_00000003"
    with pytest.raises(DamagedError, match="checksum mismatch"):
        check_checkpoint(reader, reader.manifest("step_00000003"))


def test_an_empty_store_has_no_newest_and_a_ruined_one_is_an_error(tmp_path):
    StoreBuilder(tmp_path / "empty")
    assert newest_good(reader_of(tmp_path / "empty")) is None
    run = TinyRun(tmp_path / "ruined")
    directory = run.save(1)
    (tmp_path / "ruined" / directory / MANIFEST_NAME).write_bytes(b"")
    with pytest.raises(NoCheckpointError, match="move the directory away"):
        newest_good(reader_of(tmp_path / "ruined"))


def test_a_storage_failure_is_no_damage(tmp_path):
    example(tmp_path)

    class Refusing(LocalStorage):
        def read(self, path, offset=0, nbytes=None):
            if path.endswith(".safetensors"):
                raise PermissionError(13, "denied", path)
            return super().read(path, offset, nbytes)

    with pytest.raises(PermissionError):
        newest_good(StoreReader(Refusing(tmp_path)))


def test_a_damaged_store_file_is_inferred_from_the_manifests(tmp_path, caplog):
    example(tmp_path)
    (tmp_path / "store.json").write_bytes(b"\0" * 100)
    reader = reader_of(tmp_path)
    identity = reader.identity()
    assert (identity.run_id, identity.fingerprint) == ("run-a", "f" * 32)
    assert reader.identity_damage.path == "store.json"
    assert "store.json" in caplog.text
    os.unlink(tmp_path / "store.json")
    assert reader_of(tmp_path).identity().run_id == "run-a"


def test_stores_of_others_are_refused(tmp_path):
    with pytest.raises(StoreError, match=r"no moe_ckpt store"):
        reader_of(tmp_path).identity()
    (tmp_path / "store.json").write_bytes(seal({"kind": "other", "format_version": 1}))
    with pytest.raises(StoreError, match="other"):
        reader_of(tmp_path).identity()
    body = {"kind": "moe_ckpt.store", "format_version": 99, "run_id": "r", "fingerprint": "f", "created_unix_secs": 0}
    (tmp_path / "store.json").write_bytes(seal(body))
    with pytest.raises(FormatVersionError, match="99"):
        reader_of(tmp_path).identity()


def test_a_manifest_of_another_format_version_is_not_skipped(tmp_path):
    run = example(tmp_path)
    path = tmp_path / "step_00000003" / MANIFEST_NAME
    body = unseal(path.read_bytes(), "") | {"format_version": 99}
    path.write_bytes(seal(body))
    with pytest.raises(FormatVersionError):
        newest_good(reader_of(run.root))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "run-b"}, "run-b"),
        ({"step": 4}, "wrong place"),
        ({"generation": 5}, "wrong place"),
    ],
)
def test_a_manifest_in_the_wrong_place_is_refused(tmp_path, changes, reason):
    run = example(tmp_path)
    manifest = dataclasses.replace(run.manifests["step_00000003"], **changes)
    own, *older = manifest.parts
    own = dataclasses.replace(own, directory=manifest.directory)
    run.builder.write_manifest("step_00000003", dataclasses.replace(manifest, parts=(own, *older)))
    with pytest.raises(DamagedError, match=reason):
        reader_of(tmp_path).manifest("step_00000003")
    assert newest_good(reader_of(tmp_path)).directory == "step_00000002"


@pytest.mark.parametrize("header_nbytes", [1 << 40, (1 << 28) + 16, 0, 7])
def test_absurd_header_sizes_are_refused_without_allocating(tmp_path, header_nbytes):
    run = example(tmp_path)
    first, *others = run.builder.parts[0][1].files
    changed = dataclasses.replace(first, header_nbytes=header_nbytes)
    run.builder.change_part(run.manifests["step_00000003"], files=(changed, *others))
    reader = reader_of(tmp_path)
    tracemalloc.start()
    with pytest.raises(DamagedError, match="cannot have a header"):
        reader.headers(reader.manifest("step_00000003"))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_huge_length_inside_the_shard_is_refused_without_allocating(tmp_path):
    run = example(tmp_path)
    path = run.manifests["step_00000003"].files[0].path
    raw = (tmp_path / path).read_bytes()
    (tmp_path / path).write_bytes((1 << 62).to_bytes(8, "little") + raw[8:])
    reader = reader_of(tmp_path)
    manifest = reader.manifest("step_00000003")
    tracemalloc.start()
    with pytest.raises(DamagedError, match="header"):
        reader.headers(manifest)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_header_that_is_valid_but_not_the_written_one_is_refused(tmp_path):
    """Every slice's bytes still match their checksums, so only the header's own checksum can tell."""
    run = example(tmp_path)
    path = tmp_path / expert_shard(run)
    raw = path.read_bytes()
    assert b'"dtype":"F32"' in raw
    path.write_bytes(raw.replace(b'"dtype":"F32"', b'"dtype":"I32"'))
    with pytest.raises(DamagedError, match="checksum mismatch in the header"):
        reader_of(tmp_path).index(run.manifests["step_00000003"])
    assert newest_good(reader_of(tmp_path)).directory == "step_00000002"


def test_a_state_that_is_sealed_but_not_the_written_one_is_refused(tmp_path):
    run = example(tmp_path)
    path = tmp_path / "step_00000003" / "rank_00000_state.json"
    raw = path.read_bytes()
    body = unseal(raw, "")
    body["state"]["checkpoint"]["global_step"] = 4
    path.write_bytes(seal(body))
    assert len(path.read_bytes()) == len(raw)
    reader = reader_of(tmp_path)
    with pytest.raises(DamagedError, match="checksum mismatch"):
        reader.state(run.manifests["step_00000003"], 0)


def test_a_part_that_is_sealed_but_not_the_written_one_is_refused(tmp_path):
    example(tmp_path)
    path = tmp_path / "step_00000002" / "PART.json"
    raw = path.read_bytes()
    body = unseal(raw, "")
    body["operators"].reverse()
    path.write_bytes(seal(body))
    assert len(path.read_bytes()) == len(raw)
    assert path.read_bytes() != raw
    for step in (2, 3):
        with pytest.raises(DamagedError, match=r"^step_00000002/PART\.json, step 2: checksum mismatch"):
            reader_of(tmp_path).manifest(f"step_0000000{step}")
    path.unlink()
    with pytest.raises(DamagedError, match=r"^step_00000002/PART\.json, step 2: is missing"):
        reader_of(tmp_path).manifest("step_00000003")
    assert newest_good(reader_of(tmp_path)).directory == "step_00000001"


def test_missing_operators_and_rows_are_named(tmp_path):
    run = TinyRun(tmp_path)
    run.builder.layers = (dataclasses.replace(run.builder.layers[0], experts=5),)
    reader = reader_of(tmp_path)
    with pytest.raises(CoverageError, match="expert/0/4"):
        reader.prove(reader.manifest(run.save(1)))


@pytest.mark.parametrize("key", ["model/blocks.0.moe.experts", "optim/0/blocks.0.moe.experts/exp_avg"])
def test_a_missing_row_is_named(tmp_path, key):
    run = TinyRun(tmp_path)
    commit = run.builder.commit
    run.builder.commit = lambda step, blocks, *rest: commit(
        step, [b for b in blocks if b.key != key or b.offsets[0] != 1], *rest
    )
    reader = reader_of(tmp_path)
    with pytest.raises(CoverageError, match=rf"{key} at \[0, 0, 0\]: 6 of 24 elements are missing"):
        reader.prove(reader.manifest(run.save(1)))


def test_state_of_a_rank_that_did_not_exist(tmp_path):
    example(tmp_path)
    reader = reader_of(tmp_path)
    with pytest.raises(CoverageError, match="no state of rank 2"):
        reader.state(reader.manifest("step_00000003"), 2)


def test_open_step_takes_a_directory_a_link_a_manifest_or_a_store(tmp_path):
    example(tmp_path / "store")
    os.symlink("store/step_00000002", tmp_path / "last")
    for path, step in [
        ("store/step_00000001", 1),
        ("store/step_00000001/", 1),
        ("store/step_00000003/MANIFEST.json", 3),
        ("last", 2),
        ("store", 3),
    ]:
        assert open_step(f"{tmp_path}/{path}")[1].step == step
    assert open_step(f"file://{tmp_path}/store/step_00000002")[1].step == 2


def test_open_step_says_what_is_there_instead(tmp_path):
    example(tmp_path / "store")
    (tmp_path / "store" / "step_00000004").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "last.ckpt").touch()
    for path, message in [
        ("store/step_00000004", "was not committed.*committed there: step_00000003"),
        ("store/step_00000007", "does not exist.*step_00000003"),
        ("other", "no step among its 1 entry"),
        ("nowhere/at/all", "nothing"),
        ("other/last.ckpt", "nothing, or it is a file"),
    ]:
        with pytest.raises(NoCheckpointError, match=message):
            open_step(tmp_path / path)


# Damage. The store of one example is built once; every case works on a copy of it.


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine")
    return example(root)


def assert_never_wrong(run: TinyRun, root: Path) -> str | None:
    """Load the newest good checkpoint: it must be one of those committed, to the last bit."""
    reader = reader_of(root)
    try:
        chosen, _ = choose(reader, partial(check_checkpoint, reader))
    except StoreError:
        return None
    if not chosen:
        return None
    [manifest] = chosen
    assert same(load(reader, manifest), run.views[manifest.directory])
    for rank, state in enumerate(run.states[manifest.directory]):
        assert same(reader.state(manifest, rank), state)
    return manifest.directory


def files_of(run: TinyRun) -> list[str]:
    return sorted(str(p.relative_to(run.root)) for p in run.root.rglob("*") if p.is_file())


class Broken:
    """A copy of the store in which one file is another."""

    def __init__(self, run: TinyRun) -> None:
        self.run = run
        self._directory = tempfile.TemporaryDirectory()
        self.root = Path(self._directory.name) / "store"

    def __enter__(self) -> Path:
        shutil.copytree(self.run.root, self.root)
        return self.root

    def __exit__(self, *exc: object) -> None:
        self._directory.cleanup()


def needed_by(run: TinyRun, name: str) -> set[str]:
    """Directories whose checkpoint reads the file."""
    if name == "store.json":
        return set()
    found = {directory for directory, m in run.manifests.items() if name in m.paths}
    return found | ({name.split("/")[0]} if name.endswith(MANIFEST_NAME) else set())


def expected_after(run: TinyRun, damaged: set[str]) -> str | None:
    good = sorted(set(run.views) - damaged)
    return good[-1] if good else None


def data_begin(name: str, raw: bytes) -> int:
    """Where a shard's tensors begin: in these tiny files its header would draw nearly all flips."""
    return 8 + int.from_bytes(raw[:8], "little") if name.endswith(".safetensors") else 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_one_flipped_byte_is_never_loaded(pristine, data):
    name = data.draw(st.sampled_from(files_of(pristine)))
    raw = bytearray((pristine.root / name).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1) | st.integers(data_begin(name, raw), len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with Broken(pristine) as root:
        (root / name).write_bytes(raw)
        got = assert_never_wrong(pristine, root)
    # Only bytes of superseded slices may go unnoticed; then the newest checkpoint is the answer.
    assert got in (expected_after(pristine, needed_by(pristine, name)), "step_00000003") or is_superseded(got, name)


def is_superseded(got: str | None, name: str) -> bool:
    return got == "step_00000002" and name.startswith("step_00000001/") and "expert" in name


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_truncation_and_zero_tails_are_never_loaded(pristine, data):
    name = data.draw(st.sampled_from(files_of(pristine)))
    raw = (pristine.root / name).read_bytes()
    length = data.draw(st.integers(0, len(raw) - 1))
    zeros = data.draw(st.booleans())
    new = raw[:length] + (b"\0" * (len(raw) - length) if zeros else b"")
    with Broken(pristine) as root:
        (root / name).write_bytes(new)
        got = assert_never_wrong(pristine, root)
    if not zeros and name != "store.json":
        assert got == expected_after(pristine, needed_by(pristine, name))


def test_a_missing_file_costs_exactly_the_checkpoints_that_need_it(pristine):
    for name in files_of(pristine):
        with Broken(pristine) as root:
            os.unlink(root / name)
            assert assert_never_wrong(pristine, root) == expected_after(pristine, needed_by(pristine, name)), name


def test_swapped_files_are_found(pristine):
    names = [name for name in files_of(pristine) if name != "store.json"]
    for first in names:
        for second in names:
            same_name = first.split("/")[1] == second.split("/")[1] or first.split("/")[0] == second.split("/")[0]
            if first >= second or not same_name:
                continue
            with Broken(pristine) as root:
                os.rename(root / first, root / "kept")
                os.rename(root / second, root / first)
                os.rename(root / "kept", root / second)
                got = assert_never_wrong(pristine, root)
            damaged = needed_by(pristine, first) | needed_by(pristine, second)
            assert got == expected_after(pristine, damaged), (first, second)
