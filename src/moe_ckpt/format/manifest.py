"""The two documents of a committed step: its manifest, and the part that it wrote.

A manifest names the parts that together have every operator, newest first. A part lists the files that the ranks wrote
at one step, and the operators in them. ``compose_manifest`` makes a complete view of them: every operator with its
newest version, which may be in the directory of an older step. The manifest has its own checksum and that of each part,
a part has those of its shards' headers, and a shard's header has those of its slices.

A part is written once, by rank 0, just before the step's manifest. Later manifests name it as long as they need one of
its operators. An operator is in the newest part that lists it, and there in the shards of its kind. Ranks send the rows
as they are in the document, so that rank 0 only joins them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import WINDOW_BEGAN
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.schema import (
    Schema,
    anything,
    both,
    fault_in,
    listing,
    mapping,
    matching,
    maybe,
    number,
    one_of,
    row,
    shown,
    table,
    text,
    value,
    whole,
)
from moe_ckpt.format.sealed import Fragment, decode_document, digest, encode_document

MANIFEST_NAME = "MANIFEST.json"
PART_NAME = "PART.json"
STORE_NAME = "store.json"
KEEP_NAME = "KEEP"
"""A file of any content: retention keeps the checkpoint in whose directory it is."""
_KIND = "moe_ckpt.manifest"
_PART_KIND = "moe_ckpt.part"
STATE_KIND = "moe_ckpt.state"
_STEP_DIR = re.compile(r"step_(\d{8,18})(?:_g(\d{1,18}))?", re.ASCII)
_OWN_FILE = re.compile(r"rank_\d{5,9}_(expert(?=\.s)|non_expert(?=\.s)|state(?=\.j))\.(?:safetensors|json)", re.ASCII)
KINDS = ("expert", "non_expert")
"""Kinds of shards. Experts and all else are in different shards since they are superseded at different times."""
GROUPS = (*KINDS, "state")
"""Groups of the files that ranks write at one step: each group is retained or deleted as a whole."""


def step_dir(step: int, generation: int) -> str:
    """Returns the directory of a checkpoint. A generation is one life of the run, so that no name is used twice."""
    return f"step_{step:08d}" + (f"_g{generation}" if generation else "")


@lru_cache(1 << 14)
def parse_step_dir(name: str) -> tuple[int, int] | None:
    """Returns (step, generation) of a step directory's name, or None for any other name."""
    match = _STEP_DIR.fullmatch(name)
    if not match:
        return None
    step, generation = int(match[1]), int(match[2] or 0)
    # Other spellings of the same numbers (more zeros, "_g0") would give one checkpoint two directories.
    return (step, generation) if step_dir(step, generation) == name else None


def age_of(directory: str) -> tuple[int, int]:
    """Returns (generation, step) of a step directory, by which checkpoints are ordered; (-1, -1) for any other name."""
    step, generation = parse_step_dir(directory) or (-1, -1)
    return generation, step


def step_of(directory: str) -> int | None:
    """Returns the step of a step directory; None for any other name."""
    return (parse_step_dir(directory) or (None, None))[0]


def shard_path(directory: str, rank: int, kind: str) -> str:
    """Returns the path of a rank's shard; ``kind`` is one of ``KINDS``."""
    return f"{directory}/rank_{rank:05d}_{kind}.safetensors"


def state_path(directory: str, rank: int) -> str:
    return f"{directory}/rank_{rank:05d}_state.json"


def group_path(directory: str, rank: int, group: str) -> str:
    """Returns the path of a rank's file of one of ``GROUPS``."""
    return state_path(directory, rank) if group == "state" else shard_path(directory, rank, group)


def group_of(name: str) -> str | None:
    """Returns the group of a file in a step directory: one of ``GROUPS``, or the name of a document of the step; None
    for a file that is not of this format."""
    if name in (MANIFEST_NAME, PART_NAME):
        return name
    match = _OWN_FILE.fullmatch(name)
    return match[1] if match else None


def kind_of(operator: str) -> str:
    """Returns which of a rank's two shards holds an operator."""
    return KINDS[0] if operator.startswith("expert/") else KINDS[1]


