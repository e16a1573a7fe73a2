"""Garbage collection on real directories with real manifests."""

import errno
import json
import os
import signal
import subprocess
from dataclasses import replace

import pytest

from moe_ckpt.commit.keeping import StoreContents
from moe_ckpt.format.manifest import (
    MANIFEST_NAME,
    PART_NAME,
    FileRecord,
    LayerRecord,
    Manifest,
    ModelRecord,
    StateRecord,
    encode_part,
    file_row,
    group_of,
    group_path,
    parse_step_dir,
    shard_path,
    state_path,
    state_row,
    step_dir,
)
from moe_ckpt.format.sealed import Fragment, seal, unseal
from moe_ckpt.ledger import retention
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.run.documents import read_manifest
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import FaultyStorage
from tests.support import warm
from tests.support.collecting import clean_start, collect

NOW = 1_000_000.0
LAST = RetentionPolicy(keep_last=1)


@pytest.fixture(autouse=True)
def no_spares(monkeypatch):
    monkeypatch.setattr(retention, "_spares", lambda ordered: [])


def commit(storage, step, experts_from=(), generation=0, write_manifest=True, parent=None):
    """A checkpoint of ``step`` whose view also needs the expert shards of the steps ``experts_from``."""
    directory = step_dir(step, generation)
    own = shards_of(directory)
    for path in own:
        storage.write(path, [b"data"])
    storage.write(state_path(directory, 0), [b"state"])
    manifest = Manifest(
        run_id="run",
        step=step,
        generation=generation,
        world_size=1,
        index=step,
        created_unix_secs=NOW + step,
        model=ModelRecord("f", (LayerRecord("moe", 64),)),
        files=(),
        operators={},
        states=(),
        parent=parent,
    )
    part, raw = part_of(step, generation)
    storage.write(part.path, [raw])
    older = (part_of(s, 0)[0] for s in sorted(experts_from, reverse=True))
    raw = replace(manifest, parts=(part, *older)).encode()
    if write_manifest:
        storage.write(f"{directory}/{MANIFEST_NAME}", [raw])
    return manifest


def shards_of(directory):
    return [shard_path(directory, 0, kind) for kind in ("expert", "non_expert")]


def part_of(step, generation):
    """Holds an expert of its own, which no later step saves again."""
    directory = step_dir(step, generation)
    files = b"".join(file_row(FileRecord(path, 4, 2, "d", step, 0)) for path in shards_of(directory))
    state = state_row(StateRecord(state_path(directory, 0), 5, "d", 0))
    operators = Fragment([f"expert/0/{step}", "non_expert/rest"])
    return encode_part("run", step, generation, 1, files=files, states=state, operators=operators)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


def tree(storage):
    """Names by directory, less the parts: they must be where there are other files of this format."""
    found = {name: storage.list(name) for name in storage.list()}
    for directory, names in found.items():
        own = [name for name in names if group_of(name) and name != MANIFEST_NAME]
        assert (PART_NAME in own) == (bool(own) and parse_step_dir(directory) is not None)
        found[directory] = [name for name in names if name != PART_NAME]
    return found


WHOLE = ["MANIFEST.json", "rank_00000_expert.safetensors", "rank_00000_non_expert.safetensors", "rank_00000_state.json"]


def test_what_nobody_names_goes_and_shared_files_stay(storage):
    for step, others in ((1, ()), (2, (1,)), (3, (1, 2)), (4, (1, 3))):
        commit(storage, step, others)
    report = collect(storage, LAST)
    assert tree(storage) == {
        "step_00000001": ["rank_00000_expert.safetensors"],
        "step_00000003": ["rank_00000_expert.safetensors"],
        "step_00000004": WHOLE,
    }
    assert report.retained == ("step_00000004",)
    assert report.damaged == ()
    assert len(report.deleted) == 11, "three parts stay, and one goes"
    assert [path for path in report.deleted if path.endswith(MANIFEST_NAME)] == list(report.deleted[:3])
    commit(storage, 5, ())
    collect(storage, LAST)
    assert tree(storage) == {"step_00000005": WHOLE}


