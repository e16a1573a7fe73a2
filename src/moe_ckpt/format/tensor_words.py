"""Reads fields of torch's tensor objects directly from memory, for many tensors at a time.

Where a tensor's memory lies, how often it was written to, whether it requires a gradient and has one are machine words
of the objects behind it. To ask 75 000 tensors by calls takes longer than all else that a checkpoint asks of the
training thread; one operation of numpy reads the words of all. Where they are is not taken for granted: it is found out
on tensors made for that, by what changes with what, and what is read of each other tensor is compared with torch's
answer when it is first seen. Where anything is not as found, nothing is read here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import attrgetter, is_, methodcaller
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.format.gathering import WORD, Numbers, Words, spanned, words_at

_IS_READABLE = sys.implementation.name == "cpython" and sys.maxsize > 1 << 32 and sys.byteorder == "little"
"""``id`` is an address, and words are as wide as they are taken to be."""
_TENSOR_WORDS, _STORAGE_WORDS = 24, 6
"""Of the C++ objects; what is looked for is within the first so many."""
_NOTED_WORDS = 20
"""Of what autograd notes of a tensor; likewise."""
_SAMPLES = 8
"""Tensors that are looked at to find the version counter, and whether they require gradients."""
_COUNT_AT = 16
"""Of a version counter: its count, in 32 bits, follows on the two words of every object that torch counts."""

_CDATA = attrgetter("_cdata")
VERSION = attrgetter("_version")
_REQUIRES_GRAD = attrgetter("requires_grad")
_GRADIENT = attrgetter("grad")
_STORAGE = methodcaller("untyped_storage")
_OFFSET = methodcaller("storage_offset")


@dataclass(frozen=True)
class _Layout:
    """Where words are, in bytes.

    Attributes:
        tensor: In Python's object, the pointer to the C++ tensor.
        storage: In that, the pointer to the storage.
        offset: In that, the element of the storage that is the tensor's first.
        counter: In that, the pointer to the version counter.
        data: In the storage, the pointer to its memory.
    """

    tensor: int
    storage: int
    offset: int
    counter: int
    data: int


class Lying:
    """Where tensors lie: in which storage, from which element on, and where that has its memory.

    Three levels of words; each is read only where the one before is what it was, so that what is reached lives.

    Args:
        tensors: Which this keeps alive.
        layout: Of torch's objects.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: _Layout) -> None:
        impls = _numbers(map(_CDATA, tensors), len(tensors))
        storages = list(map(_STORAGE, tensors))
        self._levels = (
            (Words(tensors, _ids(tensors) + layout.tensor),),
            (Words(tensors, impls + layout.storage), Words(tensors, impls + layout.offset)),
            (Words(tensors, _numbers(map(_CDATA, storages), len(tensors)) + layout.data),),
        )
        expected: Sequence[Iterable[int]] = (
            impls,
            map(_CDATA, storages),
            map(_OFFSET, tensors),
            (storage.data_ptr() for storage in storages),
        )
        found = (words for level in self._levels for words in level)
        pairs = zip(found, expected, strict=True)
        self.is_known = all(words.are(_numbers(those, len(tensors))) for words, those in pairs)

    def same(self, places: Numbers | None = None) -> bool:
        """Whether they lie where they lay.

        Args:
            places: Of those that are asked about; None for all.
        """
        return all(words.same(places) for level in self._levels for words in level)


def lying(tensors: Sequence[torch.Tensor]) -> Lying | None:
    """Where they lie; None where that cannot be read."""
    layout = _layout()
    if layout is None or not tensors:
        return None
    try:
        found = Lying(tensors, layout)
    except (RuntimeError, NotImplementedError):  # some have no storage
        return None
    return found if found.is_known else None


@dataclass(frozen=True)
class _GradientLayout:
    """Where words are, in bytes.

    Attributes:
        noted: In the C++ tensor, the pointer to what autograd notes of it; 0 where it notes nothing.
        required: In that, the word with the bit that says whether a gradient is required.
        bit: Which it is.
        gradient: In what is noted, the pointer to the gradient's C++ tensor.
        nothing: That pointer's value where there is no gradient; an address, not a place.
    """

    noted: int
    required: int
    bit: int
    gradient: int
    nothing: int


