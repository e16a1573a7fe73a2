"""A byte of what windows and gradient logs left is another one: the run that resumes is the undisturbed one all the
same, however far it goes back, or it ends with an error of this package. Dense and partial checkpoints: unit tests.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt import Memory, release_host_memory
from moe_ckpt.errors import MoECheckpointError
from moe_ckpt.memory.arena import ARENA
from moe_ckpt.policies import GradientLog, MoEvement
from tests.integration.test_no_waits import STEPS, fit, same
from tests.support.spoiled import bytes_of
from tests.support.tiny_moe import state_of

FLIPS = 8
POLICIES: dict[str, tuple[Any, int]] = {"windows": (MoEvement(window=3), 1), "log": (GradientLog(window=3), 1000)}
"""Policy, and how many steps lie between those that go to storage."""


class Left:
    """What a run left that was stopped, which each start finds again as it was."""

    def __init__(self, root: Path, policy: Any, storage_every: int) -> None:
        self.root, self._kept, self._policy, self._every = root / "place", root / "kept", policy, storage_every
        (self.root / "memory").mkdir(parents=True)
        with pytest.raises(RuntimeError, match="stopped"):
            self.fit(stop=STEPS - 1)
        shutil.copytree(self.root, self._kept)
        names = (path.relative_to(self.root) for path in sorted(self.root.rglob("*")) if path.is_file())
        self.files = {name: (self.root / name).read_bytes() for name in names}
        self._slots = [bytes_of(self.root / name) for name in self.files if name.suffix == ".head"]
        release_host_memory()  # which deletes what a run of this process left
        shutil.rmtree(self.root)
        (self.root / "memory").mkdir(parents=True)
        self.expected = state_of(self.fit())

    def fit(self, stop: int | None = None) -> Any:
        memory = Memory(self.root / "memory", storage_every=self._every)
        return fit(self.root / "store", self._policy, stop=stop, memory=memory)

    def spoil(self, drawing: random.Random, medium: str) -> str:
        """Flips a byte of a file in a medium; of the arena one that a slot has."""
        shutil.rmtree(self.root)
        shutil.copytree(self._kept, self.root)
        if medium == "store":
            shutil.rmtree(self.root / "memory")
            (self.root / "memory").mkdir()
        name = drawing.choice([name for name in self.files if self.files[name] and name.parts[0] == medium])
        raw, begin, nbytes = bytearray(self.files[name]), 0, len(self.files[name])
        if name.name == ARENA:
            _, begin, nbytes = drawing.choice(self._slots)
        at = begin + drawing.randrange(nbytes)
        raw[at] ^= drawing.randrange(1, 256)
        (self.root / name).write_bytes(raw)
        return f"byte {at} of {name}"


@pytest.fixture(scope="module", params=POLICIES)
def left(request, tmp_path_factory) -> Iterator[Left]:
    yield Left(tmp_path_factory.mktemp("flipped"), *POLICIES[request.param])
    release_host_memory()


@pytest.mark.parametrize("medium", ["memory", "store"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.quick("windows-0-memory", "log-0-memory")
def test_no_flipped_byte_changes_a_run(left, medium, seed):
    drawing, resumed = random.Random(seed), 0
    for _ in range(FLIPS):
        what = left.spoil(drawing, medium)
        try:
            module = left.fit()
        except MoECheckpointError:
            continue
        finally:
            release_host_memory()
        assert same(state_of(module), left.expected), what
        resumed += min(module.losses) > 0
    assert resumed, "every start began anew, or was refused"
