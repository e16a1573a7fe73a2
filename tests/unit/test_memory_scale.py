"""What a step's checkpoint in memory asks of one rank does not grow with the number of ranks: counted, not timed.

The agreement that its numbers ride on does: ``test_tree`` and ``dist/test_agreement_tree`` count its messages.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from moe_ckpt.format.slot import decode_slot
from moe_ckpt.memory.slot import Slot
from moe_ckpt.peers.wire import Wire
from tests.unit.engine_parts import ThreadCommunicator
from tests.unit.test_engine_memory_only import (
    make_nodes,
    no_memory_of_other_tests,  # noqa: F401 - a fixture
    replicated,
    where,  # noqa: F401 - a fixture
)

STEPS = 12
ASKED = ("agree", "everyone", "broadcast", "swap", "combine", "announce")


@pytest.fixture
def asked(monkeypatch) -> Counter[str]:
    """Calls of rank 0 in which it waits for other ranks, and the most numbers that one of them carried."""
    found: Counter[str] = Counter()

    def counted(name: str) -> None:
        plain = getattr(ThreadCommunicator, name)

        def call(self, *args: Any) -> Any:
            if self.rank == 0:
                found[name] += 1
                if name == "agree":
                    found["numbers"] = max(found["numbers"], len(args[1].reshape(-1)))
            return plain(self, *args)

        monkeypatch.setattr(ThreadCommunicator, name, call)

    for name in ASKED:
        counted(name)
    return found


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Bytes of each call that sends a part of a copy, on any rank."""
    found: list[int] = []
    plain = Wire.send

    def send(self, data: Any) -> Any:
        found.append(memoryview(data).nbytes)
        return plain(self, data)

    monkeypatch.setattr(Wire, "send", send)
    return found


@pytest.fixture
def copied(monkeypatch) -> Counter[int]:
    """Rank -> bytes of its own shares that it has sealed: what its training thread had copied."""
    found: Counter[int] = Counter()
    plain = Slot.seal

    def seal(self, header: bytes) -> None:
        told = decode_slot(header, str(self.path))
        if self.path.parent.name == f"rank_{told.rank:05d}":
            found[told.rank] += told.nbytes
        plain(self, header)

    monkeypatch.setattr(Slot, "seal", seal)
    return found


def test_a_step_asks_a_rank_for_as_much_among_two_ranks_as_among_eight(
    where,  # noqa: F811
    tmp_path,
    asked,
    sent,
    copied,
):
    """Steps of which storage has none: two lives of different length differ by just these."""
    per_step, bytes_per_rank, most_copied = {}, {}, {}
    for count in (2, 4, 8):
        told = []
        for steps in (4, STEPS):
            nodes = make_nodes(_made(tmp_path / f"{count}_{steps}"), count)
            asked.clear()
            sent.clear()
            copied.clear()
            replicated((tmp_path / f"store_{count}_{steps}", where[1]), nodes, steps=steps)
            told.append((asked.copy(), sum(sent) / count, copied.copy()))
        (short, few, copied_in_short), (long, many, copied_in_long) = told
        per_step[count] = {name: long[name] - short[name] for name in ASKED} | {"numbers": long["numbers"]}
        bytes_per_rank[count] = (many - few) / (STEPS - 4)
        assert copied_in_long.keys() == set(range(count))
        most_copied[count] = max((copied_in_long - copied_in_short).values()) / (STEPS - 4)
    assert per_step[2] == per_step[4] == per_step[8], per_step
    assert {name for name in ASKED if per_step[2][name]} == {"agree"}, "with the token counts that ranks tell anyway"
    assert bytes_per_rank[8] <= 1.1 * bytes_per_rank[2], "one copy each, however many there are"
    assert 0 < most_copied[8] < most_copied[4] < most_copied[2], f"ranks divide what all of them hold: {most_copied}"


def _made(directory):
    directory.mkdir()
    return directory
