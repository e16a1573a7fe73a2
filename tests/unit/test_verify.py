"""``verify_store`` names every damage, what it hits, and nothing else."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from moe_ckpt.errors import StoreError
from moe_ckpt.format.run_records import FINISHED_NAME, Finished
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import LocalStorage
from tests.support.store_builder import STACK, TinyRun, example
from tests.support.verifying import verify_store

STEPS = ("step_00000001", "step_00000002", "step_00000003")


@pytest.fixture
def run(tmp_path) -> TinyRun:
    return example(tmp_path)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_good_store_has_no_damage_and_progress_adds_up(run):
    told = []
    assert verify_store(LocalStorage(run.root), progress=lambda done, total: told.append((done, total))) == []
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_every_slice_is_read_once_and_attributed(run):
    """A flip in each slice in turn: one damage, named, affecting exactly the steps whose index has the slice."""
    storage = LocalStorage(run.root)
    reader = StoreReader(storage)
    users: dict[tuple[str, int], set[str]] = {}
    names: dict[tuple[str, int], tuple[str, int, int]] = {}
    for directory, manifest in run.manifests.items():
        index = reader.index(manifest)
        for stored in [*index.live, *index.side.values()]:
            users.setdefault((stored.path, stored.offset), set()).add(directory)
        for path, header in reader.headers(manifest).items():
            record = next(f for f in manifest.files if f.path == path)
            for entry in header.slices:
                names[path, record.header_nbytes + entry.begin] = (entry.name, record.step, record.rank)
    for (path, offset), (name, step, rank) in names.items():
        flip(run.root / path, offset)
        [damage] = verify_store(storage)
        assert (damage.path, damage.step, damage.rank) == (path, step, rank)
        assert name in damage.reason
        assert set(damage.affects) == users.get((path, offset), set())
        flip(run.root / path, offset)
    assert set(names) == set(users)


def test_superseded_bytes_affect_nobody(run):
    """Step 1's copy of expert 2 is used by steps 1 and 2; without their manifests, by nobody."""
    storage = LocalStorage(run.root)
    index = StoreReader(storage).index(run.manifests[STEPS[0]])
    stored = next(s for s in index.tensors[f"model/{STACK}"] if s.entry.operator == "expert/0/2")
    flip(run.root / stored.path, stored.offset)
    assert verify_store(storage)[0].affects == STEPS[:2]
    for step in STEPS[:2]:
        os.unlink(run.root / step / "MANIFEST.json")
    [damage] = verify_store(storage)
    assert (damage.path, damage.affects) == (stored.path, ())


def test_all_damages_are_found_at_once(run):
    flip(run.root / "store.json", 60)
    flip(run.root / STEPS[2] / "MANIFEST.json", 100)
    flip(run.root / STEPS[1] / "rank_00001_state.json", 100)
    os.unlink(run.root / STEPS[1] / "rank_00000_non_expert.safetensors")
    os.truncate(run.root / STEPS[0] / "rank_00001_expert.safetensors", 50)
    found = {damage.path: damage for damage in verify_store(LocalStorage(run.root))}
    assert list(found) == [
        "store.json",
        "step_00000001/rank_00001_expert.safetensors",
        "step_00000002/rank_00000_non_expert.safetensors",
        "step_00000003/MANIFEST.json",
    ]
    assert found["store.json"].affects == ()
    truncated = found["step_00000001/rank_00001_expert.safetensors"]
    assert (truncated.affects, truncated.step, truncated.rank) == (STEPS[:2], 1, 1)
    assert "has 50 bytes" in str(truncated)
    assert found["step_00000002/rank_00000_non_expert.safetensors"].affects == (STEPS[1],)


def test_a_damaged_state_file_is_named(run):
    flip(run.root / STEPS[1] / "rank_00001_state.json", 100)
    [damage] = verify_store(LocalStorage(run.root))
    assert (damage.path, damage.step, damage.rank) == ("step_00000002/rank_00001_state.json", 2, 1)
    assert damage.affects == (STEPS[1],)


def test_missing_parts_are_damage_too(run):
    manifest = run.manifests[STEPS[2]]
    run.builder.write_manifest(STEPS[2], dataclasses.replace(manifest, parts=manifest.parts[:-1]))
    assert "expert/0/3" in str(verify_store(LocalStorage(run.root))[0])
    run.builder.change_part(manifest, states=manifest.states[:1])
    assert "states are not of the ranks 0 to 1, one each" in str(verify_store(LocalStorage(run.root))[0])


def test_only_the_named_steps(run):
    flip(run.root / STEPS[2] / "MANIFEST.json", 100)
    assert verify_store(LocalStorage(run.root), STEPS[:2]) == []


def test_what_is_no_store(tmp_path):
    with pytest.raises(StoreError):
        verify_store(LocalStorage(tmp_path))


def test_a_damaged_end_of_the_run_is_named_and_costs_no_step(run):
    path = run.root / FINISHED_NAME
    path.write_bytes(Finished("run", 3, 0, "max_steps=3").encode())
    assert verify_store(LocalStorage(run.root)) == []
    flip(path, len(path.read_bytes()) // 2)
    [damage] = verify_store(LocalStorage(run.root))
    assert (damage.path, damage.affects) == (FINISHED_NAME, ())
    assert damage.reason
