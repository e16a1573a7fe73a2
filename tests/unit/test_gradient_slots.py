"""Gradients of a log in slots of their own: which of them must stay, and what memory then holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from moe_ckpt.core.step import Step
from moe_ckpt.format.slot import GRADIENTS
from moe_ckpt.ledger.ledger import MOST_SLOTS, NEVER, Anchors
from moe_ckpt.ledger.retention import MemoryStep, is_live, live_groups, needed_steps, newest_checkpoint
from moe_ckpt.policies.gradient_log import held_bytes_per_parameter, most_held_bytes_per_parameter
from moe_ckpt.reading.memory.memory_shares import Share, checkpoints_of, without_damaged
from tests.unit.builders import catalog, memory_step


@dataclass
class Memory:
    """What one rank's memory keeps of a log, by the library's rules, and beside each step what it was made from."""

    book: Anchors
    steps: dict[int, MemoryStep] = field(default_factory=dict)
    slots: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    groups: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    anchored: dict[int, dict[str, int]] = field(default_factory=dict)
    everything: tuple[str, ...] = ()

    def save(self, sequence: int, full: tuple[str, ...], together=(), *, copied: bool = True) -> bool:
        """Begins a snapshot; False if it has no chain, so that all must be saved."""
        logged = tuple(op for op in self.everything if op not in full)
        since = self.book.since(sequence, full) if logged else None
        if logged and since is None:
            return False
        found = self.book.grouped(logged)
        self.groups[sequence] = found.groups
        slot_of = dict(zip(self.everything, found.slot_of.tolist(), strict=True))
        for at in range(len(found.groups)):
            self.slots[sequence, at] = frozenset(op for op in logged if slot_of[op] == at)
        self.book.begun(sequence, sequence, full, together=together)
        anchors = dict(zip(self.everything, self.book.steps.tolist(), strict=True))
        self.anchored[sequence] = anchors
        self.steps[sequence] = memory_step(sequence, since=since, groups=found.groups, copied=copied)
        return True

    def settle(self, sequence: int, *, complete: bool, copied: bool) -> None:
        """All ranks know what became of a snapshot: what is not needed goes."""
        self.steps[sequence] = replace(self.steps[sequence], complete=complete, copied=copied and complete)
        if not complete:
            self.book.broken(sequence)
        kept = needed_steps(self.steps.values())
        live = live_groups(self.steps.values())
        for key in [key for key in self.steps if key not in kept and self.steps[key].complete is not None]:
            del self.steps[key]
        for key in list(self.slots):
            step = self.steps.get(key[0])
            if step is None or not is_live(step, self.groups[key[0]][key[1]], live):
                del self.slots[key]

    def require(self, last: MemoryStep) -> None:
        """Everything that leads to a step is there: for each operator its gradients since its anchor."""
        for operator, anchor in self.anchored[last.number].items():
            assert anchor != NEVER
            assert anchor in self.steps
            for sequence in range(anchor + 1, last.number + 1):
                there = (ops for key, ops in self.slots.items() if key[0] == sequence)
                assert any(operator in ops for ops in there), (operator, anchor, sequence, last)


def checkpoints(memory: Memory) -> list[MemoryStep]:
    steps = [step for step in memory.steps.values() if step.complete is not False]
    found = (newest_checkpoint(those) for those in (steps, [step for step in steps if step.copied]))
    return [each[-1] for each in found if each]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_anchored_and_lost_the_newest_checkpoints_keep_their_gradients(seed):
    """Any operators are anchored at any step, snapshots become complete late and out of order, fail, or miss peers."""
    rng = random.Random(seed)
    model = catalog(rng.randint(1, 3), rng.randint(1, 8))
    memory = Memory(Anchors(model), everything=model.everything)
    waiting: list[int] = []
    for sequence in range(60):
        full = tuple(op for op in model.everything if rng.random() < 0.3) or model.everything[:1]
        if rng.random() < 0.1 or not memory.save(sequence, full):
            shuffled = rng.sample(model.everything, len(model.everything))
            cut = rng.randint(0, len(shuffled))
            assert memory.save(sequence, model.everything, [tuple(shuffled[:cut]), tuple(shuffled[cut:])])
        waiting.append(sequence)
        while waiting and rng.random() < 0.6:
            done = waiting.pop(rng.randrange(min(2, len(waiting))))
            memory.settle(done, complete=rng.random() < 0.93, copied=rng.random() < 0.8)
            for last in checkpoints(memory):
                memory.require(last)


def rolling(window: int, groups: int, steps: int, dense_every: int) -> list[tuple[int, float]]:
    """(steps since a dense one, bytes per parameter) that memory holds after each step, all groups being equal."""
    model = catalog(1, groups - 2)  # a gate and the rest beside the experts
    assert len(model.everything) == groups
    round_ = [model.everything[at * groups // window : (at + 1) * groups // window] for at in range(window)]
    memory = Memory(Anchors(model), everything=model.everything)
    found, dense = [], 0
    for sequence in range(steps):
        if sequence % dense_every == 0:
            dense = sequence
            assert memory.save(sequence, model.everything, round_)
        else:
            assert memory.save(sequence, round_[(sequence - dense - 1) % window])
        memory.settle(sequence, complete=True, copied=True)
        gradients = sum(len(operators) for operators in memory.slots.values())
        whole = [each for each in memory.steps if each % dense_every == 0]
        anchors = groups * len(whole) + sum(groups / window for each in memory.steps if each not in whole)
        found.append((sequence - dense, (12 * anchors + 4 * gradients) / groups))
    return found


@pytest.mark.parametrize(("window", "groups"), [(1, 4), (2, 4), (5, 5), (5, 20), (16, 16), (32, 32)])
def test_memory_holds_what_the_formulas_say(window, groups):
    held = rolling(window, groups, 4 * window + 7, 3 * window + 3)
    steady = [nbytes for since, nbytes in held if since >= window]
    near = {"rel": 1e-9 if window <= MOST_SLOTS else 0.005}  # else two and two share a slot, and one is alone
    assert steady == pytest.approx([held_bytes_per_parameter(window, 4.0)] * len(steady), **near)
    assert max(nbytes for _, nbytes in held) == pytest.approx(most_held_bytes_per_parameter(window, 4.0), **near)
    if window == 5:
        assert steady[0] == pytest.approx(20.0), "28 where all of a step stays or goes"


def test_a_step_has_so_many_slots_at_most():
    model = catalog(2, 40)
    book = Anchors(model)
    book.begun(0, 0, model.everything, together=[(op,) for op in model.everything])
    found = book.grouped(model.everything[3:])
    assert len(found.groups) == MOST_SLOTS
    numbers = [number for each in found.groups for number in each]
    assert numbers == sorted(numbers), "those that were anchored together first lie together"
    assert len(numbers) == len(model.everything) - 3
    assert found.slot_of[:3].tolist() == [NEVER] * 3
    assert set(found.slot_of[3:].tolist()) == set(range(MOST_SLOTS))


def share(sequence: int, writer: int = 0, **more) -> Share:
    return Share(writer, "node", 0, Step("run", "life", 0, sequence, sequence), writer, 1, None, "", **more)


def test_a_checkpoint_is_complete_with_the_gradients_that_lead_to_it_and_no_others():
    """Step 2 anchors group 1 anew; before it step 1 had gradients of groups 1 and 2, and of group 1 they are gone."""
    dense, first = share(0), share(1, since=0, groups=((1,), (2,)), pieces=(0, 1), held=(-1, 7))
    second = share(2, since=0, groups=((2,), (3,)), pieces=(0,), held=(8,))  # of group 3 this rank has nothing
    newest, older, oldest = checkpoints_of([dense, first, second])
    assert newest.is_complete
    assert [[held[0].key for held in slots[1:]] for slots in newest.slots()] == [
        [],
        [(0, GRADIENTS, 1)],
        [(0, GRADIENTS, 0)],
    ]
    assert newest.lost_writers == ()
    assert not older.is_complete, "it needs what is gone"
    assert older.lost_writers == (0,)
    assert oldest.is_complete
    numbers = [one.number for slots in newest.slots() for held in slots[1:] for one in held]
    assert numbers == [7, 8]
    for bad in (7, 8):
        lacking, *_ = checkpoints_of(without_damaged([dense, first, second], {(0, bad)}))
        assert not lacking.is_complete
        copy = replace(second if bad == 8 else first, holder=1, number=3, held=(4,) if bad == 8 else (-1, 4))
        found, *_ = checkpoints_of(without_damaged([dense, first, second, copy], {(0, bad)}))
        assert found.is_complete, "somebody else has a copy"
        gradients = [one for slots in found.slots() for held in slots for one in held if one.only == GRADIENTS]
        assert {one.number for one in gradients} == {15 - bad, 4}
