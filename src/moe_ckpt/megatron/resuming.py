"""Going on from a checkpoint: plain state on the same layout and on others, and sparse windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_ckpt.errors import ConfigError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.interop.whole import all_buffers
from moe_ckpt.megatron.side import Stateful, restore_stateful
from moe_ckpt.megatron.state import MegatronTrainingState
from moe_ckpt.recovery.divergence import Repeated, require_repeated
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.replay import Replay
from moe_ckpt.storage.base import Storage

_REPEATED: tuple[Repeated, ...] = (
    ("the state of the random number generators", lambda state: state["rng"]),
    ("the hyperparameters of the optimizer", lambda state: state["plain"]["optimizer"]),
    ("the state of the scheduler or of another object in stateful=", lambda state: state["stateful"]),
    ("the number of consumed samples", lambda state: state["consumed_samples"]),
    ("an expert bias or another buffer of a router, so that tokens took other ways", lambda s: s["plain"]["buffers"]),
)


def load(
    storage: Storage,
    manifest: Manifest,
    plain: Mapping[str, Any],
    state: MegatronTrainingState,
    stateful: Mapping[str, Stateful],
) -> None:
    """Everything but tensors and random numbers, into live objects.

    Where this rank now holds other layers, their buffers are in the state files of other ranks.

    Raises:
        ConfigError: the checkpoint is not Megatron's, or of a run with other stateful objects or buffers.
    """
    if plain.get("framework") != "megatron":
        raise ConfigError(
            f"checkpoint {manifest.directory} was written by {plain.get('framework')!r}, not by Megatron: its "
            "optimizer and schedules cannot go on here"
        )
    found = plain["plain"]
    if not state.buffers <= found["buffers"].keys():
        found = found | {"buffers": all_buffers(StoreReader(storage), manifest, state.buffers)}
    restore_stateful(stateful, plain["stateful"])
    state.load_plain(found)


def require_same_layout(there: Mapping[str, int], here: Mapping[str, int], manifest: Manifest) -> None:
    """Raise ``ConfigError`` unless steps can be computed again as they were."""
    differing = [f"{name} {there.get(name)} (now {here[name]})" for name in here if there.get(name) != here[name]]
    if differing:
        raise ConfigError(
            f"checkpoint {manifest.directory} is a sparse window, whose steps can only be computed again with the "
            f"parallel degrees of the run: {', '.join(differing)}. Start with those; once the window is dense again, "
            "the next dense checkpoint can go on with others."
        )


class Replaying:
    """A window that is being brought back, step by step, by the user's own loop."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._recorded = replay.upcoming() if not replay.done else {}

    @property
    def manifest(self) -> Manifest:
        return self._replay.manifest

    @property
    def done(self) -> bool:
        return self._replay.done

    def advance(self, step: int, captured: Mapping[str, Any]) -> None:
        """Step ``step`` was computed again. captured: its plain state, which must be what it was the first time.

        Raises:
            ReplayDivergedError: it is not.
        """
        self._replay.advance(step)
        require_repeated(step, _REPEATED, self._recorded, captured)
        self._recorded = {} if self.done else self._replay.upcoming()
