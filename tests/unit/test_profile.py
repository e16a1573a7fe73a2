"""The profile of a run: written strictly, read strictly, never in training's way, never lost to a kill."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import stat
import subprocess
import sys
import time
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span
from moe_ckpt.core.placement import Placement, everywhere
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError, DamagedError, FormatVersionError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import LayerRecord
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.policies.base import Sends
from moe_ckpt.ports import TensorSpec
from moe_ckpt.run.events import Loaded, StepRecord, StepReplayed
from moe_ckpt.run.options import Options
from moe_ckpt.slices.assignment import operator_bytes
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.local import remove_temporaries_of, replace_file
from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.cluster.surviving import Survivors
from moe_ckpt_sim.failures.failures import NoFailures, Poisson
from moe_ckpt_sim.planner import recorder
from moe_ckpt_sim.planner.profile import RunProfile, read_profile, scenario_from
from moe_ckpt_sim.planner.profile_document import (
    Life,
    OperatorRow,
    Profile,
    ProfiledModel,
    decode_profile,
    earlier_lives,
    encode_life,
    encode_model,
    encode_profile,
)
from moe_ckpt_sim.planner.recorder import parallel, profile_observer, started_unix_secs, weighed
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.system import System
from tests.unit import engine_parts
from tests.unit.builders import catalog
from tests.unit.engine_parts import ThreadRanks, run_threads

LIFE = Life(
    run_id="ab" * 16,
    generation=0,
    policy={"name": "moc", "k": 1},
    ranks=4,
    ranks_per_node=2,
    pp=1,
    dp=4,
    ep=1,
    host_memory_bytes=1000,
    started_unix_secs=100.0,
    opened_unix_secs=107.0,
    last_unix_secs=131.0,
    held_alike=True,
    ready_unix_secs=108.0,
    training_unix_secs=108.0,
    first_step=1,
    last_step=41,
    first_step_secs=1.5,
    last_step_unix_secs=129.5,
    iteration_secs=0.5,
    recent_iteration_secs=0.75,
    update_secs=0.125,
    checkpoint_cost_secs=0.0,
    persist_secs=2.0,
    copy_bytes_per_sec=4000.0,
    persist_bytes_per_sec=500.0,
    send_bytes_per_sec=300.0,
    replicas=2,
    sent_bytes=900,
    saved_bytes=100,
    clean_steps=20,
    clean_secs=12.0,
    stall_secs=4.1,
    begun=41,
    committed=39,
    snapshot_bytes=4100,
    assignments=41 * 256 * (2 + 2),
    skewness=0.25,
)
NEXT = replace(
    LIFE,
    generation=1,
    started_unix_secs=133.0,
    opened_unix_secs=141.0,
    ready_unix_secs=144.0,
    training_unix_secs=146.0,
    last_unix_secs=180.0,
    last_step_unix_secs=180.0,
    restored_step=39,
    load_secs=2.0,
    plan_secs=0.5,
    replayed_steps=2,
    first_step=40,
    last_step=80,
    finished=True,
)
MODEL = ProfiledModel(
    (LayerRecord("a", 4, 2), LayerRecord("b", 2, 2)),
    (
        OperatorRow("non_expert/embed", 1, 30, 365, 60),
        OperatorRow("gate/0", 1, 8, 100, 16),
        OperatorRow("expert/0/0", 3, 10, 120, 20),
        OperatorRow("expert/0/3", 1, 10, 40, 20),
        OperatorRow("expert/1/0", 2, 12, 144, 24, stage=1),
        OperatorRow("gate/1", 1, 4, 50, 8, stage=1),
    ),
)
PROFILE = Profile("f" * 32, MODEL, (LIFE, NEXT))


def encoded(profile):
    return encode_profile(
        profile.fingerprint, encode_model(profile.model), [encode_life(life) for life in profile.lives]
    )


def plain():
    return json.loads(encoded(PROFILE))


# --- bytes and records ---


@pytest.mark.parametrize("profile", [PROFILE, Profile("f"), replace(PROFILE, model=None)])
def test_round_trip(profile):
    assert decode_profile(encoded(profile), "p") == profile
    assert encode_profile(*earlier_lives(encoded(profile), "p")) == encoded(profile)


def test_every_field_of_a_life_is_checked():
    for name in (field.name for field in fields(Life)):
        body = plain()
        body["lives"][1][name] = [1]
        with pytest.raises(DamagedError, match=rf"p: field lives\[1\]\.{name} is \[1\], but must be "):
            decode_profile(json.dumps(body).encode(), "p")


def put(path, value):
    """A change of a profile's JSON: at ``path``, a dotted one."""

    def change(body):
        *way, last = path.split(".")
        for part in way:
            body = body[int(part) if part.isdigit() else part]
        body[int(last) if last.isdigit() else last] = value

    return change


