"""Knows where the newest committed checkpoint lies on storage: on rank 0, for the next one to build upon.

``core.versions`` computes which part has the newest version of every operator; here is which files those are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.versions import Versions
from moe_ckpt.format.manifest import KINDS, PART_NAME, Manifest, PartRecord, group_of

Names = Mapping[str, frozenset[str]]
"""Group of files of one step (``format.manifest.group_of``) -> their names."""
Needed = dict[str, dict[str, frozenset[str]]]
"""Step directory -> the ``Names`` of what a checkpoint needs of it."""
PART = {PART_NAME: frozenset({PART_NAME})}


@dataclass(frozen=True, eq=False)
class WrittenPart:
    """The part that one step wrote.

    Attributes:
        record: Of its part.
        names: Of its shards.
        operators: ``[n]`` places of those that it has in full.
        not_finite: The first tensor with NaN or infinity; empty if there is none.
    """

    record: PartRecord
    names: Names
    operators: Counts
    not_finite: str = ""


@dataclass(frozen=True, eq=False)
class View:
    """The parts of one complete checkpoint.

    Attributes:
        versions: Each operator's newest, by the number of its part. Not changed any more.
        numbered: Number -> part, from 1 on, of those that it wrote itself, or that have an operator's newest version;
            the newest first.
    """

    versions: Versions
    numbered: Mapping[int, WrittenPart] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, catalog: Catalog) -> View:
        """Returns that of a committed checkpoint (see ``format.part.composed``)."""
        names: dict[str, dict[str, set[str]]] = {}
        for record in manifest.files:
            directory, _, name = record.path.partition("/")
            names.setdefault(directory, {}).setdefault(record.kind, set()).add(name)
        numbers = {part.directory: number for number, part in enumerate(reversed(manifest.parts), start=1)}
        versions = Versions(catalog)
        first = (manifest.files[record.files[0]] for record in manifest.operators.values())
        first_numbers = (numbers[file.path.partition("/")[0]] for file in first)
        versions.replace(catalog.places_of(tuple(manifest.operators)), list(first_numbers))
        parts = {
            number: WrittenPart(part, _frozen(names[part.directory]), versions.places_of(number), manifest.not_finite)
            for part in manifest.parts
            if len(versions.places_of(number := numbers[part.directory]))
        }
        return cls(versions, parts)

    @property
    def parts(self) -> Iterable[WrittenPart]:
        """The newest first."""
        return self.numbered.values()

    @property
    def not_finite(self) -> str:
        """The first tensor with NaN or infinity; empty if there is none. Of a part that is not all of a checkpoint on
        which a user went on, it is not known which part had it: all had."""
        return next((part.not_finite for part in self.parts if part.not_finite), "")

    def beneath(self, newer: Iterable[WrittenPart]) -> View:
        """Returns what a checkpoint consists of that wrote ``newer``, the newest last, and takes the rest from here."""
        versions, first = self.versions.copy(), max(self.numbered, default=0) + 1
        written = dict(enumerate(newer, first))
        for number, part in written.items():
            versions.record(part.operators, number)
        live = versions.live()
        rest = {number: part for number, part in self.numbered.items() if number in live}
        return View(versions, dict(reversed(written.items())) | rest)

    def needed(self) -> Needed:
        """Returns what it needs on storage."""
        needed_names: Needed = {}
        for number, part in self.numbered.items():
            kinds = (kind for kind, live in self._live.items() if number in live)
            needed_names[part.record.directory] = {kind: part.names.get(kind, frozenset()) for kind in kinds} | PART
        return needed_names

    @cached_property
    def _live(self) -> Mapping[str, frozenset[int]]:
        """Kind of shard -> numbers of the parts whose shards of it have an operator's newest version."""
        is_expert = self.versions.catalog.is_expert
        return dict(zip(KINDS, map(self.versions.live, (is_expert, ~is_expert)), strict=True))


def needed_of(manifest: Manifest) -> Needed:
    """Returns what a committed checkpoint needs on storage, its own record aside."""
    by_directory: dict[str, dict[str, set[str]]] = {}
    for path in manifest.paths:
        directory, _, name = path.partition("/")
        by_directory.setdefault(directory, {}).setdefault(group_of(name) or "", set()).add(name)
    return {directory: _frozen(groups) for directory, groups in by_directory.items()}


def _frozen(sets: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(members) for name, members in sets.items()}
