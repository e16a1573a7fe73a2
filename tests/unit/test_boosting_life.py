"""The life of a boost on one rank: begun by what experts lack, given up where no router asks, ended by itself."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_ckpt.boost.life import Boosting
from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.run_ledger import RunLedger
from tests.unit.builders import catalog

LACKING = np.array([[6, 0, 0, 0], [0, 0, 3, 0]])
SCORES = torch.tensor([[1.0, 0.5, 0.0, 0.0]] * 4 + [[0.0, 1.0, 0.9, 0.0]] * 4)


class Port:
    """Of a router that asks when the test says so."""

    experts, router = 4, "Gate"

    def __init__(self, layer: str, why: str | None = None) -> None:
        self.layer, self.why, self.boost = layer, why, None

    def refusal(self):
        return self.why

    def attach(self, boost):
        self.boost = boost

    def detach(self):
        self.boost = None

    def ask(self) -> int:
        """Tokens that the busiest experts get beyond four."""
        chosen = SCORES.argmax(dim=-1, keepdim=True)
        found = chosen if self.boost is None else self.boost.select(SCORES, chosen)
        return int((found == 0).sum()) - 4


def begun(ports, boost=0.5, plain=None, lacking=LACKING):
    ledger = RunLedger(catalog(2, 4))
    boosting = Boosting(boost, dict(enumerate(ports)), (2, 4), SoloCommunicator())
    boosting.begin(plain or {}, SimpleNamespace(lacking=lacking), ledger, SimpleNamespace(world_size=1), None)
    return boosting, ledger


def stepped(boosting, ledger, *, updated=True) -> np.ndarray | None:
    """A step ends, and the ranks have agreed on it."""
    tokens = Deferred(lambda: StepTokens(np.zeros((2, 4), dtype=np.int64)))
    owed = boosting.step_ends(tokens, updated=updated).result().deficit
    if owed is not None:
        ledger.deficit = owed
    return owed


@pytest.mark.parametrize("left_out", [False, Deferred(lambda: False)], ids=["known", "a device tells"])
def test_it_begins_with_what_experts_lack_and_ends_when_that_is_made_up(left_out):
    ports = [Port("first"), Port("second")]
    boosting, ledger = begun(ports)
    assert ledger.deficit.tolist() == LACKING.tolist()
    assert [ports[0].ask(), ports[0].ask()] == [2, 2]
    ports[1].ask()
    assert stepped(boosting, ledger, updated=left_out).tolist() == LACKING.tolist(), "an update that was left out"
    assert [ports[0].ask(), ports[0].ask()] == [2, 2]
    assert stepped(boosting, ledger)[0].tolist() == [2, 0, 0, 0]
    saved = boosting.captured()
    assert [ports[0].ask(), ports[0].ask()] == [2, 0]
    assert stepped(boosting, ledger)[0].sum() == 0
    again, _ = begun([Port("first"), Port("second")], plain=saved, lacking=None)
    assert again.captured()["boost"]["left"]["0"].tolist() == [2, 0, 0, 0], "as it was at that step"
    while ports[1].boost is not None and ledger.deficit.any():
        ports[1].boost.extra(torch.tensor([0, 0, 1, 0]), torch.tensor([9, 9, 0, 9]), 4)
        stepped(boosting, ledger)
    assert stepped(boosting, ledger) is None
    assert boosting.captured() == {}
    assert ports[0].boost is ports[1].boost is None


ENDED = {"0": torch.zeros(4, dtype=torch.int64)}


@pytest.mark.parametrize("stored", [{}, *({"boost": {"left": left, "carried": left}} for left in ({}, ENDED))])
def test_nothing_begins_where_nothing_is_lacking(stored):
    for lacking in (np.zeros((2, 4), dtype=np.int64), None):
        ports = [Port("first"), Port("second")]
        boosting, ledger = begun(ports, 0.5, stored, lacking)
        assert ledger.deficit is None
        assert boosting.captured() == {}
        assert stepped(boosting, ledger) is None
        assert ports[0].boost is None


def test_routers_that_cannot_or_do_not_ask_are_named_and_the_others_are_boosted(caplog):
    ports = [Port("first", why="it is made of wood. Take another"), Port("second")]
    with caplog.at_level(logging.WARNING, logger="moe_ckpt"):
        boosting, ledger = begun(ports)
    assert "in MoE layer first, whose stale experts continue without it: its router, Gate, does not" in caplog.text
    assert "it is made of wood. Take another" in caplog.text
    assert ledger.deficit.tolist() == [[0] * 4, LACKING[1].tolist()]
    assert stepped(boosting, ledger, updated=False).any(), "nothing was trained yet"
    with caplog.at_level(logging.WARNING, logger="moe_ckpt"):
        assert not stepped(boosting, ledger).any()
    assert "in MoE layer second" in caplog.text
    assert "it ran a training step without reading moe_boost" in caplog.text
    assert stepped(boosting, ledger) is None
    assert ports[1].boost is None
