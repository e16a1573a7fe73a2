"""MoEtion by its own Algorithm 1, under Megatron, EP2 x DP2, each rank a node: what is left when a node is lost.

Which experts are saved is the policy's choice, from the tokens of a real run, for peers and for this node apart. Tokens
are counted at the experts' own input, and versions told by bytes, neither by the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_gpt import Setup
from tests.support.megatron_two_lives import RANKS, Expert, Lines, both_lives, holders_of, require_versions
from tests.support.recompute import ALL, SENT, Paced, experts_by, newest, plans

LAST = 10
MODEL = {"ep": 2, "layers": 2, "experts": 8, "num_microbatches": 2}
PLAIN = Setup(**MODEL)
SHARDED = Setup(**MODEL, dist_opt=True, precision="bf16")
Planned = dict[int, dict[str, list[str]]]


def name_of(expert: Expert) -> str:
    return f"expert/{expert[0]}/{expert[1]}"


def lives(root: Path, setup: Setup, lost: tuple[int, ...], **given: Any) -> tuple[Planned, list[Lines]]:
    """What was planned at each step, and what each rank wrote down; what came back is as it must be.

    given: to the policy.
    """
    written = [root / f"plans_{rank}.jsonl" for rank in range(RANKS)]
    policies = [Paced(told=str(each), **given) for each in written]
    told, lines = both_lives(root, setup, policies, LAST, lost)
    planned = plans(written[0])
    assert all(plans(each) == planned for each in written)
    [step] = {rank["step"] for rank in told}
    assert step >= LAST - 1
    wanted = {
        at: newest(planned, step, name_of(at), from_peers=bool(nodes & set(lost)))
        for at, nodes in holders_of(setup, lines).items()
    }
    assert min(wanted.values()) < max(wanted.values()) == step
    require_versions(told, lines, wanted, step)
    assert told[0]["lost"] > 0
    return planned, lines


def require_most_unsaved(setup: Setup, planned: Planned, lines: list[Lines], ways: Sequence[str]) -> None:
    """Of the experts of a layer that the same ranks own, those are saved that got most tokens since their last time.

    When a step is planned, tokens of the steps before it are known to all. ways: those of a set; what the set for peers
    has is in this node's in any case.
    """
    holders, compared = holders_of(setup, lines), 0
    owners = {at: (at[0], sorted(nodes)) for at, nodes in holders.items()}
    saved_at = dict.fromkeys(holders, 1)
    for step in range(2, LAST + 1):
        given = set() if ways == SENT else experts_by(planned[step], SENT)
        taken = experts_by(planned[step], ways)
        since = {at: tokens_of(lines, at, range(saved_at[at] + 1, step)) for at in holders if name_of(at) not in given}
        for _, group in groupby(sorted(since, key=lambda at: owners[at]), key=lambda at: owners[at]):
            inside = {at: name_of(at) in taken for at in group}
            if len(set(inside.values())) == 2:
                least = min(since[at] for at, saved in inside.items() if saved)
                most = max(since[at] for at, saved in inside.items() if not saved)
                assert least >= most, (step, {at: since[at] for at in inside}, taken)
                compared += least > most
        saved_at |= {at: step for at in holders if name_of(at) in taken}
    assert compared > LAST, "else hardly anything was chosen by tokens"


def tokens_of(lines: list[Lines], expert: Expert, steps: range) -> int:
    return sum(each[at - 1]["tokens"].get(f"{expert[0]}/{expert[1]}", 0) for each in lines for at in steps)


LOST = [(2,), *(pytest.param(lost, marks=pytest.mark.slow) for lost in ((), (1,)))]


@pytest.mark.parametrize("lost", LOST)
def test_what_peers_got_and_what_stayed_here_are_two_choices(lost: tuple[int, ...], tmp_path: Path):
    planned, lines = lives(tmp_path, SHARDED, lost)
    for step in range(2, LAST + 1):
        sent, here = (len(experts_by(planned[step], ways)) for ways in (SENT, ALL))
        assert 0 < sent < here < SHARDED.layers * SHARDED.experts, "each budget leaves experts out"
    require_most_unsaved(SHARDED, planned, lines, SENT)
    require_most_unsaved(SHARDED, planned, lines, ALL)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(2,), (), (1,)])
def test_peers_that_train_the_same_experts_have_one_choice(lost: tuple[int, ...], tmp_path: Path):
    planned, lines = lives(tmp_path, PLAIN, lost, copied=0.6)
    for step in range(2, LAST + 1):
        assert experts_by(planned[step], SENT) == experts_by(planned[step], ALL)
    require_most_unsaved(PLAIN, planned, lines, SENT)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(2,), (), (1,)])
def test_peers_get_gradients_of_what_is_chosen_again(lost: tuple[int, ...], tmp_path: Path):
    planned, _ = lives(tmp_path, SHARDED, lost, recompute=True)
    assert any(planned[step]["gradients"] for step in planned)
    for step in range(2, LAST + 1):
        assert 0 < len(experts_by(planned[step], SENT)) < len(experts_by(planned[step], ALL))
