"""Headers of shards put together from known texts: what ``shard.encode_header`` gives, without work for each slice."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.gathering import Bytes, Column, Numbers, gather, pieces_of
from moe_ckpt.format.shard import METADATA_KEY, Checksums, SliceEntry

_NO_CHECKSUM = "0" * 16
_METADATA_AT, _METADATA, _DIGITS_AT, _PLACE_AT, _PLACE_TEXT = range(5)
_json = json.JSONEncoder(separators=(",", ":")).encode


class HeaderTexts:
    """The texts of slices in headers, by number. They are the same in every shard, and slow to write.

    A slice's *metadata* has zeros for the checksum; its *place* is what comes before its byte range. Both begin by what
    parts them from the slice before.
    """

    def __init__(self) -> None:
        self._metadata, self._places = Column(np.uint8), Column(np.uint8)
        self._rows = Column(np.int64, 5)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def metadata(self) -> Bytes:
        """The metadata texts of all slices."""
        return self._metadata.rows

    @property
    def places(self) -> Bytes:
        """The place texts of all slices."""
        return self._places.rows

    @property
    def rows(self) -> Numbers:
        """``[n, 5]``, of each where its metadata begins, bytes, where the zeros are; where its place begins, bytes."""
        return self._rows.rows

    def add(self, entries: Iterable[SliceEntry]) -> None:
        """Adds slices, which get the next numbers."""
        metadata, places, rows = list[str](), list[str](), list[tuple[int, ...]]()
        at, place_at = len(self._metadata), len(self._places)
        for entry in entries:
            name = _json(entry.name)
            fields = _json([entry.key, entry.operator, entry.offsets, entry.global_shape])
            before = _escaped(f',{name}:{fields[:-1]},"')
            metadata.append(before + _NO_CHECKSUM + _escaped('"]' if entry.on_param_device else '","cpu"]'))
            places.append(f']}},{name}:{{"dtype":{_json(entry.dtype)},"shape":{_json(entry.shape)},"data_offsets":[')
            rows.append((at, len(metadata[-1]), len(before), place_at, len(places[-1])))
            at, place_at = at + len(metadata[-1]), place_at + len(places[-1])
        for column, texts in ((self._metadata, metadata), (self._places, places)):
            column.add(np.frombuffer("".join(texts).encode(), dtype=np.uint8))
        self._rows.add(np.array(rows, dtype=np.int64).reshape(-1, 5))


class HeaderTemplate:
    """The header of a shard but for its step, its generation and its checksums: put together once, rendered for each.

    Nothing here runs bytecode per slice. For one thread at a time.

    Args:
        run_id: Of the run.
        rank: Whose shard.
        texts: Of its slices, among others.
        numbers: Of its slices in the order of ``lay_out``, no two of which are the same.
        ends: Where each slice ends; the next begins there.
    """

    def __init__(self, run_id: str, rank: int, texts: HeaderTexts, numbers: Numbers, ends: Numbers) -> None:
        rows = texts.rows[numbers]
        sizes = rows[:, _METADATA]
        start = _escaped(f'{{"format_version":{FORMAT_VERSION},"run_id":{_json(run_id)},"step":')
        self._start = f'{{"__metadata__":{{"{METADATA_KEY}":"{start}'
        self._between = _escaped(',"generation":')
        self._opened = _escaped(f',"rank":{rank},"slices":{{')
        begins = _begins(sizes)
        metadata = np.empty(begins[-1], dtype=np.uint8)
        gather(metadata, begins[:-1], texts.metadata, rows[:, _METADATA_AT], sizes)
        self._metadata = metadata[1:]  # without what would part the first from a slice before
        self._digits_at = begins[:-1] + rows[:, _DIGITS_AT] - 1
        self._places = _places(texts.places, rows[:, _PLACE_AT], rows[:, _PLACE_TEXT], ends)

    def render(self, step: int, generation: int, checksums: Checksums) -> tuple[bytes, memoryview, memoryview, bytes]:
        """Returns the same bytes as ``encode_header`` of these slices with these checksums, in pieces; valid until the
        next call.

        They are large: each copy of them would take longer than what is done here."""
        metadata = self._metadata
        if len(checksums):
            digits = np.frombuffer(checksums.astype(">u8").tobytes().hex().encode(), dtype="V16")
            pieces_of(metadata, 16)[self._digits_at] = digits
        head = f"{self._start}{step}{self._between}{generation}{self._opened}".encode()
        nbytes = len(head) + len(metadata) + len(self._places)
        length = -(-nbytes // 8) * 8
        return length.to_bytes(8, "little") + head, metadata.data, self._places.data, b" " * (length - nbytes)


def _places(texts: Bytes, offsets: Numbers, sizes: Numbers, ends: Numbers) -> Bytes:
    """What comes behind the metadata: of each slice its place, and the two ends of its byte range."""
    if not len(ends):
        return np.concatenate([_OPENING, _CLOSING[1:]])
    listed = np.frombuffer(str([0, *ends.tolist()]).replace(" ", "").encode(), dtype=np.uint8)
    # Both ends of a slice's byte range follow on one another here, with a comma between them.
    parted = np.concatenate([[0], np.flatnonzero(listed == ord(",")), [len(listed) - 1]])
    ranges = parted[2:] - parted[:-2] - 1
    # The first text begins with a bracket that has nothing to close; the opening takes its place.
    begins = _begins(sizes + ranges) + len(_OPENING) - 1
    text = np.empty(begins[-1] + len(_CLOSING), dtype=np.uint8)
    gather(text, begins[:-1], texts, offsets, sizes)
    gather(text, begins[:-1] + sizes, listed, parted[:-2] + 1, ranges)
    text[: len(_OPENING)], text[begins[-1] :] = _OPENING, _CLOSING
    return text


def _begins(sizes: Numbers) -> Numbers:
    """Where each begins, and where the last ends."""
    begins: Numbers = np.cumsum(np.concatenate([[0], sizes]), dtype=np.int64)
    return begins


def _escaped(text: str) -> str:
    """JSON as a part of a JSON string."""
    return _json(text)[1:-1]


_OPENING = np.frombuffer(_escaped("}}").encode() + b'"', dtype=np.uint8)
_CLOSING = np.frombuffer(b"]}}", dtype=np.uint8)