def test_an_empty_or_uncommitted_store_is_left_alone(storage):
    assert collect(storage, LAST).deleted == ()
    commit(storage, 1, write_manifest=False)
    assert collect(storage, LAST).deleted == ()
    assert tree(storage)["step_00000001"] == WHOLE[1:]


def test_a_faster_ranks_next_step_is_left_alone_unless_abandoned(storage):
    """Rank 0 collects after step 2 while another rank already writes step 3."""
    for step in (1, 2):
        commit(storage, step)
    commit(storage, 3, write_manifest=False)
    collect(storage, LAST)
    assert tree(storage) == {"step_00000002": WHOLE, "step_00000003": WHOLE[1:]}
    collect(storage, LAST, abandoned={"step_00000003"})
    assert tree(storage) == {"step_00000002": WHOLE}


def test_leftovers_of_failed_saves_go_with_the_next_commit(storage):
    commit(storage, 1)
    commit(storage, 2, write_manifest=False)
    storage.write("step_00000002/.f.1.0123abcd.tmp", [b""])
    commit(storage, 3)
    collect(storage, RetentionPolicy(keep_last=5))
    assert tree(storage) == {"step_00000001": WHOLE, "step_00000003": WHOLE}


def test_other_peoples_files_are_never_touched(storage):
    commit(storage, 1)
    storage.write("step_00000001/notes.txt", [b"mine"])
    storage.write("last.ckpt", [b"mine"])
    storage.write("backup_step_00000001/MANIFEST.json", [b"mine"])
    storage.write("step_00000001_old/rank_00000_state.json", [b"mine"])
    storage.write("store.json", [b"{}"])
    commit(storage, 2)
    collect(storage, LAST)
    clean_start(storage)
    assert storage.list() == [
        "backup_step_00000001", "last.ckpt", "step_00000001", "step_00000001_old", "step_00000002", "store.json",
    ]  # fmt: skip
    assert storage.list("step_00000001") == ["notes.txt"]
    assert storage.list("step_00000001_old") == ["rank_00000_state.json"]


def _damage(storage, step, change):
    path = f"{storage.root}/{step_dir(step, 0)}/{MANIFEST_NAME}"
    with open(path, "rb") as file:
        raw = file.read()
    with open(path, "wb") as file:
        file.write(change(raw))


@pytest.mark.parametrize("change", [lambda raw: raw[:-9], lambda raw: b"", lambda raw: raw.replace(b"run", b"nur", 1)])
def test_a_damaged_checkpoint_is_reported_and_left_as_it_is(storage, change):
    for step in (1, 2, 3):
        commit(storage, step)
    _damage(storage, 2, change)
    for report in (clean_start(storage), collect(storage, LAST)):
        assert report.damaged == ("step_00000002",)
    assert tree(storage) == dict.fromkeys(("step_00000001", "step_00000002", "step_00000003"), WHOLE)


def test_when_the_newest_is_damaged_the_newest_readable_one_stays(storage):
    for step in (1, 2, 3):
        commit(storage, step)
    _damage(storage, 3, lambda raw: raw[:-9])
    report = collect(storage, LAST)
    assert report.retained == ("step_00000002",)
    assert tree(storage) == dict.fromkeys(("step_00000001", "step_00000002", "step_00000003"), WHOLE)


