"""One byte of any file that a life left, on storage or in memory, is another one: no wrong bit ever comes back.

A start takes an intact copy or an older one, or raises an error of this package.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt import Memory
from moe_ckpt.errors import MoECheckpointError
from moe_ckpt.memory.arena import ARENA
from moe_ckpt.policies import Dense, MoC, Policy
from moe_ckpt.reading import slices
from moe_ckpt.storage import LocalStorage
from tests.support.spoiled import bytes_of
from tests.unit.engine_parts import Life, steps_of_experts
from tests.unit.test_engine_host_tier import assert_state, come_back
from tests.unit.test_engine_memory import no_memory_of_other_tests  # noqa: F401 - a fixture

STEPS, FLIPS = 7, 80
POLICIES: dict[str, Policy] = {"dense": Dense(), "moc": MoC(k=1, snapshot_k=2)}
"""Of MoC memory has some experts of the newest steps, and storage the others."""


class Place:
    """What a life left, which each start finds again as it was."""

    def __init__(self, root: Path, policy: Policy) -> None:
        self.root, self.kept, self._policy = root / "place", root / "kept", policy
        (self.root / "memory").mkdir(parents=True)
        with self.life() as first:
            first.go(STEPS, settle=True)
        shutil.copytree(self.root, self.kept)
        names = (path.relative_to(self.root) for path in sorted(self.root.rglob("*")) if path.is_file())
        self.files = {name: (self.root / name).read_bytes() for name in names}
        self.slots = [bytes_of(self.root / name) for name in self.files if name.suffix == ".head"]

    def life(self) -> Life:
        memory = Memory(directory=self.root / "memory", storage_every=3)
        return Life(LocalStorage(self.root / "store"), policy=self._policy, memory=memory)

    def restore(self, *, memory: bool = True) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self.kept, self.root)
        if not memory:
            shutil.rmtree(self.root / "memory")
            (self.root / "memory").mkdir()

    def flip(self, name: Path, at: int, bits: int) -> None:
        raw = bytearray(self.files[name])
        raw[at] ^= bits
        (self.root / name).write_bytes(raw)

    def place_in(self, medium: str, drawing: random.Random) -> tuple[Path, int]:
        """A file, and a byte of it; of the arena one that a slot has."""
        name = drawing.choice([name for name in self.files if self.files[name] and name.parts[0] == medium])
        if name.name == ARENA:
            _, begin, nbytes = drawing.choice(self.slots)
            return name, begin + drawing.randrange(nbytes)
        return name, drawing.randrange(len(self.files[name]))


@pytest.fixture(scope="module", params=POLICIES)
def place(request, tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("flipped"), POLICIES[request.param])


def come_back_right(life: Life) -> int:
    """The step that comes back, every bit of which is that of a step of the run; lost tokens are counted."""
    restored, fault = come_back(life)
    step, versions = restored.manifest.step, {op: record.step for op, record in restored.manifest.operators.items()}
    assert_state(life, versions)
    assert fault.lost_tokens == (life.counts * (step - steps_of_experts(versions))).sum()
    plain: dict[str, Any] = dict(restored.plain)
    assert plain["step"] == step
    assert torch.equal(plain["buffer"], torch.full((3,), float(step)))
    assert np.array_equal(restored.manifest.tokens["applied"], life.counts * step)
    return step


def test_undisturbed_the_newest_step_comes_back_from_memory(place):
    place.restore()
    with place.life() as life:
        assert come_back_right(life) == STEPS
    assert {name.parts[0] for name in place.files} == {"memory", "store"}
    assert place.slots


@pytest.mark.parametrize(
    ("medium", "has_memory", "older"),
    [("memory", True, {6}), ("store", True, set()), ("store", False, {3})],
    ids=["memory", "storage beneath memory", "storage"],
)
def test_no_flipped_byte_comes_back(place, medium, has_memory, older):
    """older: Than what came back without damage."""
    drawing, steps, refusals = random.Random(f"{medium}, {has_memory}"), [], []
    for _ in range(FLIPS):
        name, at = place.place_in(medium, drawing)
        place.restore(memory=has_memory)
        place.flip(name, at, drawing.randrange(1, 256))
        try:
            with place.life() as life:
                steps.append(come_back_right(life))
        except MoECheckpointError as error:
            refusals.append((name.name, str(error)))
        except BaseException as error:
            error.add_note(f"byte {at} of {name}")
            raise
    assert all(name in text for name, text in refusals)
    assert set(steps) >= older | {STEPS if has_memory else 6}, "nothing was damaged, or everything"


def test_memory_that_has_every_expert_needs_nothing_of_storage(place):
    """Each checkpoint of MoC on storage needs the part of step 1."""
    part = Path("store/step_00000001/PART.json")
    place.restore()
    place.flip(part, len(place.files[part]) // 2, 1)
    with place.life() as life:
        assert come_back_right(life) == STEPS
        life.go(3, settle=True)
        life.finish()
    with place.life() as life:
        assert come_back_right(life) == STEPS + 3, "the next checkpoint builds on nothing that is damaged"


def test_a_byte_that_nobody_compares_is_noticed_here(place, monkeypatch):
    monkeypatch.setattr(slices, "_compare", lambda stored, actual: None)
    [shard] = [
        name for name in place.files if name.match("step_00000006/*_expert.safetensors") and "non" not in name.name
    ]
    place.restore(memory=False)
    place.flip(shard, len(place.files[shard]) - 1, 1)
    with place.life() as life, pytest.raises(AssertionError):
        come_back_right(life)
