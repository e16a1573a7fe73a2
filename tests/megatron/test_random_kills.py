"""Ranks and nodes of Megatron runs are killed whenever it happens: in a pass, an update, a copy, while they come back.

Gradient logs end as if nobody had been killed. Policies that save some experts only go on from states that each rank
had: no expert, and nothing else, is torn between two steps.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.cli.main import main
from moe_ckpt.memory.slot import Slot
from tests.megatron.exactness import Case, Ended, finish, one_life, require_exact, split_lives
from tests.megatron.test_exact import (
    BF16,
    EXPERTS_DATA,
    GROUPED,
    PIPELINE_EXPERTS,
    SHARDED,
    SKIPS,
    TENSOR_EXPERTS,
)
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Journal
from tests.support.processes import Outcome

RANKS = range(4)
LIVES = 6
STEPS = 40
NEVER = (0, 10**6, "never")
RARELY = {"storage_every": 1000}
LOGS = {
    "pp2-ep2": Setup(**PIPELINE_EXPERTS, **BF16, tied=True),
    "ep2-dp2": Setup(**EXPERTS_DATA),
    "ep2-dp2-sharded": Setup(**EXPERTS_DATA, **GROUPED, **SHARDED),
    "tp2-ep2": Setup(**TENSOR_EXPERTS, **SKIPS, **SHARDED),
}
SOME = {
    "dense": ("Dense", {"every_n_steps": 1}),
    "moc": ("MoC", {"k": 1}),
    "moetion": ("MoEtion", {"experts": 1}),
}
HELD = {"ep2-dp2": Setup(**EXPERTS_DATA), "pp2-ep2": Setup(**PIPELINE_EXPERTS)}
SEEDS, LEAST_KILLS = range(6), 3
assert LEAST_KILLS * len(SEEDS) * len(SOME) * len(HELD) >= 100


def drawn(rng: random.Random) -> tuple[int, ...]:
    """One rank, several, or those of a node."""
    return rng.choice([(rng.randrange(4),), tuple(rng.sample(RANKS, 2)), (0, 1), (2, 3)])


def retry(directory: Path) -> None:
    """Three starts in a row may be killed before they get anywhere; a user would look into that."""
    for node in (directory / "memory").glob("node_*"):
        assert main(["memory", "retry", "--directory", str(node)]) == 0


def killed(outcomes: Sequence[Outcome]) -> set[int]:
    return {rank for rank in RANKS if outcomes[rank].exitcode == -signal.SIGKILL}


def ended(case: Case, directory: Path, outcomes: Sequence[Outcome]) -> Ended:
    """Of a last life in which the kill came too late."""
    lines = Journal(str(directory / "journal"), case.ranks - 1).lines()
    return Ended([outcome.value for outcome in outcomes], split_lives(lines))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", LOGS)
def test_gradient_logs(name, seed, tmp_path):
    rng = random.Random(f"{name} {seed}")
    copies = {**RARELY, "replicas": seed % 2}
    policy = "GradientLog", {"window": rng.randint(2, 4)}
    beside = {"memory": True, "copies": copies, "survives": seed % 3 > 0, "reseed": False}
    case = Case(LOGS[name], policy, (), steps=STEPS, **beside)
    kills, lost, on_both = 0, 0, True
    for number in range(LIVES):
        retry(tmp_path)
        ranks = drawn(rng)
        outcomes = one_life(case, tmp_path, number, (rng.uniform(0.05, 2.5), ranks))
        kills += len(killed(outcomes))
        on_both = on_both or is_on_both_nodes(tmp_path)
        if all(outcome.ok for outcome in outcomes):
            found = ended(case, tmp_path, outcomes)
            break
        if copies["replicas"] and ranks in ((0, 1), (2, 3)) and rng.random() < 0.5 and on_both:
            delete_tree(tmp_path / "memory" / f"node_{ranks[0] // 2}")
            lost, on_both = lost + 1, False
    else:
        found = finish(replace(case, kills=(NEVER,) * LIVES), tmp_path)
    print(f"{name} {seed}: {kills} kills, {lost} nodes lost, computed again {again(tmp_path)}")
    assert kills
    require_exact(case, tmp_path, found)
    assert max(again(tmp_path)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", HELD)
@pytest.mark.parametrize("policy", SOME)
def test_survivors_of_other_policies(policy, layout, seed, tmp_path):
    """MoC and MoEtion: experts are stale only if nobody that lived on held them."""
    rng = random.Random(f"{policy} {layout} {seed}")
    beside = {"memory": True, "copies": RARELY, "survives": True, "digests": True, "reseed": False}
    case = Case(HELD[layout], SOME[policy], (), steps=2 * STEPS, **beside)
    kills, kept = 0, {}
    for number in range(LIVES):
        retry(tmp_path)
        outcomes = one_life(case, tmp_path, number, (rng.uniform(0.05, 2.5), drawn(rng)))
        kills += len(killed(outcomes))
        if all(outcome.ok for outcome in outcomes):
            found = ended(case, tmp_path, outcomes)
            break
        kept[number + 1] = kept_by(tmp_path)
    else:
        found = finish(replace(case, kills=(NEVER,) * LIVES), tmp_path)
    print(f"{policy} {layout} {seed}: {kills} kills, computed again {again(tmp_path)}")
    assert kills >= LEAST_KILLS
    require_none_torn(tmp_path, kept)
    assert max(again(tmp_path)) <= 1
    if policy == "dense":
        require_exact(case, tmp_path, found)


def is_on_both_nodes(directory: Path) -> bool:
    """Whether the newest life has saved a step of which each node has every rank's share, its own or a copy.

    After the loss of a node the other one alone has the run, until then: nobody could stand its loss, too.
    """
    found = [(path, Slot.open(path)[1]) for path in (directory / "memory").rglob("*.head")]
    newest = max((header.identity.generation for _, header in found), default=0)
    shares: dict[tuple[str, int], set[int]] = {}
    for path, header in found:
        if header.identity.generation == newest and header.sealer is None:
            node = path.relative_to(directory / "memory").parts[0]
            shares.setdefault((node, header.identity.number), set()).add(header.rank)
    return len({node for (node, _), ranks in shares.items() if ranks == set(RANKS)}) == 2


def lives_of(directory: Path, rank: int) -> dict[int, list[dict[str, Any]]]:
    """Number of a life -> this rank's lines of it, if it resumed there."""
    lives = split_lives(Journal(str(directory / "journal"), rank).lines())
    return {life[0]["life"]: life for life in lives}