class _Noted:
    """What autograd notes of some tensors.

    Args:
        tensors: Which this keeps alive.
        layout: Of torch's objects.
        gradients: Likewise.

    Attributes:
        levels: Words that lead to the notes; each is to be read only where the one before is what it was.
        there: Places of the tensors of which something is noted.
        notes: Addresses of that.
        is_known: Whether the tensors' objects are as torch says.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], layout: _Layout, gradients: _GradientLayout) -> None:
        impls = _numbers(map(_CDATA, tensors), len(tensors))
        objects, pointers = Words(tensors, _ids(tensors) + layout.tensor), Words(tensors, impls + gradients.noted)
        noted = pointers.read().astype(np.int64)
        self.levels = objects, pointers
        self.there = np.flatnonzero(noted)
        self.notes = noted[self.there]
        self.is_known = objects.are(impls)


class Requiring:
    """Which tensors require a gradient: the words that say so, and some other things that autograd notes.

    Args:
        tensors: Which this keeps alive.
        noted: Of them.
        gradients: Of torch's objects.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], noted: _Noted, gradients: _GradientLayout) -> None:
        required = Words(tensors, noted.notes + gradients.required)
        self._levels = *noted.levels, required
        found = np.zeros(len(tensors), dtype=bool)
        found[noted.there] = required.read() & np.uint64(gradients.bit) > 0
        asked = np.fromiter(map(_REQUIRES_GRAD, tensors), bool, len(tensors))
        self.is_known = noted.is_known and np.array_equal(found, asked)

    def same(self) -> bool:
        """True only if they all do, or do not, as they did."""
        return all(words.same() for words in self._levels)


class Gradients:
    """Which tensors have a gradient.

    Args:
        tensors: Which this keeps alive.
        noted: Of them.
        gradients: Of torch's objects.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], noted: _Noted, gradients: _GradientLayout) -> None:
        self._noted = noted
        self._memory, self._places = spanned(noted.notes + gradients.gradient)
        self._nothing = np.uint64(gradients.nothing)
        self._absent = np.ones(len(tensors), dtype=bool)
        asked = np.fromiter(map(is_, map(_GRADIENT, tensors), repeat(None)), bool, len(tensors))
        self.is_known = noted.is_known and np.array_equal(self._look(), asked)

    def absent(self) -> npt.NDArray[np.bool_] | None:
        """Returns for each tensor whether it has none; None if autograd keeps its notes elsewhere by now."""
        return self._look() if all(words.same() for words in self._noted.levels) else None

    def _look(self) -> npt.NDArray[np.bool_]:
        self._absent[self._noted.there] = self._memory.take(self._places) == self._nothing
        return self._absent


def requiring(tensors: Sequence[torch.Tensor]) -> Requiring | None:
    """Which of them require a gradient; None where that cannot be read."""
    return _of_gradients(Requiring, tensors)


def gradients_of(tensors: Sequence[torch.Tensor]) -> Gradients | None:
    """Which of them have a gradient; None where that cannot be read."""
    return _of_gradients(Gradients, tensors)


_Read = TypeVar("_Read", Requiring, Gradients)


def _of_gradients(kind: type[_Read], tensors: Sequence[torch.Tensor]) -> _Read | None:
    layout, gradients = _layout(), _gradient_layout()
    if layout is None or gradients is None or not tensors:
        return None
    found = kind(tensors, _Noted(tensors, layout, gradients), gradients)
    return found if found.is_known else None


def counters(tensors: Sequence[torch.Tensor]) -> Numbers:
    """Addresses of the tensors' version counts, for ``counts``; 0 where one cannot be read.

    An address holds for as long as the very tensor object lives.
    """
    found, layout = np.zeros(len(tensors), dtype=np.int64), _layout()
    those = [at for at, tensor in enumerate(tensors) if not tensor.is_inference()]
    if layout is None or not those:
        return found
    given = [tensors[at] for at in those]
    pointers = words_at(_numbers(map(_CDATA, given), len(given)) + layout.counter).astype(np.int64)
    there = np.flatnonzero(pointers)
    addresses = pointers[there] + _COUNT_AT
    known = counts(addresses) == _numbers((given[at]._version for at in there.tolist()), len(there))
    found[np.array(those)[there[known]]] = addresses[known]
    return found


def counts(addresses: Numbers) -> npt.NDArray[np.uint32]:
    """How often the tensors were written to, whose counters are there."""
    return Counts(addresses).read()


class Counts:
    """How often some tensors were written to, for repeated reading. The caller must keep the tensors alive.

    Args:
        addresses: Of their counters, see ``counters``.
    """

    def __init__(self, addresses: Numbers) -> None:
        memory, places = spanned(addresses)
        # The count is the lower half of a little-endian word.
        self._memory, self._places = memory.view(np.uint32), places * 2

    def read(self) -> npt.NDArray[np.uint32]:
        return self._memory.take(self._places)


@lru_cache(maxsize=1)
def _layout() -> _Layout | None:
    """As torch's objects show it; None where they do not show just one place of each."""
    if not _IS_READABLE:
        return None
    try:
        with torch.device("cpu"), torch.no_grad():
            return _found()
    except (ValueError, AttributeError, RuntimeError):
        return None