@dataclass(frozen=True)
class FileRecord:
    """One shard: its size, and the length and XXH3-128 of its header."""

    path: str
    nbytes: int
    header_nbytes: int
    header_digest: str
    step: int
    rank: int

    @property
    def kind(self) -> str:
        """The shard's kind, one of ``KINDS``."""
        return KINDS[self.path.endswith("_non_expert.safetensors")]


@dataclass(frozen=True)
class StateRecord:
    """One rank's sealed state file (loops, schedulers, RNG): its size and XXH3-128."""

    path: str
    nbytes: int
    digest: str
    rank: int


@dataclass(frozen=True)
class OperatorRecord:
    """Version of one operator, and the shards that hold it."""

    step: int
    files: tuple[FileRecord, ...]


@dataclass(frozen=True)
class LayerRecord:
    name: str
    experts: int
    top_k: int | None = None


@dataclass(frozen=True)
class ModelRecord:
    """The model that a checkpoint is of.

    Attributes:
        fingerprint: ``Catalog.fingerprint``.
        aliases: Name of a tied tensor -> the name it is stored under.
    """

    fingerprint: str
    layers: tuple[LayerRecord, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def fragment(self) -> Fragment:
        return Fragment(asdict(self))

    @property
    def grid(self) -> tuple[int, int]:
        """``(L, E)``: how many MoE layers, and the experts of the largest."""
        return len(self.layers), max((layer.experts for layer in self.layers), default=0)

    def lacks(self, operator: str) -> bool:
        """Returns whether the model has no operator of this id (``OPERATOR_ID``)."""
        kind, _, position = operator.partition("/")
        layer, _, expert = position.partition("/")
        if kind == "non_expert":
            return False
        return int(layer) >= len(self.layers) or int(expert or 0) >= self.layers[int(layer)].experts


@dataclass(frozen=True)
class SlotRecord:
    """One step of a sparse window before the last: its step, and the ranks' state files of that step."""

    step: int
    states: tuple[StateRecord, ...]


@dataclass(frozen=True)
class PartRecord:
    """The part of one step: its directory, size, and XXH3-128."""

    directory: str
    nbytes: int
    digest: str

    @property
    def path(self) -> str:
        return f"{self.directory}/{PART_NAME}"


@dataclass(frozen=True)
class Manifest:
    """Everything about one committed step except the tensors.

    The result of ``decode`` has no files, operators and states; ``compose_manifest`` adds those of its parts.
    ``encode`` omits them. A manifest of memory slots has all of them, and no parts.

    Attributes:
        parent: Directory of the checkpoint from which this life of the run resumed; None if there was none.
        index: Checkpoints begun before this one in the run (``RunFacts.index``).
        tokens: ``TokenBook.to_dict()``.
        policy: ``Policy.describe()``.
        measured: Fields of ``policies.base.Measured`` that rank 0 knew when the snapshot began, so that a restarted run
            need not measure them again.
        window: If this is the last step of a sparse window, its earlier steps, oldest first. Operators are of different
            steps then, and only a replay makes one state of them.
        parts: The parts of the view, newest first; none for memory slots.
        not_finite: The first tensor with NaN or infinity, for people; empty if there is none, or it was not checked.
    """

    run_id: str
    step: int
    generation: int
    world_size: int
    index: int
    created_unix_secs: float
    model: ModelRecord
    files: tuple[FileRecord, ...] = ()
    operators: Mapping[str, OperatorRecord] = field(default_factory=dict)
    states: tuple[StateRecord, ...] = ()
    parent: str | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    window: tuple[SlotRecord, ...] = ()
    parts: tuple[PartRecord, ...] = ()
    not_finite: str = ""

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.generation)

    @property
    def stale_experts(self) -> int:
        """Returns how many experts are older than the checkpoint."""
        return sum(
            _EXPERT.fullmatch(op) is not None and record.step < self.step for op, record in self.operators.items()
        )

    @property
    def paths(self) -> frozenset[str]:
        """Paths of all files of this view, relative to the store's root."""
        states = [state.path for slot in self.window for state in slot.states] + [s.path for s in self.states]
        return frozenset([f.path for f in self.files] + states + [part.path for part in self.parts])

    @property
    def slots(self) -> tuple[Manifest, ...]:
        """The steps of a sparse window, each as a manifest of its own files; this manifest alone without a window."""
        if not self.window:
            return (self,)
        return tuple(self._slot(slot.step, slot.states) for slot in (*self.window, SlotRecord(self.step, self.states)))

    def _slot(self, step: int, states: tuple[StateRecord, ...]) -> Manifest:
        operators = {op: record for op, record in self.operators.items() if record.step == step}
        view = replace(self, step=step, states=states, operators=operators, window=())
        return prune_manifest(view, self.files, {view.directory})

    @property
    def distinct_records(self) -> Collection[OperatorRecord]:
        """The records of ``operators``, each once: all operators of one kind in a part share a record."""
        return {id(record): record for record in self.operators.values()}.values()

    def encode(self) -> bytes:
        body: dict[str, Any] = {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "model": self.model.fragment,
            "parts": [[part.directory, part.nbytes, part.digest] for part in self.parts],
        }
        if self.not_finite:
            body["not_finite"] = self.not_finite
        if self.window:
            body["window"] = [slot.step for slot in self.window]
        return encode_document(_KIND, body)

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview, path: str) -> Manifest:
        """Raises ``DamagedError`` or ``FormatVersionError``; ``path`` is for messages only."""
        body = decode_document(raw, path, _KIND, MANIFEST, "not a manifest of this format: ")
        model = body["model"]
        layers = tuple(LayerRecord(layer["name"], layer["experts"], layer.get("top_k")) for layer in model["layers"])
        return cls(
            **{name: body[name] for name in _AS_THEY_ARE},
            model=ModelRecord(model["fingerprint"], layers, dict(model["aliases"])),
            window=tuple(SlotRecord(step, ()) for step in body.get("window", ())),
            parts=tuple(PartRecord(*row) for row in body["parts"]),
            not_finite=body.get("not_finite", ""),
        )


