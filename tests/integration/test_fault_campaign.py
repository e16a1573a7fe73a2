"""A few seeds of the campaign of faults, and that its judge sees what is wrong."""

from __future__ import annotations

import pytest

from benchmarks import faults
from benchmarks.faults_check import History, Wrong
from benchmarks.faults_life import COUNTS, EXPERTS, LAYERS, REST

OPERATORS = [REST, *(f"{layer}/{expert}" for layer in range(LAYERS) for expert in range(EXPERTS))]


def test_seeds_of_the_campaign(capfd):
    outcomes = faults.campaign((3, 13), 5.0, None, 2)
    assert [outcome.wrong for outcome in outcomes] == ["", ""], capfd.readouterr().err
    assert sum(len(outcome.backs) for outcome in outcomes) >= 6, "or it shows little"


def sums(step: int, **others: int) -> dict[str, int]:
    return {operator: 100 * step + at for at, operator in enumerate(OPERATORS)} | {COUNTS: step} | others


def step(at: int, **more: object) -> dict[str, object]:
    routed = [[at, 1, 1, 1]] * LAYERS
    known = {"event": "step", "step": at, "loss": f"{at}", "sums": sums(at), "routed": routed, "replayed": False}
    return known | {"stored": at - 1, "sealed": 0} | more


def start(at: int, **more: object) -> dict[str, object]:
    return {"event": "start", "step": at, "replays": False, "sums": sums(at), "applied": [], "faults": []} | more


def told(policy: str, *second: dict[str, object], required: int = 0) -> History:
    """Two lives of one rank: the first makes four steps."""
    reference = {at: {"loss": f"{at}", "sums": sums(at), "routed": [at, 1, 1, 1] * LAYERS} for at in range(1, 9)}
    history = History(reference, sharded=False)
    history.life([[start(0), *map(step, range(1, 5))]], policy, 0, same=True)
    assert (history.newest, history.stored) == (4, 3)
    history.life([list(second)], policy, required, same=True)
    return history


BOOKS = {"applied": [[10, 4, 4, 4]] * LAYERS, "faults": [[4, 7, 1]]}


@pytest.mark.parametrize(
    ("policy", "second", "required", "said"),
    [
        ("Dense", [start(4)], 4, ""),
        ("Dense", [start(3), step(4), step(5)], 3, ""),
        ("Dense", [start(3)], 4, "step 4 was acknowledged, and the run came back to step 3"),
        ("Dense", [start(7)], 0, "came back to step 7, and its newest finished one is 4"),
        ("Dense", [start(4, sums=sums(4, **{"0/1": 302}))], 0, "0/1 came back as of step 3"),
        ("Dense", [start(4, sums=sums(4, **{"0/1": 1}))], 0, "0/1 came back as it never was"),
        ("Dense", [start(4), step(5, loss="6")], 0, "the loss of step 5 differs"),
        ("Dense", [start(4), step(5, sums=sums(6))], 0, "the state of step 5 differs"),
        ("MoC", [start(4, sums=sums(4, **{"0/0": 201}), **BOOKS)], 0, ""),
        ("MoC", [start(4, sums=sums(4, **{REST: 300}), **BOOKS)], 0, "non_expert came back as of step 3"),
        ("MoC", [start(4, sums=sums(4, **{"0/0": 301}), **BOOKS)], 0, "the books have the failures [[4, 7, 1]]"),
        ("MoC", [start(4, sums=sums(4), **(BOOKS | {"applied": [[9, 4, 4, 4]] * LAYERS}))], 0, "were routed"),
    ],
)
def test_the_judge(policy, second, required, said):
    """One promise each, kept or not."""
    if not said:
        told(policy, *second, required=required)
        return
    with pytest.raises(Wrong) as wrong:
        told(policy, *second, required=required)
    assert said in str(wrong.value)
