"""Ranks of DDP are killed whenever it happens: no step is lost that a survivor has, and no expert that one holds."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_ckpt.cli.main import main
from moe_ckpt.format.slot import STATE, TENSORS, decode_slot
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_run,
    events,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    recomputed,
    split_lives,
)
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_survivors import ANY, POLICIES, SAVED_AT_EACH_STEP, lose, said

KILLS, SEEDS = 10, 5
assert KILLS * SEEDS * len(SAVED_AT_EACH_STEP) >= 100


class Sealed(NamedTuple):
    """What memory has of the newest life's steps. whole: The newest step that survivors can give all of, or None.
    steps: Those that a survivor sealed, its own share and the next rank's. kept: The newest that any rank has.
    due: The newest snapshot that was due and that both ranks have. 0: None."""

    whole: int | None
    steps: frozenset[int]
    kept: int
    due: int


def sealed(run: Run) -> Sealed:
    headers = [decode_slot(path.read_bytes(), str(path)) for path in Path(run.memory).rglob("*.head")]
    newest = max((header.identity.generation for header in headers), default=0)
    headers = [header for header in headers if header.identity.generation == newest]
    due = [{header.step for header in headers if (header.rank, header.sealer) == (rank, None)} for rank in range(2)]
    of = [header for header in headers if header.sealer is not None]
    told = {(header.step, header.rank, header.only) for header in of}
    steps = {step for step, rank, only in told if only == TENSORS and (step, 1 - rank, "") in told}
    whole = {step for step, rank, only in told if only == TENSORS and (step, rank, STATE) in told}
    kept = max(steps.union(*due), default=0)
    return Sealed(max(whole & steps, default=None), frozenset(steps), kept, max(due[0] & due[1], default=0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_dies_at_random_times(policy, seed, place):  # noqa: F811
    """Of two, ten times, some steps after a start: in a pass, in an update, while it saves.

    What the other one sealed is all there but the dead one's plain state, which that sealed when the step ended, unless
    it died first.
    """
    rng = random.Random(seed)
    run = in_memory(replace(POLICIES[policy], ranks=2, epochs=80, hashes=True), place)
    found: list[Sealed] = []
    for _ in range(KILLS):
        assert main(["memory", "retry", "--directory", str(run.memory)]) == 0
        codes = lose(run, rng.randrange(2), secs=rng.uniform(0.0, 0.1), lines=rng.randrange(1, 9))
        assert KILLED in codes, "or it died of something else"
        while len(found) < len(split_lives(events(run))):
            found.append(sealed(run))
    assert live_ranks(run) == [0, 0], output(run)
    lives = split_lives(events(run))
    back = [(life[0]["step"], life[0].get("lost", 0)) for life in lives]
    print(f"{policy} {seed}: came back to {back}, computed again {recomputed(run)}")
    assert len(found) == KILLS == len(lives) - 1
    late = False
    for (base, before), there, (step, lost) in zip(back, found, back[1:], strict=False):
        assert there.whole is None or (step, lost) == (there.whole, before), said(run)
        if policy in SAVED_AT_EACH_STEP:
            newest = max(base or 0, there.due)
            assert (step or 0) >= newest, said(run)
            late |= newest < there.kept - 1
    if policy in SAVED_AT_EACH_STEP and not late:  # a busy machine may not have sealed the step before in time
        assert max(recomputed(run)) <= 1, said(run)
    assert any(there.whole for there in found), "or this shows nothing"
    assert_none_torn(run, [None, *(there.steps for there in found)])
    assert left(run) == []
    if not back[-1][1]:
        assert_same_run(run, unwritten=ANY)


def assert_none_torn(run: Run, held: list[frozenset[int] | None]) -> None:
    """Each life began with all of one step but experts, and each of those as of one step that there was.

    Args:
        held: Of each life, the steps that survivors of the one before had all experts of.
    """
    lives = [{life[0]["job"]: life for life in split_lives(events(run, rank))} for rank in range(2)]
    experts: dict[int, dict[str, str]] = {}
    rest: dict[tuple[int, int], str] = {}  # has a buffer that each rank has for itself
    for (job, life), survivors in zip(lives[0].items(), held, strict=True):
        of = {rank: found[job] for rank, found in enumerate(lives) if job in found}
        step = life[0]["step"] or 0
        experts = {at: told for at, told in experts.items() if at <= step}
        rest = {(at, rank): told for (at, rank), told in rest.items() if at <= step}
        for rank, lines in of.items():
            # None where a window is computed again first, and nobody wrote down what was before the first step.
            hashes = dict(lines[0].get("hashes", {})) if step else {}
            if "non_expert" in hashes:  # a rank that died before it wrote the step down cannot be compared
                assert rest.get((step, rank), hashes["non_expert"]) == hashes.pop("non_expert"), f"{rank}, step {step}"
            versions = {name: [at for at in experts if experts[at][name] == told] for name, told in hashes.items()}
            assert all(versions.values()), f"rank {rank}, step {step}: experts as of no step that ever was: {versions}"
            stale = {name: max(at) for name, at in versions.items() if max(at) < step}
            assert not stale or survivors is None or step not in survivors, f"step {step}: {stale}; a survivor had all"
            for line in lines:
                if line["event"] == "batch" and line["step"] > step:  # until then a window is computed again
                    hashes = dict(line["hashes"])
                    rest[line["step"], rank] = hashes.pop("non_expert")
                    assert experts.setdefault(line["step"], hashes) == hashes, "both ranks hold the same"
