"""Kill a rank of a real Megatron run, start the run again, and compare it with one that nobody killed.

Equal means: on every rank every tensor (weights, master weights, moments), step counts, hyperparameters, buffers, all
random number generators and the scheduler to the last bit, and every loss of every life.
"""

from __future__ import annotations

import functools
import re
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_ckpt.storage import open_storage
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import EXACT, Journal, Life, live
from tests.support.opened import shards_opened
from tests.support.processes import Outcome, run_ranks, start_ranks
from tests.support.verifying import verify_store

WARM = "tests.support.megatron_warm"
LIFE_SECS = 400.0

Kill = tuple[int, int, str]
"""(rank, iteration, phase): see ``Life.kill``."""


@dataclass(frozen=True)
class Case:
    """A run and where it is killed, one kill in each life but the last.

    reseed: each life builds the model from another seed, so that nothing comes out right that was not loaded. Not where
        a life is killed before its first checkpoint: the next one must begin as it did.
    memory: Snapshots lie in slots that survive their process.
    ranks_per_node: See ``Life``.
    copies: Other arguments of ``Memory``.
    options: Of ``megatron.attach``.
    survives: See ``Life``.
    together: Likewise, in the first life.
    digests: Likewise.
    """

    setup: Setup
    policy: tuple[str, Mapping[str, Any]]
    kills: tuple[Kill, ...]
    ranks: int = 4
    steps: int = 8
    reseed: bool = True
    memory: bool = False
    ranks_per_node: int = 2
    copies: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    survives: bool = False
    together: tuple[int, ...] = ()
    digests: bool = False


@dataclass(frozen=True)
class Ended:
    """results: of the last life, by rank. lives: journal of each life that was resumed, as the last rank kept it."""

    results: list[dict[str, Any]]
    lives: list[list[dict[str, Any]]]

    @property
    def resumed(self) -> list[int]:
        """The iteration that each life but the first began after."""
        return [life[0]["resumed"] for life in self.lives[1:]]

    @property
    def said(self) -> str:
        """What the library told the user where the last life came back, on all ranks."""
        return "\n".join(text for result in self.results for text in result["said"])

    def replayed(self, life: int) -> list[int]:
        """Iterations that a life computed again to bring back a window."""
        return [line["updated"] for line in self.lives[life] if line.get("replayed")]


@functools.cache
def uninterrupted(setup: Setup, ranks: int, steps: int) -> list[dict[str, Any]]:
    """What ``live`` returns on every rank when nothing is saved on the way and nobody is killed."""
    with tempfile.TemporaryDirectory() as directory:
        life = Life(directory, steps, setup, ("Dense", {"every_n_steps": 1_000_000}), options={"save_last": False})
        found = run_ranks(live, ranks, life, timeout=LIFE_SECS, preload=WARM)
    if setup.experts:
        require_telling(found)
    return found


def require_telling(results: Sequence[Mapping[str, Any]]) -> None:
    """No two experts are alike, so that a swap of two would be seen; copies of one are."""
    of: dict[str, set[str]] = {}
    for result in results:
        for key, value in result["tensors"].items():
            if ".experts." in key:
                of.setdefault(key, set()).add(value)
    assert of
    matrices: dict[str, list[str]] = {}
    for key, values in of.items():
        kind = re.sub(r"layers\.\d+|experts\.\d+", "*", key)
        matrices.setdefault(kind, []).extend(values)
    for kind, digests in matrices.items():
        assert len(set(digests)) == len(digests), f"two experts are alike in {kind}: a swap would pass unseen"


def check(case: Case, directory: Path) -> Ended:
    """Kill and start again as the case says, and demand that it ends as if nobody had killed it."""
    kill(case, directory)
    ended = finish(case, directory)
    require_exact(case, directory, ended)
    return ended


def kill(case: Case, directory: Path) -> None:
    """All lives of the run but the last."""
    for number, at in enumerate(case.kills):
        together = () if number else case.together
        life = replace(life_of(case, directory), kill=at, seed=1 + number * case.reseed, together=together)
        require_killed(start_ranks(live, case.ranks, life, timeout=LIFE_SECS, preload=WARM), at)


