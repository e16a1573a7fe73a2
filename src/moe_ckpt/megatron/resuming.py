"""Going on from a checkpoint: plain state on the same layout and on others, and sparse windows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from moe_ckpt.errors import ConfigError, OtherLayoutError, ReplayDivergedError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.interop.whole import all_buffers
from moe_ckpt.megatron.side import Stateful, restore_stateful
from moe_ckpt.megatron.state import MegatronTrainingState
from moe_ckpt.recovery.divergence import Repeated, require_repeated, same_plain
from moe_ckpt.recovery.handing_back import handing_back
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.replay import Replay
from moe_ckpt.recovery.resume import Restored
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")

_REPEATED: tuple[Repeated, ...] = (
    ("the state of the random number generators", lambda state: state["rng"]),
    ("the hyperparameters of the optimizer", lambda state: state["plain"]["optimizer"]),
    ("the state of the scheduler or of another object in stateful=", lambda state: state["stateful"]),
    ("the number of consumed samples", lambda state: state["consumed_samples"]),
    ("an expert bias or another buffer of a router, so that tokens took other ways", lambda s: s["plain"]["buffers"]),
)


def require_megatron(plain: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise ``ConfigError`` for the state of another trainer, before anything of it is loaded."""
    if plain.get("framework") != "megatron":
        raise ConfigError(
            f"checkpoint {manifest.directory} was written by {plain.get('framework')!r}, not by Megatron: its "
            "optimizer and schedules cannot go on here"
        )


def load(
    storage: Storage, restored: Restored, state: MegatronTrainingState, stateful: Mapping[str, Stateful]
) -> None:
    """Everything but tensors and random numbers, into live objects.

    Where this rank now holds other layers, their buffers are in the state files of other ranks.

    Raises:
        ConfigError: the checkpoint is of a run with other stateful objects or buffers.
        StateRefusedError: an object does not take the state that is stored of it.
    """
    plain, manifest = restored.plain, restored.manifest
    found = plain["plain"]
    if not state.buffers <= found["buffers"].keys():
        found = found | {"buffers": all_buffers(StoreReader(storage), manifest, state.buffers)}
    restore_stateful(stateful, plain["stateful"], restored.path)
    with handing_back("the model and its optimizer", restored.path):
        state.load_plain(found)


def require_same_layout(there: Mapping[str, int], here: Mapping[str, int], manifest: Manifest) -> None:
    """Raise ``OtherLayoutError`` unless steps can be computed again as they were."""
    differing = [f"{name} {there.get(name)} (now {here[name]})" for name in here if there.get(name) != here[name]]
    if differing:
        raise OtherLayoutError(
            manifest.directory,
            f"of a run with other parallel degrees: {', '.join(differing)}",
            "Start with those of that run; a dense checkpoint, such as its last one, can go on with others.",
        )


class Replaying:
    """A window that is being brought back, step by step, by the user's own loop."""

    def __init__(self, replay: Replay, plain: Mapping[str, Any]) -> None:
        """plain: this rank's plain state at the window's first step."""
        self._replay = replay
        self._before = plain
        self._recorded = replay.upcoming() if not replay.done else {}

    @property
    def manifest(self) -> Manifest:
        return self._replay.manifest

    @property
    def done(self) -> bool:
        return self._replay.done

    def put_back(self, step: int) -> None:
        """The optimizer has made step ``step`` again: replace what the window holds of it, before anything reads it.

        Raises:
            ReplayDivergedError: it is not the step that comes next.
        """
        if self.done or step == self._replay.steps[self._replay.loaded - 1]:
            return
        expected = self._replay.steps[self._replay.loaded]
        if step != expected:
            raise ReplayDivergedError(step, f"it is computed now, and was skipped then (the run computed {expected})")
        self._replay.advance(step)

    def skip(self, step: int) -> None:
        """Step ``step`` is passed over. Raises ``ReplayDivergedError`` if it was computed the first time."""
        if not self.done and step >= self._replay.steps[self._replay.loaded]:
            raise ReplayDivergedError(step, "it is skipped now, and was computed then")

    def compare(self, step: int, captured: Mapping[str, Any]) -> None:
        """Everything has happened that belongs to step ``step``. captured: its plain state, to be as the first time.

        Raises:
            ReplayDivergedError: it is not.
        """
        self.put_back(step)
        self._replay.repeat()  # what runs after the optimizer (QK-clip) may have changed weights once more
        idle = idle_generators(self._before["rng"], self._recorded["rng"])
        require_repeated(step, _REPEATED, _without(self._recorded, idle), _without(captured, idle))
        self._before, self._recorded = self._recorded, {} if self.done else self._replay.upcoming()


def idle_generators(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Names of generators that a recorded step did not use, so that their state says nothing about it.

    Only torch's on the CPU, and only where a GPU computes: what draws from it then is the making of data iterators,
    which falls on other moments in a process that was started again. Where a step did draw from it, it must repeat.

    Args:
        before, after: States by name, as of the step before and of the step.
    """
    return frozenset({"torch"} if "cuda" in after and same_plain(before.get("torch"), after.get("torch")) else ())


def _without(state: Mapping[str, Any], generators: frozenset[str]) -> dict[str, Any]:
    return {**state, "rng": {name: each for name, each in state["rng"].items() if name not in generators}}


def say_other_layout(saved: Mapping[str, Any], now: Mapping[str, Any], rank: int) -> None:
    """Warn, once per job, that the run goes on with other degrees of parallelism, and what is not exact then."""
    differing = [f"{name} {saved.get(name)}, now {degree}" for name, degree in now.items() if saved.get(name) != degree]
    if rank == 0:
        log.warning(
            "the checkpoint is of another layout (%s): weights and optimizer state are exact, but random numbers go on "
            "as seeded now, so that what follows is not what the run would have computed",
            "; ".join(differing),
        )
