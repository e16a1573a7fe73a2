"""``benchmarks/commit_scale.py`` runs, and what its acted ranks send is what real ones would."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")

from benchmarks import commit_scale
from benchmarks.commit_rank import policy_of
from benchmarks.commit_world import Acknowledging, ActedPeers, Others, State, key_of, recorded
from benchmarks.report import RESULTS
from moe_ckpt.core.placement import everywhere
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.options import Settings
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.slices.snapshot import Acknowledgement
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.lock import StoreLock
from tests.unit.engine_parts import told

LAYERS, EXPERTS, RANKS = 3, 8, 4


@pytest.mark.usefixtures("warm_programs")
def test_both_ranks_of_every_policy_are_measured(tmp_path, capfd):
    out = tmp_path / "out.json"
    options = f"--cases 2x8/4 --warm 1 --steps 4 --dir {tmp_path} --json {out}"
    assert commit_scale.main(options.split()) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    (case,) = json.loads(out.read_text())["cases"]
    assert case["failed"] == {}
    rows = {(row["policy"], row["role"]): row for row in case["rows"]}
    assert len(rows) == len(commit_scale.POLICIES) * len(commit_scale.ROLES)
    assert all(row["cpu_ms"] > 0 and row["n"] == 4 for row in rows.values())
    assert all(row["sent"] > 0 and row["received"] > 0 for row in rows.values())
    assert "MoEvement W=4" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["dense", "moc", "moevement"])
def test_acted_ranks_send_what_a_real_rank_sends(tmp_path, name):
    """Byte for byte, but for the state file, whose size and digest are made up."""
    state, rank = State(LAYERS, EXPERTS), 2
    others, plans, sent = Others(state, RANKS), deque(), []

    class Listening(ActedPeers):
        def combine(self, columns):
            sent.append(list(columns))
            return super().combine(columns)

    storage = LocalStorage(tmp_path / "real")
    comm = Listening(rank, RANKS, others, plans, tmp_path)
    run = RunContext(
        storage=storage,
        policy=recorded(policy_of(name, EXPERTS), plans),
        catalog=state.catalog,
        state=state,
        comm=comm,
        settings=Settings(when_busy="wait"),
        placement=everywhere(state.catalog.layers, comm.world_size),
        lock=StoreLock(storage, "a run"),
    )
    session = CheckpointSession(run)
    session.open()
    session.begin_run(state.plain)
    for step in range(1, 7):
        session.after_update(step, told(np.ones((LAYERS, EXPERTS), dtype=np.int64)), state.plain, updated=False)
        session.drain(step)
    session.close()
    assert len(plans) == len(sent) >= 6
    acting = Acknowledging(tmp_path)
    for plan, real in zip(plans, sent, strict=True):
        acted = Acknowledgement(*acting.of(others.shares_of(key_of(plan)), plan.step, "0" * 32)[rank - 1])
        assert replace(acted, state_rows=b"") == replace(Acknowledgement(*real), state_rows=b"")
        assert acted.states == b"rank_00002_state.json\n"
        assert acted.state_rows.startswith(b"[2,")


def test_acted_ranks_delete_what_real_ones_would(tmp_path):
    """Two whole checkpoints stay, and nothing of those before them."""
    state, plans = State(LAYERS, EXPERTS), deque()
    comm = ActedPeers(0, RANKS, Others(state, RANKS), plans, tmp_path / "store")
    storage = LocalStorage(tmp_path / "store")
    run = RunContext(
        storage=storage,
        policy=recorded(policy_of("dense", EXPERTS), plans),
        catalog=state.catalog,
        state=state,
        comm=comm,
        settings=Settings(when_busy="wait"),
        placement=everywhere(state.catalog.layers, comm.world_size),
        lock=StoreLock(storage, "a run"),
    )
    session = CheckpointSession(run)
    session.open()
    try:
        session.begin_run(state.plain)
        for step in range(1, 6):
            session.after_update(step, told(np.ones((LAYERS, EXPERTS), dtype=np.int64)), state.plain, updated=False)
            session.drain(step)
    finally:
        session.close()
    assert sorted(path.name for path in (tmp_path / "store").glob("step_*")) == ["step_00000004", "step_00000005"]


@pytest.mark.parametrize(
    ("options", "said"),
    [("--cases 48x128", "48x128/64"), ("--cases 2x4/1", "nobody"), ("--policies all", "choose from dense")],
)
def test_what_is_no_case_is_refused(options, said):
    with pytest.raises(SystemExit, match=said):
        commit_scale.main(options.split())


def test_docs_have_the_growth_of_the_results():
    """What a commit costs rank 0 for each further rank, and what that comes to on 16 384 ranks."""
    cases = json.loads((RESULTS / "commit_scale.json").read_text())["cases"]
    of = {case["ranks"]: {row["policy"]: row for row in case["rows"] if row["role"] == "rank 0"} for case in cases}
    text = " ".join((Path(__file__).parents[2] / "docs" / "scale.md").read_text().split())

    def each(figure):
        return [(of[2048][name][figure] - of[512][name][figure]) / (2048 - 512) for name in of[512]]

    nbytes, msecs = each("received_bytes"), each("cpu_ms")
    further = [of[2048][name]["cpu_ms"] + more * (16384 - 2048) for name, more in zip(of[512], msecs, strict=True)]
    received = max(row["received_bytes"] for row in of[2048].values()) + max(nbytes) * (16384 - 2048)
    assert f"by {min(nbytes):.0f} B and {1e3 * min(msecs):.0f} to {1e3 * max(msecs):.0f} µs per rank" in text
    assert f"rank 0 {min(further):.0f} to {max(further):.0f} ms and {received / (1 << 20):.1f} MiB received" in text