def again(directory: Path) -> list[int]:
    """Of each life but the first: iterations that some rank had ended, and that it computed again."""
    lives = [lives_of(directory, rank) for rank in RANKS]
    found, reached = [], 0
    for number in sorted(set().union(*lives)):
        there = [life[number] for life in lives if number in life]
        [resumed] = {life[0]["resumed"] for life in there}
        found.append(max(0, reached - resumed))
        reached = max([resumed, *(line["updated"] for life in there for line in life if "updated" in line)])
    return found[1:] or [0]


def kept_by(directory: Path) -> dict[int, int]:
    """Rank -> step that it sealed of the newest life, when it heard of the death of another one."""
    headers = [Slot.open(path)[1] for path in (directory / "memory").rglob("*.head")]
    newest = max((header.identity.generation for header in headers), default=0)
    own = [h for h in headers if h.sealer == h.rank and not h.only]
    return {header.rank: header.step for header in own if header.identity.generation == newest}


def require_none_torn(directory: Path, kept: dict[int, dict[int, int]]) -> None:
    """Each life began with all of one step but experts, and each of those as of one step that its rank had."""
    versions: dict[int, dict[str, set[int]]] = {}
    resumed: dict[int, int] = {}
    for rank in RANKS:
        history: dict[int, dict[str, str]] = {}
        for number, life in sorted(lives_of(directory, rank).items()):
            step, digests = life[0]["resumed"], life[0]["digests"]
            assert resumed.setdefault(number, step) == step
            history = {at: told for at, told in history.items() if at <= step}
            if step:
                assert digests["rest"] == history[step]["rest"], f"rank {rank}, life {number}, step {step}"
                for name in digests.keys() - {"rest"}:
                    had = [at for at, told in history.items() if told.get(name) == digests[name]]
                    assert had, f"rank {rank}, life {number}: expert {name} is torn, or of no step that ever was"
                    versions.setdefault(number, {}).setdefault(f"{name} on {rank}", set()).add(max(had))
            history[step] = digests
            history |= {line["final"]: line["digests"] for line in life if "final" in line}
    for number, sealed in kept.items():
        for name, found in versions.get(number, {}).items():
            expert = name.partition(" on ")[0]
            holders = [r for r in RANKS if f"{expert} on {r}" in versions[number]]
            if any(sealed.get(holder) == resumed[number] for holder in holders):
                assert found == {resumed[number]}, f"life {number}: {name} is stale, though one of {holders} had it"
