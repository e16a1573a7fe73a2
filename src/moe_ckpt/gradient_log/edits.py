"""Notices what writes to weights or optimizer state beside the optimizers: no log of gradients has that.

What torch counts of each tensor is noted when an update has ended, and compared when the step has, and again when the
next update begins. Weight clipping at the end of a batch, QK-clip behind ``optimizer.step()``, a momentum set back to
zero and state that was replaced or removed are seen so, and another memory (``p.data = other``). Writes through
``p.data`` and by kernels of others are not counted. So on a CPU some weights in turn are also compared by value: small
models as a whole at each step, of large ones a few MiB. On a device nothing is, since training would wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.gradient_log.capture import GradientCapture
from moe_ckpt.modeling.blocks import block_in
from moe_ckpt.modeling.watching import Entries, addresses
from moe_ckpt.slices.copying import versions

log = logging.getLogger("moe_ckpt")

Named = Sequence[tuple[str, torch.Tensor]]
Counted = tuple[str, FixedStrings, list[torch.Tensor]]
"""A kind of state, the names of parameters, and that state of each."""
_MOST_TENSORS, _MOST_BYTES = 64, 4 << 20
"""Of weights whose values are compared at a step."""
_OF_NO_USE = 3
"""If so many steps in a row are edited, the next ones will be, too."""
_MOST_NAMED = 3
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Writes:
    """Counts of writes to some tensors, and the addresses of their memory.

    Args:
        named: Tensors with the names to tell; a DTensor counts by itself, and so does its local block.
        lie: Of how many, the first ones, the memory is asked for.
    """

    def __init__(self, named: Named, lie: int) -> None:
        whole = [tensor for _, tensor in named]
        blocks = list(map(block_in, whole))
        apart = [at for at, tensor in enumerate(whole) if blocks[at] is not tensor]
        self._names = [name for name, _ in named] + [named[at][0] for at in apart]
        self._lies = blocks[:lie]
        tensors = blocks + [whole[at] for at in apart]
        self._places = [at for at, tensor in enumerate(tensors) if not tensor.is_inference()]
        self._counted = [tensors[at] for at in self._places]
        self.note()

    def note(self) -> None:
        """Notes the present state as correct."""
        self._addresses = addresses(self._lies)
        self._versions = versions(self._counted)

    def changed(self) -> Sequence[str]:
        """Returns the names of those that changed since they were noted, and notes them."""
        before, where = self._versions, self._addresses
        self.note()
        changed = np.zeros(len(self._names), dtype=bool)
        changed[self._places] = before != self._versions
        changed[: len(where)] |= where != self._addresses
        return [self._names[at] for at in np.flatnonzero(changed).tolist()]


class Values:
    """Some weights in turn, as an update left them, by their bits.

    Args:
        named: Tensors with the names to tell.
    """

    def __init__(self, named: Named) -> None:
        self._named = [(name, tensor) for name, tensor in named if tensor.element_size() in _INTEGERS]
        self._next = self._turn = 0
        self._noted: dict[torch.dtype, tuple[list[str], list[torch.Tensor]]] = {}
        self._copies: dict[torch.dtype, torch.Tensor] = {}

    def note(self) -> None:
        """Copies the next ones."""
        self._noted, rest, noted, self._turn = {}, _MOST_BYTES, 0, self._turn + 1
        for at in range(min(len(self._named), _MOST_TENSORS)):
            name, tensor = self._named[(self._next + at) % len(self._named)]
            block = block_in(tensor).detach()
            if not block.is_cpu:
                continue  # training would wait for the device at each comparison
            part = _part(block.view(_INTEGERS[tensor.element_size()]), rest, self._turn)
            names, parts = self._noted.setdefault(part.dtype, ([], []))
            names.append(name)
            parts.append(part)
            noted += 1
            rest -= part.nbytes
            if rest <= 0:
                break
        self._next += noted
        self._copies = {dtype: _joined(parts) for dtype, (_, parts) in self._noted.items()}

    def changed(self) -> Sequence[str]:
        """Returns the names of tensors with other values now, and notes these values."""
        differing: list[str] = []
        for dtype, (names, parts) in self._noted.items():
            now, before = _joined(parts), self._copies[dtype]
            if not torch.equal(now, before):
                sizes = [part.numel() for part in parts]
                pairs = zip(names, torch.split(now, sizes), torch.split(before, sizes), strict=True)
                differing += [name for name, one, other in pairs if not torch.equal(one, other)]
                self._copies[dtype] = now
        return differing


def _joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns a copy of the elements of all: to copy and compare each by itself takes longer than its bytes do."""
    return torch.cat([part.reshape(-1) for part in parts])