def one_life(case: Case, directory: Path, number: int, lost: tuple[float, tuple[int, ...]]) -> list[Outcome]:
    """A life in which ranks are lost so many seconds after they have resumed, wherever they are; see ``Life``."""
    life = replace(life_of(case, directory), lost=lost, seed=1 + number * case.reseed, number=number)
    return start_life(case, life)


def start_life(case: Case, life: Life) -> list[Outcome]:
    """A life, however it ends."""
    return start_ranks(live, case.ranks, life, timeout=LIFE_SECS, preload=WARM)


def finish(case: Case, directory: Path, sabotage: Callable[[], None] | None = None) -> Ended:
    """The last life, which nobody kills. sabotage: see ``Life``."""
    number = len(case.kills)
    life = replace(life_of(case, directory), seed=1 + number * case.reseed, sabotage=sabotage, number=number)
    results = run_ranks(live, case.ranks, life, timeout=LIFE_SECS, preload=WARM)
    return Ended(results, split_lives(Journal(life.journal, case.ranks - 1).lines()))


def life_of(case: Case, directory: Path) -> Life:
    policy = (case.policy[0], dict(case.policy[1]))
    memory = str(directory / "memory") if case.memory else None
    store, journal = str(directory / "store"), str(directory / "journal")
    beside: dict[str, Any] = {"copies": dict(case.copies), "options": dict(case.options)}
    beside["ranks_per_node"] = case.ranks_per_node
    beside |= {"journal": journal, "memory": memory, "survives": case.survives, "digests": case.digests}
    beside["opened"] = str(directory / "opened")
    return Life(store, case.steps, case.setup, policy, **beside)


def shards_read(case: Case, directory: Path) -> list[list[str]]:
    """Shards of the store that each rank opened to read, in all lives."""
    return shards_opened(str(directory / "opened"), case.ranks)


def require_exact(case: Case, directory: Path, ended: Ended) -> None:
    """It ended as if nobody had killed it, and left a sound store."""
    expected = uninterrupted(case.setup, case.ranks, case.steps)
    found = ended.results
    if ended.lives[-1][0]["resumed"] == case.steps:
        # A life that comes back to the end has no iteration left, whose beginning would set its random numbers.
        found = [{**mine, "rng": one["rng"]} for one, mine in zip(expected, found, strict=True)]
    require_equal(expected, found)
    require_losses(expected[-1]["losses"], ended.lives, case.steps)
    assert "other numbers of tokens than the first time" not in "".join(ended.results[0]["said_later"])
    assert verify_store(open_storage(str(directory / "store"))) == []


def split_lives(lines: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The journal's lines of each life that got as far as to be resumed."""
    found: list[list[dict[str, Any]]] = []
    for line in lines:
        if "resumed" in line:
            found.append([])
        found[-1].append(line)
    return found


def require_killed(outcomes: Sequence[Outcome], at: Kill) -> None:
    """The rank died where it was meant to, and nobody else went on to the end."""
    ended = [(outcome.exitcode, (outcome.error or "")[-1500:]) for outcome in outcomes]
    if at[2] not in ("error", "term", "stuck"):
        assert outcomes[at[0]].exitcode == -signal.SIGKILL, f"{at} was never reached: {ended}"
    assert not any(outcome.ok for outcome in outcomes), ended


def require_equal(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
    """Everything in ``EXACT``, on every rank, and the tokens that were routed: none are lost."""
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        for what in (*EXACT, "routed", "lost"):
            assert (differ := differing(one[what], other[what])) == [], f"rank {rank}: {what}: {differ}"


def differing(one: Any, other: Any) -> list[Any]:
    """Where two values differ: keys of mappings, else both values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return [key for key in sorted(one.keys() | other.keys()) if key not in one or one[key] != other.get(key)]
    return [] if one == other else [one, other]


def require_losses(expected: Mapping[int, float], lives: Sequence[Sequence[Mapping[str, Any]]], steps: int) -> None:
    """Every loss of every life is that of the unbroken run, and there are no gaps."""
    reached = 0
    for life in lives:
        at = life[0]["resumed"]
        assert at <= reached, f"a life went on after iteration {at}, which was never computed"
        for line in life:
            if "iteration" in line:
                at = line["iteration"]
                assert line["loss"] == expected[at].hex(), f"loss of iteration {at}"
                reached = max(reached, at)
    assert reached == steps