@pytest.mark.parametrize("change", [lambda raw: b"", lambda raw: raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]])
@pytest.mark.parametrize("damaged", [(1, 3), (3,)], ids=["all", "newest"])
def test_nothing_goes_that_a_manifest_may_name_until_it_can_be_read_again(storage, damaged, change):
    """Step 2 has no manifest: step 3 needs something of it, as of a window's or an expert's earlier step."""
    commit(storage, 1)
    commit(storage, 2, write_manifest=False)
    commit(storage, 3, (2,))
    before = tree(storage)
    sound = {step: storage.read(f"{step_dir(step, 0)}/{MANIFEST_NAME}") for step in damaged}
    for step in damaged:
        _damage(storage, step, change)
    assert clean_start(storage).deleted == ()
    assert tree(storage) == before
    commit(storage, 4, generation=1)
    commit(storage, 5, generation=1, write_manifest=False)
    commit(storage, 6, generation=1)
    for _ in range(2):
        assert collect(storage, LAST).damaged == tuple(step_dir(step, 0) for step in damaged)
        assert tree(storage) == before | {"step_00000006_g1": WHOLE}
    for step, raw in sound.items():
        _damage(storage, step, lambda _, raw=raw: raw)
    collect(storage, LAST)
    assert tree(storage) == {"step_00000006_g1": WHOLE}


@pytest.mark.parametrize("is_damaged", [False, True], ids=["sound", "damaged_itself"])
def test_what_a_run_came_back_to_stays_beside_what_it_passed_over(storage, is_damaged):
    """Step 11 has a damaged shard, which no manifest tells; later the manifest of step 10 is damaged too."""
    for step in (8, 9, 10, 11):
        commit(storage, step)
    commit(storage, 11, generation=1, parent=step_dir(10, 0))
    stay = (step_dir(10, 0), step_dir(11, 0), step_dir(11, 1))
    if is_damaged:
        _damage(storage, 10, lambda raw: raw[:-9])
        stay = (step_dir(9, 0), *stay[1:])
    assert collect(storage, RetentionPolicy()).retained == stay


def test_a_link_that_leads_out_of_the_store_is_left_alone(storage, tmp_path_factory, caplog):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "rank_00000_expert.safetensors").write_bytes(b"another run's")
    commit(storage, 1)
    commit(storage, 2)
    os.symlink(outside, f"{storage.root}/step_00000009")
    assert clean_start(storage).retained == ("step_00000001", "step_00000002")
    assert collect(storage, LAST).retained == ("step_00000002",)
    assert os.listdir(outside) == ["rank_00000_expert.safetensors"]
    assert sum("step_00000009 is skipped" in record.getMessage() for record in caplog.records) == 1


def test_a_checkpoint_stays_as_long_as_a_file_says_so(storage):
    """A start could not read step 3, which may be good, and a person wants to keep step 4 of the next life."""
    for step in (1, 2):
        commit(storage, step)
    commit(storage, 3, experts_from=(1,))
    storage.write("step_00000003/KEEP", [b""])
    contents = StoreContents(storage)
    contents.read()
    for step in (3, 4, 5, 6):
        commit(storage, step, generation=1, parent="step_00000002")
    contents.read()
    storage.write("step_00000004_g1/KEEP", [b""])  # while the run goes on
    for _ in range(2):
        contents.collect(LAST)
        assert tree(storage).keys() == {"step_00000001", "step_00000003", "step_00000004_g1", "step_00000006_g1"}
        assert tree(storage)["step_00000003"] == ["KEEP", *WHOLE]
        assert tree(storage)["step_00000001"] == ["rank_00000_expert.safetensors"], "which step 3 needs"
    storage.delete("step_00000003/KEEP")
    clean_start(storage)
    collect(storage, LAST)
    assert tree(storage).keys() == {"step_00000004_g1", "step_00000006_g1"}


def test_a_copied_directory_is_no_checkpoint_of_its_name(storage):
    commit(storage, 1)
    raw = storage.read(f"step_00000001/{MANIFEST_NAME}")
    storage.write(f"step_00000009/{MANIFEST_NAME}", [raw])
    report = collect(storage, LAST)
    assert report.damaged == ("step_00000009",)
    assert report.retained == ("step_00000001",)


