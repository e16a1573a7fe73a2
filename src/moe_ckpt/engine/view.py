"""What the newest committed checkpoint takes from which step: on rank 0, for the next one to build upon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import or_

from moe_ckpt.core.operators import Catalog
from moe_ckpt.format.manifest import PART_NAME, FileRecord, Manifest, PartRecord, group_of, kind_of
from moe_ckpt.format.part import pruned

Names = Mapping[str, frozenset[str]]
"""Group of files of one step (``format.manifest.group_of``) -> their names."""
Needed = dict[str, dict[str, frozenset[str]]]
"""Step directory -> the ``Names`` of what a checkpoint needs of it."""
Operators = Mapping[str, int]
"""Kind of shard -> operators (``Catalog.bits_of``); no kind without any."""
PART = {PART_NAME: frozenset({PART_NAME})}


@dataclass(frozen=True, eq=False)
class HeldPart:
    """A step's part.

    Attributes:
        names: Of its shards.
        live: The operators that no newer part has.
    """

    record: PartRecord
    names: Names
    live: Operators

    @cached_property
    def needed(self) -> dict[str, frozenset[str]]:
        """Names of its files that are needed on storage, by group."""
        return {kind: self.names.get(kind, frozenset()) for kind in self.live} | PART

    def beneath(self, newer: Operators) -> HeldPart | None:
        """The same below a part that holds ``newer``; None if that supersedes it."""
        left = {kind: rest for kind, those in self.live.items() if (rest := those & ~newer.get(kind, 0))}
        if left == self.live:
            return self
        return replace(self, live=left) if left else None


@dataclass(frozen=True, eq=False)
class View:
    """The parts of one complete view, newest first.

    Attributes:
        old: Files and operators of steps that were written before there were parts, as a manifest; None if it needs
            none.
    """

    catalog: Catalog
    parts: tuple[HeldPart, ...] = ()
    old: Manifest | None = None

    @classmethod
    def of(cls, manifest: Manifest, catalog: Catalog) -> View:
        """That of a committed checkpoint (see ``format.part.composed``)."""
        names: dict[str, dict[str, set[str]]] = {}
        for record in manifest.files:
            directory, _, name = record.path.partition("/")
            names.setdefault(directory, {}).setdefault(record.kind, set()).add(name)
        live: dict[str, dict[str, list[str]]] = {part.directory: {} for part in manifest.parts}
        old = {}
        for op, held in manifest.operators.items():
            directory = _directory(manifest.files[held.files[0]])
            if directory in live:
                live[directory].setdefault(kind_of(op), []).append(op)
            else:
                old[op] = held
        parts = [
            HeldPart(
                part,
                _frozen(names[part.directory]),
                {kind: catalog.bits_of(tuple(ops)) for kind, ops in live[part.directory].items()},
            )
            for part in manifest.parts
            if live[part.directory]
        ]
        return cls(catalog, tuple(parts), pruned(replace(manifest, operators=old), manifest.files, ()) if old else None)

    def beneath(self, newest: HeldPart) -> View:
        """What a checkpoint consists of that wrote ``newest`` and takes the rest from here."""
        older = [part for each in self.parts if (part := each.beneath(newest.live)) is not None]
        old = self.old
        if old is not None:
            newer = self._named(reduce(or_, newest.live.values(), 0))
            rest = {op: held for op, held in old.operators.items() if op not in newer}
            old = pruned(replace(old, operators=rest), old.files, ()) if rest else None
        return View(self.catalog, (newest, *older), old)

    def lacks(self, operators: int) -> frozenset[str]:
        """Those of ``operators`` (``Catalog.bits_of``) that it does not have."""
        held = reduce(or_, (those for part in self.parts for those in part.live.values()), 0)
        return self._named(operators & ~held).difference(() if self.old is None else self.old.operators)

    def _named(self, bits: int) -> frozenset[str]:
        return frozenset(map(self.catalog.everything.__getitem__, self.catalog.places_in(bits).tolist()))

    def needed(self) -> Needed:
        """What it needs on storage."""
        found: Needed = {}
        for record in () if self.old is None else self.old.files:
            groups = found.setdefault(_directory(record), {})
            groups[record.kind] = groups.get(record.kind, frozenset()) | {record.path.partition("/")[2]}
        for part in self.parts:
            found[part.record.directory] = part.needed
        return found


def needed_of(manifest: Manifest) -> Needed:
    """What a committed checkpoint needs on storage, its own record aside."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in manifest.paths:
        directory, _, name = path.partition("/")
        found.setdefault(directory, {}).setdefault(group_of(name) or "", set()).add(name)
    return {directory: _frozen(groups) for directory, groups in found.items()}


def _directory(record: FileRecord) -> str:
    return record.path.partition("/")[0]


def _frozen(sets: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(each) for name, each in sets.items()}