def _found() -> _Layout:
    """Raises ``ValueError`` for a word that is not there."""
    base, other = torch.zeros(3, 50), torch.zeros(3, 50)
    part = base[1:, 7:]
    tensor = _first(_words(id(base), torch.Tensor.__basicsize__ // WORD), base._cdata, at_least=2)
    _first(_words(id(other) + tensor, 1), other._cdata)
    storage = _first(_words(base._cdata, _TENSOR_WORDS), base.untyped_storage()._cdata)
    offset = _first(_words(part._cdata, _TENSOR_WORDS), int(part.storage_offset()))
    # The last words may lie behind the object, where anything is: what is alike there by chance is not so each time.
    samples = [(each, each[1:, 7:], each.detach()) for each in (torch.zeros(3, 50) for _ in range(_SAMPLES))]
    alike = set.intersection(*map(_alike, samples, [*samples[1:], samples[0]])) - {storage}
    if len(alike) != 1:
        raise ValueError("no single pointer to a version counter")
    found = _Layout(tensor, storage, offset, alike.pop(), _data_of(base))
    _require_counted(found, base, part, other)
    return found


def _alike(sample: Sequence[torch.Tensor], another: Sequence[torch.Tensor]) -> set[int]:
    """Where a tensor, a view of it and a detached one have one word, and another tensor has another."""
    words = [_words(each._cdata, _TENSOR_WORDS) for each in (*sample, another[0])]
    found = enumerate(zip(*words, strict=True))
    return {WORD * at for at, (one, two, three, other) in found if one == two == three != other}


def _data_of(base: torch.Tensor) -> int:
    kept = base.untyped_storage()
    return _first(_words(kept._cdata, _STORAGE_WORDS), kept.data_ptr())


def _require_counted(layout: _Layout, base: torch.Tensor, part: torch.Tensor, other: torch.Tensor) -> None:
    """Raises ``ValueError`` unless the count of ``base`` moves with each writing to its ``part``, and no other's."""
    for writes in (0, 1, 3):
        for _ in range(writes):
            part.add_(1)
        pointers = words_at(np.array([base._cdata, other._cdata]) + layout.counter).astype(np.int64)
        if counts(pointers + _COUNT_AT).tolist() != [base._version, other._version]:
            raise ValueError("no version count")


@lru_cache(maxsize=1)
def _gradient_layout() -> _GradientLayout | None:
    """As ``_layout``."""
    if not _IS_READABLE:
        return None
    try:
        with torch.device("cpu"), torch.inference_mode(False):
            return _found_gradients()
    except (ValueError, AttributeError, RuntimeError):
        return None


def _found_gradients() -> _GradientLayout:
    """Raises ``ValueError`` for a word that is not there."""
    samples = [torch.zeros(3) for _ in range(_SAMPLES)]
    noted = _moving([tensor._cdata for tensor in samples], _TENSOR_WORDS, samples)
    places = np.array([tensor._cdata for tensor in samples], dtype=np.int64) + noted
    pointers = words_at(places).astype(np.int64)
    required = _moving(pointers.tolist(), _NOTED_WORDS, samples)
    now = words_at(pointers + required)
    for tensor in samples:
        tensor.requires_grad_(not tensor.requires_grad)
    bits = set((words_at(pointers + required) ^ now).tolist())
    if len(bits) != 1 or not np.array_equal(words_at(places).astype(np.int64), pointers):
        raise ValueError("no single bit")
    return _GradientLayout(noted, required, bits.pop(), *_gradient_in(pointers.tolist(), samples))


def _gradient_in(addresses: Sequence[int], samples: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Where, of what is noted at each address, the pointer to the sample's gradient is, and what it is without one.

    Raises ``ValueError`` unless both are the same of all.
    """
    found, before = set(), _words(addresses[0], _NOTED_WORDS)
    for address, tensor in zip(addresses, samples, strict=True):
        gradient = tensor.grad = torch.zeros_like(tensor)
        at = _first(_words(address, _NOTED_WORDS), gradient._cdata)
        del gradient
        tensor.grad = None
        found.add((at, _words(address, _NOTED_WORDS)[at // WORD]))
    [(at, nothing)] = found  # unpacking raises ``ValueError``, too
    if before[at // WORD] != nothing:
        raise ValueError("no gradient is not always the same")
    return at, nothing


def _moving(addresses: Sequence[int], count: int, samples: Sequence[torch.Tensor]) -> int:
    """Where, of the first ``count`` words at each address, one is another as soon as its sample requires a gradient, or
    does so no more. Raises ``ValueError`` unless it is one place in all."""
    places = set(range(count))
    for address, tensor in zip(addresses, samples, strict=True):
        before = _words(address, count)
        tensor.requires_grad_(not tensor.requires_grad)
        places &= {at for at, (was, now) in enumerate(zip(before, _words(address, count), strict=True)) if was != now}
    if len(places) != 1:
        raise ValueError("no single word")
    return WORD * places.pop()


def _words(address: int, count: int) -> list[int]:
    return [int(word) for word in words_at(np.arange(count, dtype=np.int64) * WORD + address)]


def _first(words: Sequence[int], wanted: int, at_least: int = 0) -> int:
    return WORD * words.index(wanted, at_least)


def _ids(objects: Sequence[object]) -> Numbers:
    return _numbers(map(id, objects), len(objects))


def _numbers(found: Iterable[int], count: int) -> Numbers:
    return np.fromiter(found, np.int64, count)