_AS_THEY_ARE = (
    *("run_id", "step", "generation", "world_size", "index", "created_unix_secs", "parent"),
    *("policy", "measured", "tokens"),
)
"""Fields of ``Manifest`` that are in the document as they are."""


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint that one step wrote.

    Attributes:
        operators: Operators in full. One without elements is in no part.
    """

    run_id: str
    step: int
    generation: int
    world_size: int
    files: tuple[FileRecord, ...]
    states: tuple[StateRecord, ...]
    operators: tuple[str, ...]

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.generation)

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview, path: str) -> Part:
        """Raises ``DamagedError`` or ``FormatVersionError``; ``path`` is for messages only."""
        body = decode_document(raw, path, _PART_KIND, PART, "not a part of this format: ")
        step, directory = body["step"], step_dir(body["step"], body["generation"])
        return cls(
            run_id=body["run_id"],
            step=step,
            generation=body["generation"],
            world_size=body["world_size"],
            files=tuple(
                FileRecord(shard_path(directory, rank, kind), nbytes, header_nbytes, header_digest, step, rank)
                for kind, rank, nbytes, header_nbytes, header_digest in body["files"]
            ),
            states=tuple(
                StateRecord(state_path(directory, rank), nbytes, digested, rank)
                for rank, nbytes, digested in body["states"]
            ),
            operators=tuple(body["operators"]),
        )


def file_row(record: FileRecord) -> bytes:
    """Returns a shard's row in the document, and a comma."""
    columns = [record.kind, record.rank, record.nbytes, record.header_nbytes, record.header_digest]
    return json.dumps(columns, separators=(",", ":")).encode() + b","


def state_row(record: StateRecord) -> bytes:
    """Returns a state file's row in the document, and a comma."""
    return json.dumps([record.rank, record.nbytes, record.digest], separators=(",", ":")).encode() + b","


def encode_part(
    run_id: str, step: int, generation: int, world_size: int, *, files: bytes, states: bytes, operators: Fragment
) -> tuple[PartRecord, bytes]:
    """Returns the record of a part for manifests, and the part's bytes.

    Args:
        files, states: Rows.
        operators: A list of ids.
    """
    raw = encode_document(
        _PART_KIND,
        {
            "run_id": run_id,
            "step": step,
            "generation": generation,
            "world_size": world_size,
            "files": Fragment.of_rows(files),
            "states": Fragment.of_rows(states),
            "operators": operators,
        },
    )
    return PartRecord(step_dir(step, generation), len(raw), digest(raw)), raw


