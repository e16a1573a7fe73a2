"""The part document: what the ranks wrote at one step, and which operators it holds.

Written once, by rank 0, just before the step's manifest, and never again: later manifests name it as long as they need
something of it. An operator is in the newest part that lists it, and there in the shards of its kind. Rows come from
the ranks as they are in the document, so that rank 0 only strings them together.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_ckpt.errors import DamagedError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.fragment import Fragment
from moe_ckpt.format.manifest import (
    KINDS,
    MOST_RANKS,
    NOT_OF_MODEL,
    OPERATOR_ID,
    RANK,
    FileRecord,
    Manifest,
    OperatorRecord,
    PartRecord,
    SlotRecord,
    StateRecord,
    check_version,
    kind_of,
    shard_path,
    state_path,
    step_dir,
)
from moe_ckpt.format.schema import both, listing, one_of, record, require, shown, table, text, whole
from moe_ckpt.format.sealed import digest, seal, unseal

_KIND = "moe_ckpt.part"


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint that one step wrote.

    Attributes:
        operators: Those it holds in full; what has no element is in none.
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
        body = unseal(raw, path)
        check_version(body, path, _KIND)
        require(PART, body, path, "not a part of this format: ")
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
    """A shard's row in the document, and a comma."""
    columns = [record.kind, record.rank, record.nbytes, record.header_nbytes, record.header_digest]
    return json.dumps(columns, separators=(",", ":")).encode() + b","


def state_row(record: StateRecord) -> bytes:
    """A state file's row in the document, and a comma."""
    return json.dumps([record.rank, record.nbytes, record.digest], separators=(",", ":")).encode() + b","


def encode_part(
    run_id: str, step: int, generation: int, world_size: int, *, files: bytes, states: bytes, operators: Fragment
) -> tuple[PartRecord, bytes]:
    """Returns how manifests name the part, and its bytes.

    Args:
        files, states: Rows.
        operators: A list of ids.
    """
    raw = seal(
        {
            "kind": _KIND,
            "format_version": FORMAT_VERSION,
            "run_id": run_id,
            "step": step,
            "generation": generation,
            "world_size": world_size,
            "files": Fragment.of_rows(files),
            "states": Fragment.of_rows(states),
            "operators": operators,
        }
    )
    return PartRecord(step_dir(step, generation), len(raw), digest(raw)), raw


def composed(manifest: Manifest, parts: Sequence[Part]) -> Manifest:
    """The complete view of a manifest: with what its ``parts`` hold, given in their order.

    Raises:
        DamagedError: a part is not of this checkpoint.
    """
    for part, named in zip(parts, manifest.parts, strict=True):
        _require_fitting(manifest, part, named)
    files, operators = list[FileRecord](), dict[str, OperatorRecord]()
    for part in reversed(parts):
        by_kind: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for number, file in enumerate(part.files, start=len(files)):
            by_kind[file.kind].append(number)
        files += part.files
        records = {kind: OperatorRecord(part.step, tuple(numbers)) for kind, numbers in by_kind.items()}
        operators |= {op: records[kind_of(op)] for op in part.operators}
    slots = {part.step: part.states for part in parts[: 1 + len(manifest.window)]}
    # Side tensors lie in the slots' own shards, and what only replay needs, even where no operator does.
    written = {part.directory for part in parts[: len(slots)]}
    whole_view = replace(
        manifest,
        operators=operators,
        states=parts[0].states,
        window=tuple(SlotRecord(slot.step, slots[slot.step]) for slot in manifest.window),
    )
    return pruned(whole_view, files, written)


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


def pruned(view: Manifest, files: Sequence[FileRecord], directories: Collection[str]) -> Manifest:
    """Returns the view with those of ``files`` that hold an operator's newest version, or lie in a directory of
    ``directories``."""
    needed = {number for record in view.distinct_records for number in record.files}
    needed.update(number for number, file in enumerate(files) if file.path.partition("/")[0] in directories)
    places = {number: position for position, number in enumerate(sorted(needed))}
    records = {
        id(record): OperatorRecord(record.step, tuple(places[number] for number in record.files))
        for record in view.distinct_records
    }
    operators = {op: records[id(record)] for op, record in view.operators.items()}
    return replace(view, files=tuple(files[number] for number in places), operators=operators)


# --- what a part must look like ---

_FIELDS = record(
    {
        "run_id": text,
        "step": whole(),
        "generation": whole(),
        "world_size": whole(1, MOST_RANKS),
        "files": table(
            {"kind": one_of(*KINDS), "rank": RANK, "nbytes": whole(), "header_nbytes": whole(), "digest": text}
        ),
        "states": table({"rank": RANK, "nbytes": whole(), "digest": text}),
        "operators": listing(OPERATOR_ID),
    }
)


def _contradictions(body: Mapping[str, Any]) -> str:
    """What is wrong between fields that are right by themselves."""
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


PART = both(_FIELDS, _contradictions)
