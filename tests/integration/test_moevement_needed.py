"""What exact recovery from a sparse window needs: without any one of these things the run ends otherwise.

They are listed in docs/moevement.md ("Coming back"); the paper leaves them out. Each case is one run that is killed,
and comes back twice from the same store: once as it should, equal to the last bit to the run that never failed, and
once with one thing left out (``sabotage``), in real processes. Then something must differ: the state at the end or the
loss of a batch; or the replay itself must say that it does not repeat what was recorded.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moe_ckpt.errors import ReplayDivergedError
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_run,
    differences,
    events,
    exit_code,
    live,
    load,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
    undisturbed,
)

BASE = Run(None, policy=("moevement", 3), epochs=3, callback={"when_busy": "wait"})
CLIPPED = {"gradient_clip_val": 0.3}
LISTED = {"stacked": False}


@dataclass(frozen=True)
class Case:
    """One thing that is needed.

    wrong, at_first: what the life that comes back, or the first one, does wrong. always: what both of those that come
        back do.
    batch: in which the first life is killed.
    diverged: what the replay itself finds, or "" if only the end shows it.
    shows: the beginning of a key of the final state that must differ.
    """

    run: Run
    wrong: str = ""
    at_first: str = ""
    always: str = ""
    batch: int = 17
    diverged: str = ""
    shows: str = "model/"


CASES = {
    "2 learning rates": Case(BASE, "hyperparameters not loaded", diverged="hyperparameters of the optimizers"),
    "2 learning rates, unchecked": Case(BASE, "hyperparameters not loaded,unchecked"),
    "2 schedulers": Case(BASE, "schedulers not loaded", diverged="learning rate schedulers"),
    "2 schedulers, unchecked": Case(BASE, "schedulers not loaded,unchecked"),
    "2 step counts": Case(BASE, "steps not loaded"),
    "3 data order": Case(BASE, "position not loaded"),
    "3 random numbers": Case(BASE, "rng not restored", diverged="random number generators"),
    "3 random numbers, unchecked": Case(BASE, "rng not restored,unchecked"),
    "4 router state": Case(replace(BASE, kind="biased"), "router state not loaded", shows="model/blocks.0.moe.experts"),
    "5 compute types": Case(replace(BASE, trainer={"precision": "bf16-mixed"}), at_first="frozen in bf16", batch=20),
    "5 compute types, listed": Case(
        replace(BASE, model=LISTED, trainer={"precision": "bf16-mixed"}), at_first="frozen in bf16", batch=20
    ),
    "6 slices of a stack": Case(BASE, "slices not replaced"),
    "6 slices of a stack, clipped": Case(
        replace(BASE, policy=("moevement", 5), trainer=CLIPPED), "slices not replaced"
    ),
    "7 step 0": Case(BASE, at_first="no step 0", always="other weights", batch=3),
}
FAST = ("2 step counts", "6 slices of a stack", "7 step 0")
"""The others take a minute."""


def _first_life(run: Run, batch: int, wrong: str) -> None:
    assert live(replace(run, crash=("compute", batch), sabotage=wrong)) == KILLED, output(run)


def _copied(run: Run, directory: Path) -> Run:
    """The same killed run once more, to come back from where it was left."""
    copy = placed(run, directory, "copy")
    shutil.copytree(run.store, copy.store)
    shutil.copy(run.log, copy.log)
    return copy


def _assert_needed(case: Case, place: Path) -> None:  # noqa: F811
    right = placed(case.run, place, "right")
    _first_life(right, case.batch, "")
    wrong = _copied(right, place) if not case.at_first else placed(case.run, place, "wrong")
    if case.at_first:
        _first_life(wrong, case.batch, case.at_first)
    assert live(replace(right, sabotage=case.always)) == 0, output(right)
    assert_same_run(right)
    assert split_lives(events(right))[-1][0]["step"] is not None, "nothing was restored"
    code = exit_code(replace(wrong, sabotage=",".join(filter(None, [case.always, case.wrong]))))
    if case.diverged:
        assert code == 1, output(wrong)
        last = output(wrong).strip().splitlines()[-1]
        assert ReplayDivergedError.__name__ in last, last
        assert case.diverged in last, last
        return
    assert code == 0, output(wrong)
    found = list(differences(load(wrong), undisturbed(case.run)[0][0]))
    print(f"{len(found)} differences, such as {found[:3]}")
    assert any(f.startswith(f"/{case.shows}") for f in found), found


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_needed(name, place):  # noqa: F811
    _assert_needed(CASES[name], place)