def compose_manifest(manifest: Manifest, parts: Sequence[Part]) -> Manifest:
    """Returns a manifest with the files, operators and states of its ``parts``, given in their order.

    Raises:
        DamagedError: a part is not of this checkpoint.
    """
    for part, named in zip(parts, manifest.parts, strict=True):
        _require_fitting(manifest, part, named)
    files, operators = list[FileRecord](), dict[str, OperatorRecord]()
    for part in reversed(parts):
        by_kind = {kind: tuple(file for file in part.files if file.kind == kind) for kind in KINDS}
        records = {kind: OperatorRecord(part.step, shards) for kind, shards in by_kind.items()}
        files += part.files
        operators |= {op: records[kind_of(op)] for op in part.operators}
    slots = {part.step: part.states for part in parts[: 1 + len(manifest.window)]}
    # Shards of the slots have side tensors, and slices for a replay, even if no operator needs them.
    written = {part.directory for part in parts[: len(slots)]}
    whole_view = replace(
        manifest,
        operators=operators,
        states=parts[0].states,
        window=tuple(SlotRecord(slot.step, slots[slot.step]) for slot in manifest.window),
    )
    return prune_manifest(whole_view, files, written)


def _require_fitting(manifest: Manifest, part: Part, named: PartRecord) -> None:
    if part.directory != named.directory:
        raise DamagedError(named.path, f"is the part of {part.directory}, in the wrong place")
    fault = ""
    if part.run_id != manifest.run_id:
        fault = f"belongs to run {part.run_id}"
    elif manifest.parts.index(named) <= len(manifest.window) and part.world_size != manifest.world_size:
        fault = f"is of {part.world_size} ranks, but {manifest.directory} of {manifest.world_size}"
    else:
        foreign = next((op for op in part.operators if manifest.model.lacks(op)), None)
        fault = "" if foreign is None else f"{foreign} {NOT_OF_MODEL}"
    if fault:
        raise DamagedError(named.path, fault, step=part.step)


def prune_manifest(view: Manifest, files: Sequence[FileRecord], directories: Collection[str]) -> Manifest:
    """Returns the view with those of ``files`` that hold an operator's newest version, or lie in a directory of
    ``directories``."""
    needed = {file for record in view.distinct_records for file in record.files}
    retained = (file for file in files if file in needed or file.path.partition("/")[0] in directories)
    return replace(view, files=tuple(dict.fromkeys(retained)))  # snapshots in memory may have files of storage


# --- what a manifest must look like ---

NOT_OF_MODEL = "is of no layer of the model, or beyond its experts"
MOST_EXPERTS = 1 << 20
"""Of all layers together. A file with a larger number is damaged, and must not exhaust a reader's memory."""
MOST_RANKS = 1 << 22
MOST_UNIX_SECS = 1e11
"""The year 5138; clocks and calendars end soon after."""
RANK = whole(0, MOST_RANKS)
_EXPERT = re.compile(r"expert/(0|[1-9]\d{0,6})/(0|[1-9]\d{0,6})", re.ASCII)
_GATE = re.compile(r"gate/(0|[1-9]\d{0,6})", re.ASCII)
_OPERATOR = re.compile(rf"{_EXPERT.pattern}|{_GATE.pattern}|non_expert/.+", re.ASCII | re.DOTALL)

