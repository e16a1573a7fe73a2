"""The manifest: commit record of one step, and the map from every operator to the files that hold it.

A manifest is a complete view: it lists every operator with its newest version, which may lie in the
directory of an older step. Trust goes downwards: the manifest carries its own checksum and that of each
shard's header; a shard's header carries that of each slice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format import FORMAT_VERSION, SUPPORTED_VERSIONS, WINDOW_VERSION
from moe_ckpt.format.sealed import seal, unseal

MANIFEST_NAME = "MANIFEST.json"
STORE_NAME = "store.json"
_KIND = "moe_ckpt.manifest"
_STEP_DIR = re.compile(r"step_(\d{8,})(?:_g(\d+))?", re.ASCII)
_SHARD = re.compile(r"step_\d{8,}(_g\d+)?/rank_\d{5,}_(expert|non_expert)\.safetensors", re.ASCII)
_OWN_FILE = re.compile(r"rank_\d{5,}_((expert|non_expert)\.safetensors|state\.json)", re.ASCII)
_STATE = re.compile(r"step_\d{8,}(_g\d+)?/rank_\d{5,}_state\.json", re.ASCII)


def step_dir(step: int, generation: int) -> str:
    """Directory of one checkpoint. A generation is one life of the run, so a name is never used twice."""
    return f"step_{step:08d}" + (f"_g{generation}" if generation else "")


def parse_step_dir(name: str) -> tuple[int, int] | None:
    """(step, generation) of a step directory's name, or None for any other name."""
    match = _STEP_DIR.fullmatch(name)
    if not match:
        return None
    step, generation = int(match[1]), int(match[2] or 0)
    # Other spellings of the same numbers (more zeros, "_g0") would give one checkpoint two directories.
    return (step, generation) if step_dir(step, generation) == name else None


def shard_path(directory: str, rank: int, kind: str) -> str:
    """``kind`` is "expert" or "non_expert": kept apart because they are superseded at different times."""
    return f"{directory}/rank_{rank:05d}_{kind}.safetensors"


def state_path(directory: str, rank: int) -> str:
    return f"{directory}/rank_{rank:05d}_state.json"


def is_own_file(name: str) -> bool:
    """True for the name (without directory) of a file that this format writes into a step directory."""
    return name == MANIFEST_NAME or _OWN_FILE.fullmatch(name) is not None


@dataclass(frozen=True)
class FileRecord:
    """One shard: its size, and the length and XXH3-128 of its header."""

    path: str
    nbytes: int
    header_nbytes: int
    header_digest: str
    step: int
    rank: int


@dataclass(frozen=True)
class StateRecord:
    """One rank's sealed state file (loops, schedulers, RNG): its size and XXH3-128."""

    path: str
    nbytes: int
    digest: str
    rank: int


@dataclass(frozen=True)
class OperatorRecord:
    """Version of one operator and the shards that hold it, as indices into ``Manifest.files``."""

    step: int
    files: tuple[int, ...]


@dataclass(frozen=True)
class LayerRecord:
    name: str
    experts: int
    top_k: int | None = None