def test_another_format_version_stops_the_collection(storage):
    """Its manifest may name files anywhere in the store."""

    def newer(raw):
        return seal({**unseal(raw, "x"), "format_version": 99})

    for step in (1, 2, 3):
        commit(storage, step)
    commit(storage, 4, write_manifest=False)
    _damage(storage, 2, newer)
    before = tree(storage)
    for report in (collect(storage, LAST), clean_start(storage)):
        assert report.damaged == ("step_00000002",)
        assert report.deleted == ()
    assert tree(storage) == before


def test_clean_start_removes_what_dead_writers_left(storage):
    commit(storage, 1)
    commit(storage, 2)
    storage.delete(f"step_00000001/{MANIFEST_NAME}")  # collected half way: step 3 still needs its expert
    commit(storage, 3, (1,))
    commit(storage, 4, write_manifest=False)
    storage.write("step_00000003/.MANIFEST.json.1.0123abcd.tmp", [b""])
    storage.write("step_00000004/.MANIFEST.json.1.0123abcd.tmp", [b""])
    storage.write("step_00000005_g1/.f.1.0123abcd.tmp", [b""])
    storage.write(".store.json.1.0123abcd.tmp", [b""])
    report = clean_start(storage)
    assert tree(storage) == {
        "step_00000001": ["rank_00000_expert.safetensors"],
        "step_00000002": WHOLE,
        "step_00000003": WHOLE,
    }
    assert report.retained == ("step_00000002", "step_00000003")
    assert len(report.deleted) == 6


def test_what_is_known_spares_reading_and_is_kept_up_to_date(storage):
    known = StoreContents(storage)
    for step in (1, 2, 3):
        commit(storage, step)
    collect(storage, RetentionPolicy(keep_last=2), contents=known)
    assert sorted(known.records) == sorted(known.listed) == ["step_00000002", "step_00000003"]
    commit(storage, 4)
    watched = FaultyStorage(storage, fail_at=None, verbs={"read", "list"})
    collect(watched, RetentionPolicy(keep_last=2), contents=known)
    assert {path.partition("/")[0] for _, path in watched.calls} == {"", "step_00000004"}
    assert sorted(known.records) == sorted(known.listed) == sorted(tree(storage)) == ["step_00000003", "step_00000004"]


def test_what_a_failed_collection_left_is_looked_at_again(storage):
    """What is known may be wrong after an error: the directories that it was about are listed anew."""
    for step in (1, 2, 3):
        commit(storage, step)
    known = StoreContents(storage)
    collect(storage, RetentionPolicy(keep_last=5), contents=known)
    with pytest.raises(OSError, match="injected"):
        collect(FaultyStorage(storage, 4, verbs={"delete"}), LAST, contents=known)
    collect(storage, LAST, contents=known)
    assert tree(storage) == {"step_00000003": WHOLE}


def test_an_error_while_reading_deletes_nothing(storage):
    for step in (1, 2, 3):
        commit(storage, step)
    commit(storage, 4, write_manifest=False)
    before = tree(storage)
    for verb in ("read", "list"):
        for n in (1, 2, 3):
            for collection in (lambda s: collect(s, LAST), clean_start):
                with pytest.raises(OSError, match="injected"):
                    collection(FaultyStorage(storage, n, verbs={verb}))
                assert tree(storage) == before