OPERATOR_ID = matching(_OPERATOR, "the id of an operator")
LAYER: Schema = {"name": text, "experts": whole(1, MOST_EXPERTS), "top_k?": maybe(whole(1, MOST_EXPERTS))}
_STEP_NAME = value(
    lambda datum: isinstance(datum, str) and parse_step_dir(datum) is not None, "the name of a step directory"
)
_COUNTS: Schema = [[whole()]]
_FAULT = row({"restored_step": whole(), "lost_tokens": whole(), "stale_experts": whole(), "routed": whole()})
MLT_OF_FAULTS: Schema = [number(most=1.0)]
_TOKENS: Schema = {
    "applied": _COUNTS,
    "saved": mapping(_COUNTS, one_of(*(tier.value for tier in Tier))),
    "faults": [_FAULT],
    "mlt": MLT_OF_FAULTS,
    f"{WINDOW_BEGAN}?": text,
}
_FIELDS: Schema = {
    "run_id": text,
    "step": whole(),
    "generation": whole(),
    "world_size": whole(1, MOST_RANKS),
    "index": whole(),
    "created_unix_secs": number(most=MOST_UNIX_SECS),
    "model": {"fingerprint": text, "layers": [LAYER], "aliases": mapping(text)},
    "parent": maybe(_STEP_NAME),
    "policy": mapping(anything),
    "measured": mapping(number()),
    "tokens": lambda datum: "" if datum == {} else fault_in(_TOKENS, datum),
    "parts": listing(row({"directory": _STEP_NAME, "nbytes": whole(), "digest": text}), least=1),
    "not_finite?": text,
    "window?": listing(whole(), least=1),
}


def _wrong_parts(body: Mapping[str, Any]) -> str:
    """Returns a contradiction between fields that are right by themselves; "" for none."""
    names = [directory for directory, *_ in body["parts"]]
    places = [parsed for name in names if (parsed := parse_step_dir(name)) is not None]
    orders = [(generation, step) for step, generation in places]
    if names[0] != step_dir(body["step"], body["generation"]) or orders != sorted(set(orders), reverse=True):
        return f".parts are not the checkpoint's own and older ones, newest first: {shown(names)}"
    if any(step > body["step"] for step, _ in places):
        return f".parts have a step after the checkpoint's own: {shown(names)}"
    slots = [(body["generation"], step) for step in body.get("window", ())]
    if slots and orders[:0:-1] != slots:
        return f".window: the steps of its window are not those of its parts: {shown(body['window'])}"
    return ""


def _wrong_tokens(body: Mapping[str, Any]) -> str:
    tokens, experts = body["tokens"], [layer["experts"] for layer in body["model"]["layers"]]
    if sum(experts) > MOST_EXPERTS:
        return f".model.layers have {sum(experts):,} experts, more than {MOST_EXPERTS:,}"
    if not tokens:
        return ""
    lengths = [max(experts)] * len(experts) if experts else []
    if len(tokens["mlt"]) != len(tokens["faults"]):
        return f".tokens.mlt has {len(tokens['mlt'])} numbers for {len(tokens['faults'])} recoveries"
    for counts in (tokens["applied"], *tokens["saved"].values()):
        if [len(line) for line in counts] != lengths:
            return f".tokens do not have {len(lengths)} layers of {max(experts, default=0)} experts"
    return ""


MANIFEST = both(_FIELDS, both(_wrong_parts, _wrong_tokens))

# --- what a part must look like ---

_PART_FIELDS: Schema = {
    "run_id": text,
    "step": whole(),
    "generation": whole(),
    "world_size": whole(1, MOST_RANKS),
    "files": table({"kind": one_of(*KINDS), "rank": RANK, "nbytes": whole(), "header_nbytes": whole(), "digest": text}),
    "states": table({"rank": RANK, "nbytes": whole(), "digest": text}),
    "operators": [OPERATOR_ID],
}


def _wrong_part(body: Mapping[str, Any]) -> str:
    """Returns a contradiction between fields that are right by themselves; "" for none."""
    ranks = body["world_size"]
    shards = [(kind, rank) for kind, rank, *_ in body["files"]]
    if len(set(shards)) < len(shards) or any(rank >= ranks for _, rank in shards):
        return f".files are not one of each kind at most, of the ranks 0 to {ranks - 1}"
    if sorted(rank for rank, *_ in body["states"]) != list(range(ranks)):
        return f".states are not of the ranks 0 to {ranks - 1}, one each"
    if len(set(body["operators"])) < len(body["operators"]):
        return ".operators has one twice"
    written = {kind for kind, _ in shards}
    nowhere = next((op for op in body["operators"] if kind_of(op) not in written), None)
    return "" if nowhere is None else f".operators: {shown(nowhere)} is in no file"


PART = both(_PART_FIELDS, _wrong_part)
