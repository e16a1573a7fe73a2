"""The header of a slot: what lies in its bytes, and of which run, life and step. Written last, by a rename.

One sealed document (``format.sealed``), then the raw pieces that it gives length and digest of: the rank's state file,
byte for byte as storage would have it, and for each part of the slot the header that a shard of these slices has
(``format.shard``). So the slots of all ranks hold a whole checkpoint, whether storage has it or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_ckpt.core.freshness import FRESH, STALE, UNKNOWN
from moe_ckpt.core.survivors import GRADIENTS, STATE, TENSORS
from moe_ckpt.core.tokens import Counts, FaultRecord, fault_rows, faults_in
from moe_ckpt.errors import DamagedError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.fragment import Fragment
from moe_ckpt.format.manifest import MLT_OF_FAULTS, MOST_RANKS, OPERATOR_ID
from moe_ckpt.format.schema import anything, both, listing, mapping, maybe, number, one_of, record, require, text, whole
from moe_ckpt.format.sealed import MAX_SEALED_BYTES, digest, seal, unseal
from moe_ckpt.format.shard import MAX_HEADER_BYTES, ShardHeader, SliceEntry, decode_header

KIND = "moe_ckpt.slot"
_LENGTH_NBYTES = 8
_NOT_OURS = "not the header of a memory slot of this format: "
_PIECE = {"nbytes": whole(), "xxh3_128": text}
_PART = record({"kind": text, "begin": whole(), **_PIECE})
_WINDOW = record({"start": whole(), "size": whole(1), "slot": whole()})


def _raggedness(rows: list[list[int]]) -> str:
    return "" if len(set(map(len, rows))) < 2 else " has rows of different lengths"


def _contradictions(body: Mapping[str, Any]) -> str:
    """What is wrong between fields that are right by themselves."""
    facts = body["facts"]
    window, since = facts["window"], facts["since"]
    if body["rank"] >= body["world_size"]:
        return f".rank {body['rank']} is not below .world_size {body['world_size']}"
    if since is not None and since > body["sequence"]:
        return f".facts.since {since} is after .sequence {body['sequence']}"
    if len(facts["mlt"]) != len(facts["faults"]):
        return f".facts.mlt has {len(facts['mlt'])} numbers for {len(facts['faults'])} recoveries"
    if window is not None and window["slot"] >= window["size"]:
        return f".facts.window.slot {window['slot']} is not below its size {window['size']}"
    return ""


_TABLE = both(listing(listing(whole())), _raggedness)
_FACTS = record(
    {
        "index": whole(),
        "base": text,
        "operators": listing(OPERATOR_ID),
        "window": maybe(_WINDOW),
        "applied": _TABLE,
        "faults": listing(listing(whole(), least=4, most=4)),
        "mlt": MLT_OF_FAULTS,
        "policy": mapping(anything),
        "measured": mapping(number()),
        "since": maybe(whole()),
    },
    {
        "gradients": listing(OPERATOR_ID),
        "groups": listing(listing(whole())),
        "lost": _TABLE,
        "own": _TABLE,
    },
)
_FIELDS = record(
    {
        "kind": one_of(KIND),
        "format_version": one_of(FORMAT_VERSION),
        "run_id": text,
        "life": text,
        "sequence": whole(),
        "step": whole(),
        "generation": whole(),
        "rank": whole(),
        "world_size": whole(1, MOST_RANKS),
        "nbytes": whole(),
        "freshness": one_of(UNKNOWN, STALE, FRESH),
        "facts": _FACTS,
        "state": record(_PIECE),
        "parts": listing(_PART, most=16),
        "sent": one_of(False, True),
        "only": one_of("", STATE, TENSORS, GRADIENTS),
    },
    {"beside": listing(whole()), "place": whole()},
)
_BODY = both(_FIELDS, _contradictions)


@dataclass(frozen=True)
class SlotPart:
    """Slices that follow one another from byte ``begin`` of the slot on.

    Attributes:
        kind: Of the shard that they are, or ``slices.compiling.HOST_ONLY``: they never go to storage.
        begin: First byte.
        raw: Their header, as in a shard.
    """

    kind: str
    begin: int
    raw: bytes

    def header(self, path: str) -> ShardHeader:
        """Decodes ``raw``, once: who verifies a slot and who reads it ask for the same.

        Args:
            path: For messages.

        Raises:
            DamagedError: It is no header of a shard.
        """
        header: ShardHeader | None = self.__dict__.get("_header")
        if header is None:
            header = self.__dict__["_header"] = decode_header(self.raw, path)
        return header


@dataclass(frozen=True)
class WindowPlace:
    """A step's place in a sparse window: the window's first step, its length, and which of its steps this is."""

    start: int
    size: int
    slot: int


@dataclass(frozen=True)
class StepFacts:
    """The facts that a manifest of the step needs beside the ranks' files; equal on every rank.

    Attributes:
        index: As ``Manifest.index``.
        base: Directory of the newest checkpoint on storage when the snapshot began; empty before the first.
        operators: Held in full, but for those that never go to storage.
        window: Place in a sparse window; None for a checkpoint that stands by itself.
        applied: ``[L, E]`` tokens that experts had processed by the step.
        faults: Recoveries of the run so far.
        lost: ``[L, E]`` tokens that those lost which ``base`` does not know of: no later one loses them again. None if
            there are none.
        own: ``[L, E]`` tokens that this rank counted in the step itself, where ``applied`` has none of that step
            because ranks had not agreed on it: those of all ranks are to be added. None if they had.
        policy: ``Policy.describe()``.
        measured: As ``Manifest.measured``.
        since: Of a step of a gradient log, sequence of the snapshot with the oldest anchor that is needed: with all
            snapshots from there on, this one is a checkpoint. None for one that stands by itself.
        gradients: What gradients bring to the step, where that is not all but ``operators``.
        groups: As of ``core.anchors.GradientGroups``, where the step's gradients lie in slots of their own.
    """

    index: int
    base: str
    operators: Fragment | tuple[str, ...]
    window: WindowPlace | None
    applied: Counts = field(compare=False)
    faults: tuple[FaultRecord, ...] = ()
    policy: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    since: int | None = None
    gradients: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    lost: Counts | None = field(default=None, compare=False)
    own: Counts | None = field(default=None, compare=False)

    def encoded(self) -> dict[str, Any]:
        """Returns the facts for a document."""
        return {
            "index": self.index,
            "base": self.base,
            "operators": self.operators if isinstance(self.operators, Fragment) else list(self.operators),
            "window": None if self.window is None else vars(self.window),
            "applied": Fragment.of_counts(self.applied),
            **fault_rows(self.faults),
            "policy": dict(self.policy),
            "measured": dict(self.measured),
            "since": self.since,
            **({"gradients": list(self.gradients)} if self.gradients else {}),
            **({"groups": [list(group) for group in self.groups]} if self.groups else {}),
            **({} if self.lost is None else {"lost": Fragment.of_counts(self.lost)}),
            **({} if self.own is None else {"own": Fragment.of_counts(self.own)}),
        }

    @classmethod
    def decoded(cls, body: Mapping[str, Any]) -> StepFacts:
        """Returns the facts that ``encoded`` gave, of a document that fits the schema."""
        window = body["window"]
        counts = {name: np.asarray(body[name], dtype=np.int64) for name in ("applied", "lost", "own") if name in body}
        return cls(
            index=body["index"],
            base=body["base"],
            operators=tuple(body["operators"]),
            window=None if window is None else WindowPlace(window["start"], window["size"], window["slot"]),
            faults=tuple(faults_in(body)),
            policy=body["policy"],
            measured=body["measured"],
            since=body["since"],
            gradients=tuple(body.get("gradients", ())),
            groups=tuple(map(tuple, body.get("groups", ()))),
            **counts,
        )


@dataclass(frozen=True)
class SlotHeader:
    """The header of one slot (see the module).

    Attributes:
        run_id: Of the store.
        life: Names the life of the run, by a token that no other life has.
        sequence: Snapshots of that life before this one.
        step: Of the state that was copied.
        generation: Of that life.
        rank: Whose share it is.
        world_size: Ranks of that life.
        nbytes: Of the slot.
        freshness: What its checksums showed beside those of the rank's slot before (``core.freshness``).
        facts: Of the step.
        state: The rank's state file.
        parts: What lies in the slot.
        sent: It is a copy of what its rank sent to peers, which is not all of the rank's share.
        only: ``core.survivors.STATE``, ``TENSORS`` or ``GRADIENTS`` where it is not all; else empty.
        beside: Places in ``facts.groups`` of the slots of ``GRADIENTS`` that were sealed with this one.
        place: Of ``GRADIENTS``, which of these it is.
    """

    run_id: str
    life: str
    sequence: int
    step: int
    generation: int
    rank: int
    world_size: int
    nbytes: int
    freshness: int
    facts: StepFacts
    state: bytes
    parts: tuple[SlotPart, ...]
    sent: bool = False
    only: str = ""
    beside: tuple[int, ...] = ()
    place: int = 0

    def slices(self, part: SlotPart, path: str) -> tuple[SliceEntry, ...]:
        """The slices of one part, with checksums.

        Args:
            path: For messages.

        Raises:
            DamagedError: The part's header is of another run, life, step or rank.
        """
        header = part.header(path)
        identity = header.run_id, header.step, header.generation, header.rank
        if identity != (self.run_id, self.step, self.generation, self.rank):
            raise DamagedError(path, f"{_NOT_OURS}a part is of {identity}", step=self.step, rank=self.rank)
        if part.begin + header.data_nbytes > self.nbytes:
            raise DamagedError(path, f"{_NOT_OURS}a part ends beyond the slot", step=self.step, rank=self.rank)
        return header.slices


_SCALARS = ("run_id", "life", "sequence", "step", "generation", "rank", "world_size", "nbytes", "freshness")


def encode_slot(header: SlotHeader) -> bytes:
    """The bytes of the header's file."""
    parts = [{"kind": part.kind, "begin": part.begin, **_piece(part.raw)} for part in header.parts]
    body = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        **{name: getattr(header, name) for name in _SCALARS},
        "facts": header.facts.encoded(),
        "state": _piece(header.state),
        "parts": parts,
        "sent": header.sent,
        "only": header.only,
        **({"beside": list(header.beside)} if header.beside else {}),
        **({"place": header.place} if header.only == GRADIENTS else {}),
    }
    document = seal(body)
    length = len(document).to_bytes(_LENGTH_NBYTES, "little")
    return b"".join([length, document, header.state, *(part.raw for part in header.parts)])