@dataclass(frozen=True)
class ModelRecord:
    """fingerprint: ``Catalog.fingerprint``. aliases: name of a tied tensor -> the name it is stored under."""

    fingerprint: str
    layers: tuple[LayerRecord, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotRecord:
    """One step of a sparse window before the last: its step, and the ranks' state files of that step."""

    step: int
    states: tuple[StateRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about one committed step except the tensors themselves.

    parent: directory name of the checkpoint this life of the run returned to, or None.
    index: checkpoints begun before this one in the run (``PolicyContext.index``).
    tokens: ``TokenBook.to_dict()``; policy: ``Policy.describe()``.
    measured: what of ``policies.base.Measured`` rank 0 knew when the snapshot began, so that a restarted run need not
        measure it again; older files have none.
    window: the earlier steps of a sparse window whose last one this is, oldest first. Its operators are then of
        different steps, and only replay makes one state of them.
    """

    run_id: str
    step: int
    generation: int
    world_size: int
    index: int
    created_unix_secs: float
    model: ModelRecord
    files: tuple[FileRecord, ...]
    operators: Mapping[str, OperatorRecord]
    states: tuple[StateRecord, ...]
    parent: str | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    window: tuple[SlotRecord, ...] = ()

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.generation)

    @property
    def paths(self) -> frozenset[str]:
        """Every file that this view needs, relative to the store's root."""
        states = [state.path for slot in self.window for state in slot.states] + [s.path for s in self.states]
        return frozenset([f.path for f in self.files] + states)

    @property
    def slots(self) -> tuple[Manifest, ...]:
        """The steps of a sparse window, each as a manifest of what was saved at it; just this one without a window."""
        if not self.window:
            return (self,)
        return tuple(self._slot(slot.step, slot.states) for slot in (*self.window, SlotRecord(self.step, self.states)))

    def _slot(self, step: int, states: tuple[StateRecord, ...]) -> Manifest:
        inside = f"{step_dir(step, self.generation)}/"
        places = {i: place for place, i in enumerate(i for i, f in enumerate(self.files) if f.path.startswith(inside))}
        return replace(
            self,
            step=step,
            states=states,
            files=tuple(self.files[i] for i in places),
            operators={
                op: OperatorRecord(step, tuple(places[i] for i in record.files))
                for op, record in self.operators.items()
                if record.step == step
            },
            window=(),
        )

    def encode(self) -> bytes:
        body = {
            "kind": _KIND,
            "format_version": WINDOW_VERSION if self.window else FORMAT_VERSION,
            **{k: v for k, v in asdict(self).items() if k not in ("files", "operators", "states", "window")},
            "files": [list(asdict(f).values()) for f in self.files],
            "states": [list(asdict(s).values()) for s in self.states],
            "operators": {op: [record.step, *record.files] for op, record in self.operators.items()},
        }
        if self.window:
            body["window"] = [[slot.step, [list(asdict(s).values()) for s in slot.states]] for slot in self.window]
        return seal(body)

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview, path: str) -> Manifest:
        """Raises ``DamagedError`` or ``FormatVersionError``; ``path`` is for messages only."""
        body = unseal(raw, path)
        check_version(body, path, _KIND, SUPPORTED_VERSIONS)
        try:
            return cls._from_body(body)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DamagedError(path, f"not a manifest of this format ({error!r})") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        model = body["model"]
        files = tuple(FileRecord(*row) for row in body["files"])
        states = tuple(StateRecord(*row) for row in body["states"])
        window = body.get("window", ())
        slots = tuple(SlotRecord(step, tuple(StateRecord(*row) for row in rows)) for step, rows in window)
        _check_paths(files, states + tuple(state for slot in slots for state in slot.states))
        operators = {op: OperatorRecord(row[0], tuple(row[1:])) for op, row in body["operators"].items()}
        for op, record in operators.items():
            if any(not 0 <= index < len(files) for index in record.files):
                raise ValueError(f"{op} names a file that is not listed")
        steps = [slot.step for slot in slots] + [body["step"]]
        if steps != sorted(set(steps)) or (len(steps) > 1) != (body["format_version"] == WINDOW_VERSION):
            raise ValueError(f"the steps of its window are not in order, or not of its version: {steps}")
        return cls(
            run_id=body["run_id"],
            step=body["step"],
            generation=body["generation"],
            world_size=body["world_size"],
            index=body["index"],
            created_unix_secs=body["created_unix_secs"],
            parent=body["parent"],
            policy=body["policy"],
            measured=_measured(body.get("measured", {})),
            tokens=body["tokens"],
            model=ModelRecord(
                model["fingerprint"],
                tuple(LayerRecord(**layer) for layer in model["layers"]),
                dict(model["aliases"]),
            ),
            files=files,
            states=states,
            operators=operators,
            window=slots,
        )


def _measured(told: Mapping[str, Any]) -> dict[str, float]:
    """Times and rates: a policy divides by them."""
    found = {name: float(value) for name, value in told.items()}
    if not all(isfinite(value) and value >= 0 for value in found.values()):
        raise ValueError(f"what was measured is not finite or below 0: {found}")
    return found


def check_version(
    body: Mapping[str, Any], path: str, kind: str, supported: tuple[int, ...] = (FORMAT_VERSION,)
) -> None:
    """Raise unless a sealed body is of ``kind`` and of a version that this package reads."""
    if body.get("kind") != kind:
        raise DamagedError(path, f"is a {body.get('kind')!r}, not a {kind!r}")
    if body.get("format_version") not in supported:
        raise FormatVersionError(path, body.get("format_version"), supported)


def _check_paths(files: tuple[FileRecord, ...], states: tuple[StateRecord, ...]) -> None:
    """Refuse paths that could lead out of the store (security: a manifest is data from elsewhere)."""
    for path in [f.path for f in files if not _SHARD.fullmatch(f.path)] + [
        s.path for s in states if not _STATE.fullmatch(s.path)
    ]:
        raise ValueError(f"{path!r} is no path of this format")