class Marks:
    """Weights and state of one optimizer, as its update left them.

    Args:
        weights: What it updates.
        optimizer: None for tensors without state.
        by_value: Values are compared, too.
    """

    def __init__(self, weights: Named, optimizer: Optimizer | None, *, by_value: bool = True) -> None:
        self._weights, self._optimizer = weights, optimizer
        self._values = Values(weights if by_value else ())
        self._counts: list[Counted] = []
        self._note_state()

    def _note_state(self) -> None:
        live: Mapping[torch.Tensor, dict[str, Any]] = {} if self._optimizer is None else self._optimizer.state
        states = [(name, live.get(weight, {})) for name, weight in self._weights]
        self._state = {name: dict(entries) for name, entries in states}
        self._entries = (
            Entries([live] if isinstance(live, dict) else [], dict),  # whose entries are whose
            Entries([entries for _, entries in states], torch.Tensor),
        )
        tensors = ((name, value) for name, state in states for value in state.values())
        self._writes = Writes(
            [*self._weights, *((n, entry) for n, entry in tensors if isinstance(entry, torch.Tensor))],
            len(self._weights),
        )
        self._counts = []

    def counts(self) -> Sequence[Counted]:
        """Returns the state of no dimension (step counts), which a parameter has once, whatever rows are saved.

        Raises:
            UnsupportedError: The optimizer keeps state that is no tensor.
        """
        groups: dict[tuple[str, torch.dtype, torch.device], tuple[list[str], list[torch.Tensor]]] = {}
        for name, state in () if self._counts else self._state.items():
            for kind, value in state.items():
                if isinstance(value, torch.Tensor):
                    if value.ndim == 0:
                        names, values = groups.setdefault((kind, value.dtype, value.device), ([], []))
                        names.append(name)
                        values.append(value)
                elif value is not None:
                    raise UnsupportedError(
                        f"state {kind!r} of {name} in {type(self._optimizer).__name__} is a {type(value).__name__}; "
                        "only tensors are logged. Keep it in a tensor, as torch's optimizers do, or use a policy that "
                        "saves full state."
                    )
        self._counts += [(kind, FixedStrings(names), values) for (kind, *_), (names, values) in groups.items()]
        return self._counts

    def note(self) -> None:
        """The update has ended."""
        if self._has_same_state():
            self._writes.note()
        else:
            self._note_state()
        self._values.note()

    def changed(self) -> Iterable[str]:
        """Returns the names of weights that changed since, or their state; notes what is there now."""
        names = dict.fromkeys((*self._writes.changed(), *self._values.changed()))
        if not self._has_same_state():
            before = self._state
            self._note_state()
            names |= dict.fromkeys(name for name, state in before.items() if not _are_same(state, self._state[name]))
        return names

    def _has_same_state(self) -> bool:
        return all(entries.same() for entries in self._entries)