@pytest.mark.parametrize("age", ["old", "new"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_nth_storage_call_fails_for_every_n(tmp_path, persistent, age):
    """After a failure anywhere, every remaining commit is whole, and the next collection finishes the work."""
    for n in range(1, 200):
        storage = LocalStorage(tmp_path / f"{n}{age}")
        for step, others in ((1, ()), (2, (1,)), (3, (2,)), (4, (3,))):
            commit(storage, step, others)
        faulty = FaultyStorage(storage, n, OSError(errno.EIO, "injected"), persistent)
        try:
            collect(faulty, LAST)
        except OSError:
            assert faulty.failures
        require_whole(storage)
        collect(storage, LAST)
        assert tree(storage) == {"step_00000003": ["rank_00000_expert.safetensors"], "step_00000004": WHOLE}
        if not faulty.failures:
            break
    assert n > 20


def require_whole(storage):
    committed = [name for name in storage.list() if storage.exists(f"{name}/{MANIFEST_NAME}")]
    assert "step_00000004" in committed
    for name in committed:
        for needed in read_manifest(storage, name, {}).paths:
            assert storage.exists(needed), f"{name} misses {needed}"


COLLECTOR = """
import sys
from moe_ckpt.ledger import retention
from moe_ckpt.commit.keeping import StoreContents
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import crash_at
retention._spares = lambda ordered: []
StoreContents(LocalStorage(sys.argv[1], crash_at("gc", int(sys.argv[2])))).collect(retention.RetentionPolicy(1))
"""


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_kill_minus_nine_during_collection(storage, n):
    for step, others in ((1, ()), (2, (1,)), (3, (2,)), (4, (3,))):
        commit(storage, step, others)
    done = subprocess.run([warm.python(), "-c", COLLECTOR, storage.root, str(n)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    require_whole(storage)
    clean_start(storage)
    require_whole(storage)
    collect(storage, LAST)
    assert tree(storage) == {"step_00000003": ["rank_00000_expert.safetensors"], "step_00000004": WHOLE}


def test_manifests_of_the_helper_are_real(storage):
    """Guards the tests above: what ``commit`` writes is a manifest to the decoder, not something damaged."""
    commit(storage, 1)
    commit(storage, 7, (1,))
    raw = storage.read(f"step_00000007/{MANIFEST_NAME}")
    found = read_manifest(storage, "step_00000007", {})
    assert shard_path("step_00000001", 0, "expert") in found.paths
    assert shard_path("step_00000001", 0, "non_expert") not in found.paths
    assert Manifest.decode(raw, "x").directory == "step_00000007"
    assert json.loads(raw)["body"]["step"] == 7


def test_other_ranks_delete_their_own_files(storage):
    """Of a store that three ranks wrote, and two go on with: the third one's files are rank 0's."""
    others = frozenset(name.replace("00000", "00001") for name in WHOLE[1:])
    for step, experts_from in ((1, ()), (2, (1,)), (3, (1,))):
        commit(storage, step, experts_from)
        for name in WHOLE[1:]:
            for rank in (1, 2):
                storage.write(f"{step_dir(step, 0)}/{name.replace('00000', f'0000{rank}')}", [b"theirs"])
    known = StoreContents(storage)
    report = collect(storage, LAST, contents=known, others=others)
    assert report.delegated == {
        "step_00000001": (False, ["non_expert", "state"]),
        "step_00000002": (True, ["expert", "non_expert", "state"]),
    }
    left = storage.list("step_00000002")
    assert left == sorted(others), "their files and nothing else"
    for directory, (whole, groups) in report.delegated.items():
        for group in groups:
            storage.delete(group_path(directory, 1, group))
        if whole:
            storage.delete_dir(directory)
    assert storage.list() == ["step_00000001", "step_00000003"]
    assert [name for name in storage.list("step_00000001") if name != PART_NAME] == [
        f"rank_0000{rank}_expert.safetensors" for rank in range(3)
    ]
    assert collect(storage, LAST, contents=known, others=others).delegated == {}


def test_what_other_ranks_did_not_delete_is_told_again(storage):
    others = frozenset(name.replace("00000", "00001") for name in WHOLE[1:])
    for step in (1, 2):
        commit(storage, step)
        storage.write(state_path(step_dir(step, 0), 1), [b"theirs"])
    known = StoreContents(storage)
    for _ in range(2):
        assert collect(storage, LAST, contents=known, others=others).delegated == {"step_00000001": (True, ["state"])}
    assert collect(storage, LAST, contents=known).deleted == (state_path("step_00000001", 1),)
    assert storage.list() == ["step_00000002"]
