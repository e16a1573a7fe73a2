"""Notices writes to weights or optimizer state by anything but the optimizers: a log of gradients does not have them.

When an update has ended, the versions that torch counts of each tensor are noted. They are compared when the step has
ended, and again when the next update begins. This shows weight clipping at the end of a batch, QK-clip behind
``optimizer.step()``, a momentum set to zero, state that was replaced or removed, and other memory (``p.data = other``).
torch does not count writes through ``p.data``, nor those of foreign kernels. So on a CPU some weights are also compared
by value: all of a small model at each step, a few MiB in turn of a large one. On a device no values are compared, since
training would wait for that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.gradient_log.capture import GradientCapture
from moe_ckpt.modeling.blocks import block_in
from moe_ckpt.modeling.watching import Entries, addresses
from moe_ckpt.slices.copying import write_counts

log = logging.getLogger("moe_ckpt")

Named = Sequence[tuple[str, torch.Tensor]]
Counted = tuple[str, FixedStrings, list[torch.Tensor]]
"""A kind of state, the names of parameters, and the state of each."""
_MOST_TENSORS, _MOST_BYTES = 64, 4 << 20
"""Most weights and bytes whose values are compared at a step."""
_OF_NO_USE = 3
"""Number of edited steps in a row after which the log is of no use, since later steps will be edited, too."""
_MOST_NAMED = 3
_COPIES = -1
"""Stands for the number of an optimizer, of weights that none updates."""


class Writes:
    """The versions that torch counts of some tensors, and the addresses of their memory.

    Args:
        named: Tensors with their names. Of a DTensor, both the tensor and its local block are watched.
        lie: Number of tensors, from the first, whose addresses are compared.
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
        self._versions = write_counts(self._counted)

    def changed(self) -> Sequence[str]:
        """Returns the names of the tensors that changed since they were noted, and notes them anew."""
        before, where = self._versions, self._addresses
        self.note()
        changed = np.zeros(len(self._names), dtype=bool)
        changed[self._places] = before != self._versions
        changed[: len(where)] |= where != self._addresses
        return [self._names[at] for at in np.flatnonzero(changed).tolist()]


class Values:
    """The bytes of some weights in turn, as an update left them.

    Args:
        named: Tensors with their names.
    """

    def __init__(self, named: Named) -> None:
        self._named = named
        self._next = self._turn = 0
        self._noted: list[tuple[str, torch.Tensor]] = []
        self._copy = self._bytes()

    def note(self) -> None:
        """Copies the next weights."""
        self._noted, rest, self._turn = [], _MOST_BYTES, self._turn + 1
        for at in range(min(len(self._named), _MOST_TENSORS)):
            name, tensor = self._named[(self._next + at) % len(self._named)]
            block = block_in(tensor).detach()
            if block.is_cpu and rest > 0:  # training would wait for a device at each comparison
                self._noted.append((name, _part(block, rest, self._turn)))
                rest -= self._noted[-1][1].nbytes
        self._next += len(self._noted)
        self._copy = self._bytes()

    def changed(self) -> Sequence[str]:
        """Returns the names of weights with other values now, and notes these values."""
        before, self._copy = self._copy, self._bytes()
        if torch.equal(self._copy, before):
            return []
        sizes = [part.nbytes for _, part in self._noted]
        pairs = zip(self._noted, torch.split(self._copy, sizes), torch.split(before, sizes), strict=True)
        return [name for (name, _), one, other in pairs if not torch.equal(one, other)]

    def _bytes(self) -> torch.Tensor:
        """Returns a copy of all bytes: copying and comparing each weight by itself is slower."""
        parts = [part.contiguous().reshape(-1).view(torch.uint8) for _, part in self._noted]
        return torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *parts])