class EditWatch:
    """Watches the weights of all optimizers of a rank, from ``begin`` on. For the training thread only.

    Args:
        optimizers: As given to ``GradientCapture``.
        copies: Further weights, which are written when the optimizers have stepped: the model's, of master weights.
        gathered: They come from other ranks later, by what torch does not count.
    """

    def __init__(self, optimizers: Sequence[Optimizer], copies: Named, *, gathered: bool = False) -> None:
        self._optimizers, self._copied_weights, self._gathered = tuple(optimizers), copies, gathered
        self._capture: GradientCapture | None = None
        self._of: Mapping[tuple[int, str], torch.Tensor] = {}
        self._marks: dict[int, Marks] = {}
        self._copies: Marks | None = None
        self._edited: dict[str, None] = {}
        self._has_looked = False

    def begin(self, capture: GradientCapture) -> None:
        """Training begins: from here on, each update is noted."""
        self._capture = capture
        capture.after_updates(self._updated)

    def before_update(self, number: int, *, first: bool) -> None:
        """An optimizer is about to make an update.

        Args:
            number: Of it.
            first: No other one has in this step.
        """
        self._has_looked = False
        self._renew()
        if number in self._marks:
            self._edited |= dict.fromkeys(self._marks[number].changed())
        if first and self._copies is not None:
            self._edited |= dict.fromkeys(self._copies.changed())

    def _updated(self, number: int) -> None:
        self._has_looked = False
        self._renew()
        if number in self._marks:
            self._marks[number].note()

    def copies_written(self, *, updated: bool) -> None:
        """The weights that follow the optimizers' have been written.

        Args:
            updated: They were: some optimizer stepped.
        """
        if not self._copied_weights:
            return
        if self._copies is None:
            self._copies = Marks(self._copied_weights, None, by_value=not self._gathered)
            self._copies.note()
        elif updated:
            self._copies.note()
        else:
            self._edited |= dict.fromkeys(self._copies.changed())

    def edited(self) -> Sequence[str]:
        """Returns the names of what was changed by others since ``forget``, until now."""
        self._look()
        return tuple(self._edited)

    def counts(self) -> Iterator[dict[str, Any]]:
        """Yields ``Marks.counts`` of the optimizers as plain data, right after ``edited``."""
        for number, marks in self._marks.items():
            for kind, names, values in marks.counts():
                yield {"optimizer": number, "state": kind, "units": names, "values": torch.stack(values)}

    def _look(self) -> None:
        if not self._marks or self._has_looked:
            return
        self._has_looked = True
        self._renew()
        marks = chain(self._marks.values(), [] if self._copies is None else [self._copies])
        self._edited |= dict.fromkeys(chain.from_iterable(mark.changed() for mark in marks))

    def forget(self) -> None:
        """The step was taken in, as it is now."""
        self._look()
        self._has_looked, self._edited = False, {}

    def _renew(self) -> None:
        """What optimizers update may be other tensors than before."""
        tensors = {} if self._capture is None else self._capture.tensors()
        if tensors is self._of:
            return
        for number, before in self._marks.items():
            if any(key not in tensors or tensors[key] is not self._of[key] for key in self._of if key[0] == number):
                continue  # gone with the optimizer's param groups, whose layout is another matter
            self._edited |= dict.fromkeys(before.changed())
        self._of = tensors
        weights: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for (number, name), tensor in tensors.items():
            weights.setdefault(number, []).append((name, tensor))
        self._marks = {number: Marks(named, self._optimizers[number]) for number, named in weights.items()}


class EditedSteps:
    """Says which steps do not follow from their gradients.

    Args:
        policy: Its name, for messages.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._in_row = 0
        self._told = self._told_of_use = False

    def ends(self, step: int, names: Sequence[str]) -> bool:
        """Returns whether ``step``, which left the parameters with these names edited, does not follow."""
        self._in_row = self._in_row + 1 if names else 0
        if names and not self._told:
            self._told = True
            shown = ", ".join(sorted(names)[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
            log.warning(
                "step %d does not follow from its gradients: weights, optimizer state, gradients or param groups of %d "
                "parameters (%s) were changed by something other than the optimizer. Such steps are saved in full, not "
                "logged",
                step,
                len(names),
                shown,
            )
        if self._in_row >= _OF_NO_USE and not self._told_of_use:
            self._told_of_use = True
            log.warning(
                "%s saves full state instead of gradients at each step (%d in a row so far), for something other than "
                "the optimizer changes weights or optimizer state at each: clipping or normalising of weights, "
                "QK-clip, averaging. Do that in the optimizer, or take a policy that saves full state: MoEvement, "
                "Dense or MoC",
                self._policy,
                self._in_row,
            )
        return bool(names)


def _part(tensor: torch.Tensor, most_bytes: int, turn: int) -> torch.Tensor:
    """As much of it as that, another part each turn; at least an element."""
    for axis, size in enumerate(tensor.shape):
        if tensor.nbytes > most_bytes:
            length = max(1, size * most_bytes // tensor.nbytes)
            tensor = tensor.narrow(axis, turn * length % (size - length + 1), length)
    return tensor


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states have the very same tensors."""
    tensors = [{key: id(value) for key, value in state.items() if torch.is_tensor(value)} for state in (one, other)]
    return tensors[0] == tensors[1]
