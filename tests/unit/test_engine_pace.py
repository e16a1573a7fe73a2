"""Storage that sets the pace of training is said once, when it has been so for a while."""

from __future__ import annotations

import pytest

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.policies.base import Measured
from moe_ckpt.run.options import Settings
from moe_ckpt.session.backlog import _NOTABLE, _WAITS, Backlog


def waits(pace: Backlog, number: int, every_secs: float, secs: float) -> None:
    for at in range(number):
        began = at * every_secs
        pace.note_wait(began, began + secs, Measured(persist_secs=0.5))


@pytest.mark.parametrize(
    ("number", "share", "said"),
    [(_WAITS - 1, 0.9, 0), (_WAITS, _NOTABLE * 0.7, 0), (_WAITS, _NOTABLE * 1.1, 1), (5 * _WAITS, 0.5, 1)],
)
def test_it_takes_many_waits_and_a_notable_share_of_the_time(caplog, number, share, said):
    waits(Backlog(Settings(), SoloCommunicator(), windows=True), number, every_secs=2.0, secs=2.0 * share)
    assert caplog.text.count("training waits for storage") == said
    if said:
        assert "takes 0.50 s for a part" in caplog.text
        assert "memory=moe_ckpt.Memory()" in caplog.text