class Marks:
    """Weights and state of one optimizer, as its update left them.

    Args:
        weights: Weights that the optimizer updates.
        optimizer: The optimizer; None for weights without one.
        by_value: True if values are compared, too.
    """

    def __init__(self, weights: Named, optimizer: Optimizer | None, *, by_value: bool = True) -> None:
        self._weights, self._optimizer = weights, optimizer
        self._values = Values(weights if by_value else ())
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
        self._counts: list[Counted] | None = None

    def counts(self) -> Sequence[Counted]:
        """Returns the 0-d state (step counts), which a parameter has once for all its rows.

        Raises:
            UnsupportedError: The optimizer has state that is no tensor.
        """
        if self._counts is not None:
            return self._counts
        groups: dict[tuple[str, torch.dtype, torch.device], tuple[list[str], list[torch.Tensor]]] = {}
        for name, state in self._state.items():
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
        self._counts = [(kind, FixedStrings(names), values) for (kind, *_), (names, values) in groups.items()]
        return self._counts

    def note(self) -> None:
        """Notes the present state as that after the update."""
        if self._has_same_state():
            self._writes.note()
        else:
            self._note_state()
        self._values.note()

    def changed(self) -> Iterable[str]:
        """Returns the names of weights that changed, or whose state changed, and notes them anew."""
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
        copies: Further weights, written after the optimizers have stepped: the model's, made from master weights.
        gathered: True if these weights come from other ranks later, which torch does not count as writes.
    """

    def __init__(self, optimizers: Sequence[Optimizer], copies: Named, *, gathered: bool = False) -> None:
        self._optimizers, self._copies, self._gathered = tuple(optimizers), copies, gathered
        self._capture: GradientCapture | None = None
        self._updated_tensors: Mapping[tuple[int, str], torch.Tensor] = {}
        self._marks: dict[int, Marks] = {}
        """Per optimizer; those of ``copies`` by ``_COPIES``."""
        self._edited: dict[str, None] = {}
        self._is_current = False
        """True if ``_edited`` has all edits so far, because no optimizer has stepped since the last look."""

    def begin(self, capture: GradientCapture) -> None:
        """Training begins: from here on, each update is noted."""
        self._capture = capture
        capture.after_updates(self._updated)

    def before_update(self, number: int, *, first: bool) -> None:
        """An optimizer is about to make an update.

        Args:
            number: Number of the optimizer.
            first: True if no other optimizer has made an update in this step.
        """
        self._is_current = False
        self._renew()
        self._compare((number, _COPIES) if first else (number,))

    def _updated(self, number: int) -> None:
        self._is_current = False
        self._renew()
        if number in self._marks:
            self._marks[number].note()

    def copies_written(self, *, updated: bool) -> None:
        """The weights that follow the optimizers' weights have been written.

        Args:
            updated: True if some optimizer has stepped.
        """
        if not self._copies:
            return
        if _COPIES not in self._marks:
            self._marks[_COPIES] = Marks(self._copies, None, by_value=not self._gathered)
        elif not updated:
            self._compare([_COPIES])
            return
        self._marks[_COPIES].note()

    def edited(self) -> Sequence[str]:
        """Returns the names of the tensors that something else has changed since ``forget``."""
        if self._marks.keys() - {_COPIES} and not self._is_current:
            self._renew()
            self._compare(self._marks)
            self._is_current = True
        return tuple(self._edited)

    def counts(self) -> Iterator[dict[str, Any]]:
        """Yields ``Marks.counts`` of the optimizers as plain data. To be called right after ``edited``."""
        for number, marks in self._marks.items():
            for kind, names, values in marks.counts():
                yield {"optimizer": number, "state": kind, "units": names, "values": torch.stack(values)}

    def forget(self) -> None:
        """Takes the present state as that of the step."""
        self.edited()
        self._is_current, self._edited = False, {}

    def _compare(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._marks:
                self._edited |= dict.fromkeys(self._marks[number].changed())

    def _renew(self) -> None:
        """Begins anew for optimizers whose tensors are others than before."""
        tensors = {} if self._capture is None else self._capture.tensors()
        before = self._updated_tensors
        if tensors is before:
            return
        replaced = {key[0] for key in before if key not in tensors or tensors[key] is not before[key]}
        # Replaced tensors belong to changed param groups, which ``RunLog`` notices.
        self._compare(number for number in self._marks if number not in replaced | {_COPIES})
        self._updated_tensors = tensors
        weights: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for (number, name), tensor in tensors.items():
            weights.setdefault(number, []).append((name, tensor))
        copies = {number: marks for number, marks in self._marks.items() if number == _COPIES}
        self._marks = {n: Marks(named, self._optimizers[n]) for n, named in weights.items()} | copies


class EditedSteps:
    """Decides which steps do not follow from their gradients, and warns.

    Args:
        policy: Name of the policy, for messages.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._in_row = 0
        self._told = self._told_of_use = False

    def ends(self, step: int, names: Sequence[str]) -> bool:
        """Returns whether ``step``, in which parameters ``names`` were edited, does not follow from its gradients."""
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
    """Returns a part of a tensor with at most so many bytes, or one element; another part each turn."""
    for axis, size in enumerate(tensor.shape):
        if tensor.nbytes > most_bytes:
            length = max(1, size * most_bytes // tensor.nbytes)
            tensor = tensor.narrow(axis, turn * length % (size - length + 1), length)
    return tensor


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two states have the same tensor objects."""
    tensors = [{key: id(value) for key, value in state.items() if torch.is_tensor(value)} for state in (one, other)]
    return tensors[0] == tensors[1]