def _piece(raw: bytes) -> dict[str, Any]:
    return {"nbytes": len(raw), "xxh3_128": digest(raw)}


def decode_slot(raw: bytes, path: str) -> SlotHeader:
    """Returns the header that ``encode_slot`` was given.

    Args:
        path: For messages.

    Raises:
        DamagedError: It is not as it was written, or of another format.
    """
    end = _LENGTH_NBYTES + int.from_bytes(raw[:_LENGTH_NBYTES], "little")
    if not _LENGTH_NBYTES < end <= min(len(raw), MAX_SEALED_BYTES):
        raise DamagedError(path, f"{_NOT_OURS}its length does not fit")
    body = unseal(raw[_LENGTH_NBYTES:end], path)
    require(_BODY, body, path, _NOT_OURS)
    pieces = []
    for section, most in [(body["state"], MAX_SEALED_BYTES), *((part, MAX_HEADER_BYTES) for part in body["parts"])]:
        begin, end = end, end + section["nbytes"]
        if section["nbytes"] > most or digest(raw[begin:end]) != section["xxh3_128"]:
            raise DamagedError(path, "checksum mismatch in the header of a part", step=body["step"], rank=body["rank"])
        pieces.append(raw[begin:end])
    if end != len(raw):
        raise DamagedError(path, f"{_NOT_OURS}{len(raw) - end:,} bytes follow it")
    state, *headers = pieces
    return SlotHeader(
        **{name: body[name] for name in _SCALARS},
        facts=StepFacts.decoded(body["facts"]),
        state=state,
        parts=tuple(
            SlotPart(part["kind"], part["begin"], piece) for part, piece in zip(body["parts"], headers, strict=True)
        ),
        sent=body["sent"],
        only=body["only"],
        beside=tuple(body.get("beside", ())),
        place=body.get("place", 0),
    )