def drop(path):
    def change(body):
        *way, last = path.split(".")
        for part in way:
            body = body[int(part) if part.isdigit() else part]
        del body[int(last) if last.isdigit() else last]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("kind", "other"), "no profile of a run"),
        (drop("lives"), "field lives is missing"),
        (put("more", 1), "field more is not known"),
        (drop("lives.0.iteration_secs"), r"lives\[0\].iteration_secs is missing"),
        (put("lives.1.iteration_sec", 1), r"lives\[1\].iteration_sec is not known"),
        (put("lives", {}), "lives is {}, but must be a list"),
        (put("lives.0", 3), r"lives\[0\] is 3, but must be an object"),
        (put("lives.0.iteration_secs", 0), "above 0"),
        (put("lives.0.iteration_secs", float("nan")), "finite"),
        (put("lives.0.stall_secs", float("inf")), "finite"),
        (put("lives.0.stall_secs", 10**400), "finite"),
        (put("lives.0.stall_secs", -1), "at least 0"),
        (put("lives.0.stall_secs", None), "at least 0"),
        (put("lives.0.begun", 1.5), "whole number"),
        (put("lives.0.begun", True), "whole number"),
        (put("lives.0.skewness", 1.5), "from 0 to 1"),
        (put("lives.0.finished", 1), "true or false"),
        (put("lives.0.dp", 3), r"lives\[0\]: pp \* dp \* ep is 3, but ranks is 4"),
        (put("lives.0.first_step", None), r"lives\[0\]: first_step is None, but last_step is 41"),
        (put("lives.0.first_step", 42), r"lives\[0\]: first_step is 42, but last_step is 41"),
        (put("model.layers.0.experts", 0), r"model.layers\[0\].experts is 0"),
        (put("model.layers.0.experts", 10**9), "more than"),
        (put("model.layers.0.experts", 5), "expert/0/4 missing"),
        (put("model.layers.0.experts", 3), r"model.operators\[3\] goes beyond"),
        (drop("model.operators.1"), "gate/0 missing"),
        (put("model.operators.0.id", "expert/0/x"), "the id of an operator"),
        (put("model.operators.0.id", "gate/2"), "there are 2 layers"),
        (put("model.operators.0.id", "gate/0"), "listed twice"),
        (put("model.operators.0.count", 2), "one operator"),
        (put("model.operators.2.full_bytes", -1), r"model.operators\[2\].full_bytes"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    body = plain()
    change(body)
    with pytest.raises(DamagedError, match=message):
        decode_profile(json.dumps(body).encode(), "p")


def test_a_profile_that_has_grown_is_not_read(tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(encoded(PROFILE))
    os.truncate(path, 1 << 40)
    with pytest.raises(DamagedError, match="at most"):
        read_profile(path)


@pytest.mark.parametrize("version", [4, 0, None, True, "1"])
def test_another_version_is_told_apart(version):
    body = plain() | {"format_version": version, "a field of its own": 1}
    with pytest.raises(FormatVersionError, match=r"format version .* reads version 1 only.*start the run anew"):
        decode_profile(json.dumps(body).encode(), "p")


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_a_file_cut_short_is_damaged(cut):
    with pytest.raises(DamagedError):
        decode_profile(encoded(PROFILE)[:cut], "p")


def test_every_field_is_described():
    text = (Path(__file__).parents[2] / "docs" / "profile.md").read_text()
    tables = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    for title, records in (("model", (ProfiledModel, OperatorRow, LayerRecord)), ("lives", (Life,))):
        named = set(re.findall(r"`(\w+)`", tables[title]))
        assert {field.name for record in records for field in fields(record)} <= named
    assert text.startswith(f"# The profile of a run, version {FORMAT_VERSION}\n")


# --- facts ---


def test_weights_are_those_that_window_policies_are_told():
    model = catalog(2, 4)
    specs = engine_parts.TinyState(model).specs()
    compute = {"layers.1.moe.w": "BF16"}
    sizes = operator_bytes(model, specs, compute)
    found = weighed(model, everywhere(model.layers, 1), specs, compute)
    assert [op for row in found.operators for op in row.ids] == [op.id for op in model.operators]
    told = {op: row.size for row in found.operators for op in row.ids}
    assert told == sizes
    assert [(row.id, row.count, row.elements) for row in found.operators] == [
        ("non_expert/embed", 1, 28),
        ("gate/0", 1, 16),
        ("expert/0/0", 4, 12),
        ("gate/1", 1, 16),
        ("expert/1/0", 4, 12),
    ]
    assert {row.compute_bytes for row in found.operators if row.id == "expert/1/0"} == {24}


def test_only_neighbours_that_weigh_the_same_share_a_row():
    model = catalog(1, 4, stacked=False)
    specs = [
        spec for spec in engine_parts.TinyState(model).specs() if spec.key != "optim/0/layers.0.moe.experts.1.w/exp_avg"
    ]
    found = weighed(model, everywhere(model.layers, 1), specs, {})
    assert [(row.id, row.count) for row in found.operators[2:]] == [
        ("expert/0/0", 1),
        ("expert/0/1", 1),
        ("expert/0/2", 2),
    ]
    assert {op: row.full_bytes for row in found.operators for op in row.ids} == {
        op: size.full for op, size in operator_bytes(model, specs, {}).items()
    }


def test_experts_out_of_order_or_without_rows_are_weighed_too():
    spans = {2: Span("w", 2, 3), 0: Span("w", 0, 1), 1: Span("w", 1, 2)}
    operators = tuple(Operator(f"expert/0/{e}", OperatorKind.EXPERT, (s,), 0, e) for e, s in spans.items())
    gate = Operator("gate/0", OperatorKind.GATE, (), 0)
    model = Catalog((*operators, gate), (MoELayer(0, "moe", 3),), {"w": (3,)})
    specs = [TensorSpec("model/w", "w", "F32", (3,))]
    rows = weighed(model, everywhere(model.layers, 1), specs, {}).operators
    assert [(row.id, row.count, row.elements) for row in rows] == [
        ("expert/0/2", 1, 1),
        ("expert/0/0", 2, 1),
        ("gate/0", 1, 0),
    ]


@pytest.mark.parametrize(
    ("placement", "ranks", "found"),
    [
        (everywhere(catalog(1, 4).layers, 3), 3, (1, 3, 1)),
        (Placement(((0, 0, 1, 1), (4, 4, 5, 5)), (0,), (4, 4), expert_ranks=2), 8, (2, 2, 2)),
        (Placement(((0, 0, 0, 0),), (0,), (2, 2), experts_apart=False), 4, (2, 2, 1)),
        (Placement(((0, 1, 2, 2),), (0,), (4,), expert_ranks=1), 4, (1, 4, 1)),  # 3 do not divide 4
        (Placement(((0, 1),), (0,), (1, 3), expert_ranks=1), 4, (1, 4, 1)),
    ],
)
def test_parallel(placement, ranks, found):
    assert parallel(placement, ranks) == found


def test_the_process_began_when_the_system_says():
    assert started_unix_secs() == pytest.approx(
        psutil.Process().create_time(), abs=1.5
    )  # psutil rounds boot to seconds
    code = (
        "import time; t = time.time(); from moe_ckpt_sim.planner.recorder import started_unix_secs as p; print(t - p())"
    )
    spent = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert -0.02 < spent < 60  # time to start Python, before the imports


# --- the file ---


def test_replace_file_leaves_the_old_one_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "new" / "p.json"
    replace_file(path, b"one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        replace_file(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(path.parent) == ["p.json"]


def test_only_what_a_dead_writer_of_the_same_file_left_is_removed(tmp_path):
    keep = {".q.json.1.00000000.tmp", ".p.json.tmp", "p.json", ".p.json.1.0000000.tmp"}
    for name in {*keep, ".p.json.12.0123abcd.tmp"}:
        (tmp_path / name).touch()
    remove_temporaries_of(tmp_path / "p.json")
    assert set(os.listdir(tmp_path)) == keep
    remove_temporaries_of(tmp_path / "nowhere" / "p.json")


@pytest.mark.parametrize("path", ["", "s3://bucket/p.json"])
def test_a_path_that_cannot_be_one_is_refused(path):
    with pytest.raises(ConfigError, match="profile="):
        Options(profile=path)


# --- a session that records ---


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "profile.json")


def life(tmp_path, path, storage=None, **more):
    rank = more["comm"].rank if "comm" in more else 0
    storage = storage or LocalStorage(tmp_path / "store")
    return engine_parts.Life(storage, observers=() if path is None or rank else (profile_observer(path),), **more)


def writer_of(run):
    (observer,) = run.observers
    return inspect.getclosurevars(observer).nonlocals["recorder"]._writer


def read(path):
    return read_profile(path).profile


def test_a_life_is_recorded(tmp_path, path):
    before = time.time()
    with life(tmp_path, path, local_ranks=8) as run:
        run.session.training_begins()
        run.go(5, settle=True)
        run.finish(save_last=False)
    (found,) = read(path).lives
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert found.finished
    assert recorder._left_unix_secs == found.last_unix_secs  # and not when it was closed once more
    assert (found.first_step, found.last_step, found.steps, found.restored_step) == (1, 5, 5, None)
    assert found.policy == MoC(k=1).describe()
    assert (found.ranks, found.ranks_per_node, found.pp, found.dp, found.ep) == (1, 1, 1, 1, 1)
    assert found.started_unix_secs <= found.opened_unix_secs <= found.ready_unix_secs == found.training_unix_secs
    assert before <= found.opened_unix_secs
    assert found.training_unix_secs <= found.last_step_unix_secs <= found.last_unix_secs <= time.time()
    assert 0 < found.first_step_secs <= found.last_step_unix_secs - found.training_unix_secs
    assert (found.begun, found.committed, found.failed, found.skipped) == (5, 5, 0, 0)
    assert found.snapshot_bytes == sum(record.nbytes for record in run.records)
    assert found.stall_secs == pytest.approx(sum(record.stall_secs for record in run.records))
    assert found.agree_secs == pytest.approx(sum(record.agree_secs for record in run.records))
    assert found.assignments == 5 * run.counts.sum()
    assert 0 < found.skewness < 1
    assert found.recent_iteration_secs > 0
    assert (found.clean_steps, found.clean_secs, found.waited_secs) == (0, 0.0, 0.0)  # a checkpoint at every step
    assert found.update_secs > 0
    assert found.copy_bytes_per_sec > 0
    assert found.persist_bytes_per_sec > 0
    assert found.persist_secs > 0
    assert found.load_secs is None
    sizes = operator_bytes(run.model, run.state.specs(), {})
    assert read_profile(path).sizes == sizes


def test_the_next_life_is_added(tmp_path, path):
    with life(tmp_path, path) as first:
        first.session.training_begins()
        first.go(3, settle=True)
    (tmp_path / ".profile.json.1.0123abcd.tmp").touch()  # of a writer that was killed
    with life(tmp_path, path) as second:
        assert not list(tmp_path.glob(".profile.json.*"))
        assert [each.generation for each in read(path).lives] == [0]
        second.session.resume_from(engine_parts.manifests(tmp_path / "store")[-1])
        second.session.training_begins()
        second.step = 3
        second.go(2, settle=True)
    one, two = read(path).lives
    assert (one.finished, two.finished) == (False, False)
    assert (one.generation, two.generation) == (0, 1)
    assert one.run_id == two.run_id
    assert (two.restored_step, two.first_step, two.last_step) == (3, 4, 5)
    assert 0 < two.load_secs <= two.ready_unix_secs - two.opened_unix_secs
    assert two.started_unix_secs == pytest.approx(one.last_unix_secs, abs=5.0)  # same process: not when it began
    assert two.assignments == 2 * second.counts.sum()
    (gap,) = read_profile(path).restarts.gap_secs
    assert 0 <= gap < 5.0


def test_a_clock_that_is_set_back_spoils_nothing(tmp_path, path, monkeypatch):
    with life(tmp_path, path) as first:
        first.go(2, settle=True)
    clock = [time.time()]

    def backwards():
        clock[0] -= 10.0
        return clock[0]

    monkeypatch.setattr(recorder.time, "time", backwards)
    with life(tmp_path, path) as second:
        second.session.resume_from(engine_parts.manifests(tmp_path / "store")[-1])
        second.session.training_begins()
        second.step = 2
        second.go(3, settle=True)
    found = read_profile(path)
    assert (found.life.load_secs, found.life.first_step_secs) == (0.0, 0.0)
    assert found.pace.mean_lap_secs == 0.0


def test_only_the_newest_lives_are_kept(tmp_path, path, monkeypatch):
    monkeypatch.setattr("moe_ckpt_sim.planner.recorder._MOST_LIVES", 3)
    for _ in range(5):
        with life(tmp_path, path) as run:
            run.go(1, settle=True)
    assert [each.generation for each in read(path).lives] == [2, 3, 4]


def test_steps_computed_again_are_no_training_yet(tmp_path, path):
    with life(tmp_path, path) as first:
        first.go(3, settle=True)
    with life(tmp_path, path) as second:
        second.session.training_begins()
        time.sleep(0.05)  # a window is computed again
        second.session.resume_from(engine_parts.manifests(tmp_path / "store")[-1])
        second.step = 3
        second.go()
    found = read(path).lives[-1]
    assert found.training_unix_secs - found.ready_unix_secs >= 0.05
    assert found.load_secs == pytest.approx(found.ready_unix_secs - found.opened_unix_secs)
    assert found.plan_secs is None, "nobody noted it"
    assert read_profile(path).restarts.replay_secs >= 0.05


def test_a_start_tells_planning_and_steps_computed_again_apart(tmp_path, path):
    with life(tmp_path, path) as first:
        first.go(3, settle=True)
    with life(tmp_path, path) as second:
        time.sleep(0.02)
        planned = time.time()
        time.sleep(0.02)
        second.session._run.tell(Loaded(planned))
        second.session.training_begins()
        for step in (2, 3):
            second.session._run.tell(StepReplayed(StepRecord(step, replayed=True), second.session.run_ledger))
        second.session.resume_from(engine_parts.manifests(tmp_path / "store")[-1])
        second.step = 3
        second.go()
    found = read(path).lives[-1]
    assert 0.02 <= found.plan_secs == pytest.approx(planned - found.opened_unix_secs)
    assert found.plan_secs + 0.02 <= found.load_secs <= found.ready_unix_secs - found.opened_unix_secs
    assert found.replayed_steps == 2


def test_windows_are_recorded_with_what_they_weigh(tmp_path, path):
    with life(tmp_path, path, policy=MoEvement(window=2)) as run:
        run.session.set_compute_types({"layers.0.moe.w": "BF16"})
        run.session.begin_run(run.capture)
        run.session.training_begins()
        run.go(2, settle=True)
        run.session.set_compute_types({"layers.0.moe.w": "BF16", "embed.weight": "BF16"})
        run.go(2, settle=True)
    (found,) = read(path).lives
    assert (found.begun, found.committed) == (5, 4)  # that of step 0 too; nobody booked the newest one
    assert read_profile(path).sizes == run.session._snapshots.live.sizes


def test_tensors_are_weighed_though_nothing_is_saved_yet(tmp_path, path):
    with life(tmp_path, path, policy=Dense(every_n_steps=100)) as run:
        run.session.training_begins()
        run.go(4)
        time.sleep(0.6)  # until the next write is due
        run.go()
        writer_of(run).wait(120)
        assert read_profile(path).sizes == operator_bytes(run.model, run.state.specs(), {})
        assert read(path).lives[0].begun == 0


def test_tensors_that_appear_are_weighed_anew(tmp_path, path):
    with life(tmp_path, path) as run:
        run.state.change = lambda tensors: [tensor for tensor in tensors if tensor.key.startswith("model/")]
        run.go(2, settle=True)
        run.state.change = lambda tensors: tensors
        run.go(1, settle=True)
    assert read_profile(path).sizes == operator_bytes(run.model, run.state.specs(), {})


def test_failed_and_skipped_checkpoints_are_counted(tmp_path, path):
    storage = engine_parts.failing(tmp_path / "store", 1)
    with life(tmp_path, path, storage) as run:
        run.go(4, settle=True)
    (found,) = read(path).lives
    assert (found.failed, found.committed) == (1, 2)  # the newest one was not booked yet
    storage = engine_parts.GatedStorage(tmp_path / "slow")
    with life(tmp_path, path, storage, max_in_flight=1) as run:
        storage.gate.clear()
        run.go(4)
        storage.gate.set()
    assert read(path).lives[-1].skipped == run.records[-1].skips > 0


def test_rank_0_alone_writes_and_tells_the_number_of_ranks(tmp_path, path):
    ranks = ThreadRanks(2)

    def body(comm):
        with life(tmp_path, path if comm.rank == 0 else str(tmp_path / "other.json"), comm=comm, local_ranks=1) as run:
            run.session.training_begins()
            run.go(2, settle=True)
            run.finish()

    run_threads(ranks, body)
    (found,) = read(path).lives
    assert (found.ranks, found.ranks_per_node, found.dp) == (2, 1, 2)
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize("content", ["", "{}", "not json", "foreign", "of another version"])
def test_what_is_no_profile_of_this_model_is_put_aside(tmp_path, path, caplog, content):
    text = {
        "foreign": encoded(PROFILE).decode(),
        "of another version": encoded(PROFILE).decode().replace('"format_version": 1', '"format_version": 4'),
    }.get(content, content)
    for number in (1, 2):
        with open(path, "w") as file:
            file.write(text)
        with caplog.at_level(logging.WARNING, "moe_ckpt"), life(tmp_path, path) as run:
            run.go()
        assert len(read(path).lives) == 1
        with open(f"{path}.aside-{number}") as file:
            assert file.read() == text
        assert f"renamed to {os.path.realpath(path)}.aside-{number}" in caplog.text


def test_a_file_that_cannot_be_written_is_told_once_and_training_goes_on(tmp_path, caplog):
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with caplog.at_level(logging.WARNING, "moe_ckpt"), life(tmp_path, str(in_the_way / "p.json")) as run:
        run.session.training_begins()
        run.go(3, settle=True)
    assert sum("p.json" in record.message for record in caplog.records) == 1
    assert run.session.run_ledger.committed_step is not None


def test_a_write_error_is_told_once(tmp_path, path, caplog, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moe_ckpt_sim.planner.recorder.replace_file", full)
    with caplog.at_level(logging.WARNING, "moe_ckpt"), life(tmp_path, path) as run:
        run.session.training_begins()
        run.go(3, settle=True)
    told = [record.message for record in caplog.records if "profile" in record.message]
    assert len(told) == 1
    assert "training continues" in told[0]
    assert "No space left" in told[0]


def test_without_a_path_nothing_is_recorded(tmp_path):
    with engine_parts.Life(LocalStorage(tmp_path / "store")) as run:
        run.go(2)
    assert os.listdir(tmp_path) == ["store"]


def test_how_often_it_is_written(tmp_path, path, monkeypatch):
    """A hundredth of the life's length apart, within 0.5 and 10 s; and as soon as iterations are measured."""
    clock = [1000.0]
    monkeypatch.setattr(recorder.time, "time", lambda: clock[0])
    monkeypatch.setattr(recorder, "started_unix_secs", lambda: 1000.0)
    monkeypatch.setattr(recorder, "_left_unix_secs", 0.0)
    run = life(tmp_path, path)
    run.session.open()
    written = []
    writer = writer_of(run)
    monkeypatch.setattr(writer, "write", lambda life, specs, compute: bool(written.append(life.last_unix_secs)) or True)
    run.session.training_begins()
    for _ in range(200):
        clock[0] += 10.0
        run.go()
    run.session.close()
    gaps = {b - a for a, b in pairwise(written)}
    assert written[:3] == [1000.0, 1010.0, 1020.0]
    assert gaps <= {0.0, 10.0}
    written.clear()
    with life(tmp_path, str(tmp_path / "other")) as fast:
        monkeypatch.setattr(
            writer_of(fast), "write", lambda life, specs, compute: bool(written.append(clock[0])) or True
        )
        fast.session.training_begins()
        began = clock[0]
        for _ in range(100):
            clock[0] += 0.125
            fast.go()
        assert [at - began for at in written[:5]] == [0.0, 0.25, 0.75, 1.25, 1.75]  # 0.25: a lap is known
        clock[0] = began + 400.0
        written.clear()
        for _ in range(100):
            fast.go()
            clock[0] += 0.125
        assert [at - began for at in written[:3]] == [400.0, 404.0, 408.125]


WRITES_FOR_EVER = """
import itertools, sys
from moe_ckpt.storage.local import replace_file
for n in itertools.count():
    replace_file(sys.argv[1], open(sys.argv[2], "rb").read())
    print(n, flush=True)
"""


@pytest.mark.usefixtures("warm_programs")
def test_kill_in_the_middle_of_writing_leaves_a_whole_file(tmp_path):
    path, source = tmp_path / "p.json", tmp_path / "source"
    source.write_bytes(encoded(replace(PROFILE, lives=(LIFE, NEXT) * 100)))
    for attempt in range(8):
        command = [sys.executable, "-c", WRITES_FOR_EVER, str(path), str(source)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"0\n"
            time.sleep(0.001 * attempt)
            process.kill()
        assert len(read(path).lives) == 200
    remove_temporaries_of(path)
    assert set(os.listdir(tmp_path)) == {"p.json", "source"}


# --- the simulator's side ---


def test_what_the_simulator_is_told():
    run = RunProfile("dir/p.json", PROFILE)
    assert run.life == NEXT
    assert run.pace.iteration_secs == 0.5
    assert run.iteration().update_secs == 0.125
    waited = replace(PROFILE, lives=(replace(LIFE, iteration_secs=2.0),))
    assert RunProfile("p", waited).pace.iteration_secs == 0.75
    assert run.tokens_per_step == 256
    assert run.pace.stall_secs_per_step == pytest.approx(0.1)
    assert run.pace.mean_snapshot_bytes == 100
    assert run.pace.mean_lap_secs == pytest.approx((180 - 146 - 1.5) / 40)
    assert run.restarts.restart_secs == pytest.approx((8 + 13) / 2)
    assert run.restarts.load_secs == 2
    assert run.restarts.replay_secs == 2
    warm_up = (1.5 - 0.6) + (2 - 2 * 0.6)  # of the loop's first step, and of those computed again
    assert run.restarts.warm_up_secs == pytest.approx(warm_up)
    assert run.restarts.set_up_secs == pytest.approx(11 - 2 + 0.5 + warm_up)  # the first start is no restart
    assert run.restarts.gap_secs == (2.0,)
    assert run.restarts.downtime_secs == (15.0,)
    cluster = run.cluster(detect_secs=3.0, nic_bytes_per_sec=7.0)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus) == (2, 2, 4)
    assert (cluster.pcie_bytes_per_sec, cluster.storage_bytes_per_sec) == (4000.0, 2000.0)
    assert cluster.restart_secs == pytest.approx(9.5 + warm_up)
    assert (cluster.detect_secs, cluster.nic_bytes_per_sec) == (3.0, 7.0)
    assert cluster.host_memory_bytes == 2000.0
    assert run.cluster(restart_secs=1.0, pcie_bytes_per_sec=5.0).pcie_bytes_per_sec == 5.0
    assert run.parallel == Parallel(1, 4, 1)
    assert run.load().skewness == 0.25
    assert run.batch().sequences == 256


def test_what_a_run_pays_for_is_a_sum_so_means_count():
    run = RunProfile("p", PROFILE)
    assert run.iteration().secs == run.pace.clean_iteration_secs == pytest.approx(24 / 40)
    laps, took = 40 + 40, (129.5 - 108 - 1.5) + (180 - 146 - 1.5)
    longer = (took / laps - 0.6) * 82
    assert run.iteration().drag_secs_per_byte == pytest.approx(longer / 8200)
    restarts = replace(PROFILE, lives=(LIFE, replace(NEXT, finished=False), replace(NEXT, started_unix_secs=129.0)))
    assert RunProfile("p", restarts).restarts.set_up_secs == pytest.approx(((11 - 1.5) + (15 - 1.5)) / 2 + 1.7)
    nothing = replace(NEXT, restored_step=None, load_secs=None, plan_secs=None, replayed_steps=0)
    anew = replace(PROFILE, lives=(LIFE, nothing))
    assert RunProfile("p", anew).restarts.set_up_secs == pytest.approx(11 + 0.9)  # killed before anything was saved
    assert RunProfile("p", replace(PROFILE, lives=(LIFE,))).restarts.set_up_secs == pytest.approx(8 + 0.9)
    waited = replace(PROFILE, lives=(replace(LIFE, waited_secs=1.0), NEXT))
    assert RunProfile("p", waited).pace.drag_secs_per_byte == pytest.approx((longer - 1.0) / 8200)
    slow = replace(PROFILE, lives=(LIFE, replace(NEXT, copy_bytes_per_sec=100 / 0.5)))
    assert RunProfile("p", slow).pace.drag_secs_per_byte == pytest.approx((longer - 82 * (0.5 - 0.475)) / 8200)
    busy = replace(PROFILE, lives=tuple(replace(life, clean_steps=3, clean_secs=1.0) for life in PROFILE.lives))
    stalled = (took - 8.2 / 82 * laps) / laps
    assert RunProfile("p", busy).iteration().secs == pytest.approx(stalled)
    assert RunProfile("p", busy).pace.drag_secs_per_byte == pytest.approx(8.2 / 8200)


def test_the_newest_life_that_tells_a_thing_counts():
    changed = replace(NEXT, copy_bytes_per_sec=5000.0, persist_bytes_per_sec=None, update_secs=0.25)
    run = RunProfile("p.json", replace(PROFILE, lives=(LIFE, changed)))
    cluster = run.cluster()
    assert (cluster.pcie_bytes_per_sec, cluster.storage_bytes_per_sec) == (5000.0, 2000.0)
    assert run.iteration().update_secs == 0.25


def test_sizes_and_order_of_the_operators_are_the_runs_own():
    run = RunProfile("p.json", PROFILE)
    model = run.sim_model
    assert [op.id for op in model.catalog.operators] == [op for row in MODEL.operators for op in row.ids]
    assert model.sizes(run.precision)["expert/0/2"] == OperatorBytes(120, 20)
    assert model.sizes(run.precision)["expert/0/3"] == OperatorBytes(40, 20)
    assert model.elements["expert/1/1"] == 12
    assert [(op.kind, op.layer, op.expert) for op in model.catalog.operators[1:3]] == [
        (OperatorKind.GATE, 0, None),
        (OperatorKind.EXPERT, 0, 0),
    ]
    parameters = 30 + 8 + 40 + 24 + 4
    assert run.precision.full_bytes == pytest.approx((365 + 100 + 400 + 288 + 50) / parameters)
    assert run.precision.compute_bytes == pytest.approx((60 + 16 + 80 + 48 + 8) / parameters)


def test_pipeline_stages_are_the_runs_own():
    staged = replace(PROFILE, lives=(replace(LIFE, pp=2, dp=1, ep=2),))
    layout = RunProfile("p.json", staged).layout()
    assert layout.stage_of == {op: row.stage for row in MODEL.operators for op in row.ids}
    assert layout.placement.stages == (2, 2)


def test_ranks_that_all_hold_everything_own_experts_as_in_the_run():
    run = RunProfile("p.json", PROFILE)
    assert run.layout().placement == everywhere(run.sim_model.catalog.layers, 4)


def test_ranks_that_hold_a_part_each_have_nothing_for_one_another():
    """FSDP2, or Megatron's distributed optimizer without other parallelism: also (1, 4, 1)."""
    sharded = RunProfile("p", replace(PROFILE, lives=tuple(replace(each, held_alike=False) for each in PROFILE.lives)))
    layout, alike = sharded.layout(), RunProfile("p", PROFILE).layout()
    assert (layout.sends(1), alike.sends(1)) == (Sends(True, True, True, True), Sends(False, False, False, False))
    survivors = Survivors(layout, seal=True)
    assert Survivors(alike, seal=True).have_everything({1})
    assert not survivors.have_everything({1})
    assert not survivors.experts({1})[0].any()  # each expert is divided over all ranks
    assert Survivors(alike, seal=True).experts({1})[0].any()


def test_a_kill_costs_a_sharded_run_the_steps_since_its_checkpoint():
    kills = Poisson(100.0, process_share=1.0)
    system = System("dense", Dense(20), "node", survivors=True)
    outcomes = []
    for held_alike in (True, False):
        lives = tuple(replace(each, held_alike=held_alike) for each in PROFILE.lives)
        run = RunProfile("p", replace(PROFILE, lives=lives))
        outcomes.append(simulate(scenario_from(run, kills, system, 1000.0)))
    alike, sharded = outcomes
    assert alike.failures == sharded.failures > 0
    assert alike.steps_again < sharded.steps_again, "but for kills in an update, none"


def test_lives_of_other_runs_and_ends_that_were_meant_are_no_failures():
    for change in ({"run_id": "cd"}, {"finished": True}):
        other = replace(PROFILE, lives=(replace(LIFE, **change), NEXT))
        assert RunProfile("p", other).restarts.gap_secs == RunProfile("p", other).restarts.downtime_secs == ()


def test_a_scenario_from_a_profile():
    scenario = scenario_from(RunProfile("p.json", PROFILE), Poisson(100.0), System("moc", MoC(k=1)), 600.0, seed=3)
    assert scenario.tokens_per_step == 256
    assert scenario.layout.cluster.restart_secs == pytest.approx(9.5 + 1.7)
    assert (scenario.duration_secs, scenario.seed) == (600.0, 3)
    assert scenario.iteration.secs == pytest.approx(0.6)


UNKNOWN = dict.fromkeys(("iteration_secs", "recent_iteration_secs", "copy_bytes_per_sec", "persist_bytes_per_sec"))


@pytest.mark.parametrize(
    ("profile", "ask", "message"),
    [
        (replace(PROFILE, lives=()), lambda run: run.parallel, "no life in which a step was done"),
        (replace(PROFILE, model=None), lambda run: run.sim_model, "does not tell model"),
        (replace(PROFILE, lives=(replace(LIFE, **UNKNOWN),)), lambda run: run.iteration(), "iteration_secs"),
        (replace(PROFILE, lives=(replace(LIFE, **UNKNOWN),)), lambda run: run.cluster(), "give pcie_bytes_per_sec"),
        (
            replace(PROFILE, lives=(replace(LIFE, **UNKNOWN),)),
            lambda run: run.cluster(pcie_bytes_per_sec=1.0),
            "give storage_bytes_per_sec",
        ),
        (
            replace(PROFILE, lives=(replace(LIFE, ready_unix_secs=None),)),
            lambda run: run.cluster(),
            "give restart_secs",
        ),
        (replace(PROFILE, lives=(replace(LIFE, assignments=0),)), lambda run: run.batch(), "Give tokens_per_step"),
        (
            replace(PROFILE, model=replace(MODEL, layers=(LayerRecord("a", 4), LayerRecord("b", 2, 1)))),
            lambda run: run.batch(),
            "top_k",
        ),
    ],
)
def test_what_is_not_known_is_an_error_that_says_how_to_give_it(profile, ask, message):
    with pytest.raises(ConfigError, match=message):
        ask(RunProfile("p.json", profile))


def test_a_profile_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="profile=") as caught:
        read_profile(tmp_path / "p.json")
    assert str(tmp_path / "p.json") in str(caught.value)


def test_reading_a_profile_needs_no_torch():
    code = "import sys, moe_ckpt_sim.planner.profile; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "False\n"


def test_drag_makes_iterations_beside_snapshots_longer():
    def outcome(drag):
        rates = {"copy_bytes_per_sec": 1e12, "persist_bytes_per_sec": 1e12}
        run = RunProfile("p.json", replace(PROFILE, lives=(LIFE, replace(NEXT, **rates))))
        scenario = scenario_from(run, NoFailures(), System("dense", Dense(every_n_steps=7)), 600.0)
        return simulate(replace(scenario, iteration=replace(scenario.iteration, drag_secs_per_byte=drag)))

    free, slow = outcome(0.0), outcome(2.0 / sum(row.full_bytes * row.count for row in MODEL.operators))
    assert free.spent.stall == 0
    snapshots = slow.steps // 7 + 1  # of which each of four ranks has a quarter
    assert slow.spent.stall == pytest.approx(0.5 * snapshots, abs=0.5)
    assert slow.spent.useful + slow.spent.stall + slow.spent.lost == pytest.approx(600)
    assert slow.steps < free.steps
