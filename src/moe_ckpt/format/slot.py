"""The header of a slot: describes its bytes, and names run, life and step. Written last, by a rename.

It is one sealed document (``format.sealed``), and then pieces of which that has lengths and digests: the rank's state
file, with the same bytes as on storage, and for each part of the slot the header that a shard of these slices would
have (``format.shard``). So the slots of all ranks are a whole checkpoint, whether storage has it or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_ckpt.core.step import Contents, Facts, GradientGroups, Step, WindowPlace
from moe_ckpt.core.tokens import NO_COUNTS, fault_rows, faults_in
from moe_ckpt.errors import DamagedError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import MLT_OF_FAULTS, MOST_RANKS, OPERATOR_ID
from moe_ckpt.format.schema import Schema, anything, both, listing, mapping, maybe, number, one_of, require, text, whole
from moe_ckpt.format.sealed import MAX_SEALED_BYTES, Fragment, digest, encode_document, unseal
from moe_ckpt.format.shard import MAX_HEADER_BYTES, ShardHeader, SliceEntry, decode_header
from moe_ckpt.ledger.freshness import FRESH, STALE, UNKNOWN

KIND = "moe_ckpt.slot"
STATE, TENSORS, GRADIENTS = "state", "tensors", "gradients"
"""Contents of a slot that is not all of a rank's share: its plain state, all but that, or consumed gradients of some
operators. A slot of gradients is freed as soon as no newer step needs it (``ledger.ledger.Anchors``)."""
_LENGTH_NBYTES = 8
_NOT_OURS = "not the header of a memory slot of this format: "
_PIECE = {"nbytes": whole(), "xxh3_128": text}
_PART: Schema = {"kind": text, "begin": whole(), **_PIECE}


def _raggedness(rows: list[list[int]]) -> str:
    return "" if len(set(map(len, rows))) < 2 else " has rows of different lengths"


def _contradictions(body: Mapping[str, Any]) -> str:
    """Returns a contradiction between fields that are right by themselves; "" for none."""
    contents, facts = body["contents"], body["facts"]
    window, since = contents["window"], contents["since"]
    if body["rank"] >= body["world_size"]:
        return f".rank {body['rank']} is not below .world_size {body['world_size']}"
    if (body["sealer"] or 0) >= body["world_size"]:
        return f".sealer {body['sealer']} is not below .world_size {body['world_size']}"
    if since is not None and since > body["sequence"]:
        return f".contents.since {since} is after .sequence {body['sequence']}"
    if len(facts["mlt"]) != len(facts["faults"]):
        return f".facts.mlt has {len(facts['mlt'])} numbers for {len(facts['faults'])} recoveries"
    if window is not None and window["slot"] >= window["size"]:
        return f".contents.window.slot {window['slot']} is not below its size {window['size']}"
    return ""


_TABLE = both([[whole()]], _raggedness)
_CONTENTS: Schema = {
    "operators": [OPERATOR_ID],
    "window": maybe({"start": whole(), "size": whole(1), "slot": whole()}),
    "since": maybe(whole()),
    "gradients": [OPERATOR_ID],
    "groups": [[whole()]],
}
_FACTS: Schema = {
    "index": whole(),
    "base": text,
    "applied": _TABLE,
    "faults": [listing(whole(), least=4, most=4)],
    "mlt": MLT_OF_FAULTS,
    "policy": mapping(anything),
    "measured": mapping(number()),
    "lost": maybe(_TABLE),
    "counted": maybe(_TABLE),
}
_FIELDS: Schema = {
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
    "contents": _CONTENTS,
    "facts": _FACTS,
    "state": _PIECE,
    "parts": listing(_PART, most=16),
    "sent": one_of(False, True),
    "only": one_of("", STATE, TENSORS, GRADIENTS),
    "sealer": maybe(whole()),
    "gradient_slots": [whole()],
    "gradient_slot": whole(),
}
_BODY = both(_FIELDS, _contradictions)


@dataclass(frozen=True)
class SlotPart:
    """Slices that follow one another in a slot.

    Attributes:
        kind: Of the shard with these slices, or ``slices.compiling.HOST_ONLY`` if they never go to storage.
        begin: First byte in the slot.
        raw: Header of the slices, as in a shard.
    """

    kind: str
    begin: int
    raw: bytes

    def header(self, path: str) -> ShardHeader:
        """Returns ``raw`` decoded. The result is cached, since a slot is first verified and then read.

        Args:
            path: For messages.

        Raises:
            DamagedError: It is no header of a shard.
        """
        header: ShardHeader | None = self.__dict__.get("_header")
        if header is None:
            header = self.__dict__["_header"] = decode_header(self.raw, path)
        return header


def encode_facts(contents: Contents, facts: Facts, full: Fragment | None = None) -> dict[str, Any]:
    """Returns the fields of a document for a snapshot.

    Args:
        contents: Of the snapshot. Its ``gradients`` may be left out if they are of all operators but ``full``.
        facts: Of its step.
        full: ``contents.full``, if it was encoded already.
    """
    groups = () if contents.groups is None else contents.groups.groups
    return {
        "contents": {
            "operators": list(contents.full) if full is None else full,
            "window": None if contents.window is None else vars(contents.window),
            "since": contents.since,
            "gradients": list(contents.gradients),
            "groups": [list(group) for group in groups],
        },
        "facts": {
            "index": facts.index,
            "base": facts.base,
            "applied": facts.applied.tolist(),
            **fault_rows(facts.faults),
            "policy": dict(facts.policy),
            "measured": dict(facts.measured),
            "lost": None if facts.lost is None else facts.lost.tolist(),
            "counted": None if facts.counted is None else facts.counted.tolist(),
        },
    }


def decode_facts(body: Mapping[str, Any]) -> tuple[Contents, Facts]:
    """Returns the arguments of ``encode_facts``, from a document that fits the schema. Groups have no operators."""
    contents, facts = body["contents"], body["facts"]
    window, groups = contents["window"], tuple(map(tuple, contents["groups"]))
    lost, counted = (
        None if facts[name] is None else np.asarray(facts[name], dtype=np.int64) for name in ("lost", "counted")
    )
    return Contents(
        full=tuple(contents["operators"]),
        gradients=tuple(contents["gradients"]),
        groups=GradientGroups(groups, NO_COUNTS) if groups else None,
        window=None if window is None else WindowPlace(window["start"], window["size"], window["slot"]),
        since=contents["since"],
    ), Facts(
        **{name: facts[name] for name in ("index", "base", "policy", "measured")},
        applied=np.asarray(facts["applied"], dtype=np.int64),
        faults=tuple(faults_in(facts)),
        lost=lost,
        counted=counted,
    )


@dataclass(frozen=True)
class SlotHeader:
    """The header of one slot (see the module).

    Attributes:
        identity: Of the snapshot.
        rank: Rank of the share.
        world_size: Ranks of that life.
        nbytes: Size of the slot.
        freshness: Result of comparing its checksums with those of the rank's slot before (``ledger.freshness``).
        contents: Of the snapshot, as far as readers need them.
        facts: Of its step.
        state: The rank's state file.
        parts: Slices of the slot.
        sent: A copy of the part of its rank's share that went to peers, which is not all.
        only: ``STATE``, ``TENSORS`` or ``GRADIENTS`` if the slot is not all of the share; else empty.
        sealer: Rank that sealed its own or another's share because training may stop; None if the snapshot was due.
        gradient_slots: Numbers in ``contents.groups`` of the slots of ``GRADIENTS`` that were sealed with this one.
        gradient_slot: Number of a slot of ``GRADIENTS`` among these.
    """

    identity: Step
    rank: int
    world_size: int
    nbytes: int
    freshness: int
    contents: Contents
    facts: Facts
    state: bytes
    parts: tuple[SlotPart, ...]
    sent: bool = False
    only: str = ""
    sealer: int | None = None
    gradient_slots: tuple[int, ...] = ()
    gradient_slot: int = 0

    @property
    def step(self) -> int:
        return self.identity.step

    def slices(self, part: SlotPart, path: str) -> tuple[SliceEntry, ...]:
        """Returns the slices of one part, with checksums.

        Args:
            path: For messages.

        Raises:
            DamagedError: The part's header is of another run, life, step or rank.
        """
        header = part.header(path)
        stored = header.run_id, header.step, header.generation, header.rank
        if stored != (self.identity.run, self.step, self.identity.generation, self.rank):
            raise DamagedError(path, f"{_NOT_OURS}a part is of {stored}", step=self.step, rank=self.rank)
        if part.begin + header.data_nbytes > self.nbytes:
            raise DamagedError(path, f"{_NOT_OURS}a part ends beyond the slot", step=self.step, rank=self.rank)
        return header.slices


_AS_THEY_ARE = ("rank", "world_size", "nbytes", "freshness", "sent", "only", "sealer", "gradient_slot")
"""Fields that stand in the document as they are."""


def encode_slot(header: SlotHeader, full: Fragment | None = None) -> bytes:
    """Returns the bytes of the header's file.

    Args:
        header: Of the slot.
        full: See ``encode_facts``.
    """
    parts = [{"kind": part.kind, "begin": part.begin, **_piece(part.raw)} for part in header.parts]
    body = {
        "run_id": header.identity.run,
        "life": header.identity.life,
        "sequence": header.identity.number,
        "step": header.identity.step,
        "generation": header.identity.generation,
        **{name: getattr(header, name) for name in _AS_THEY_ARE},
        **encode_facts(header.contents, header.facts, full),
        "state": _piece(header.state),
        "parts": parts,
        "gradient_slots": list(header.gradient_slots),
    }
    document = encode_document(KIND, body)
    length = len(document).to_bytes(_LENGTH_NBYTES, "little")
    return b"".join([length, document, header.state, *(part.raw for part in header.parts)])


def _piece(raw: bytes) -> dict[str, Any]:
    return {"nbytes": len(raw), "xxh3_128": digest(raw)}


def decode_slot(raw: bytes, path: str) -> SlotHeader:
    """Decodes the result of ``encode_slot``.

    Args:
        path: For messages.

    Raises:
        DamagedError: The bytes are not as they were written, or of another format.
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
    contents, facts = decode_facts(body)
    run, life, generation, step, number = (body[n] for n in ("run_id", "life", "generation", "step", "sequence"))
    return SlotHeader(
        Step(run, life, generation, step, number, parting=body["sealer"] is not None),
        **{name: body[name] for name in _AS_THEY_ARE},
        contents=contents,
        facts=facts,
        state=state,
        parts=tuple(
            SlotPart(part["kind"], part["begin"], piece) for part, piece in zip(body["parts"], headers, strict=True)
        ),
        gradient_slots=tuple(body["gradient_slots"]),
    )
