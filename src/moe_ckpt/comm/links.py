"""Gloo groups of our own, which the next session in the same process group may take over.

A group costs descriptors and threads, which only the end of the default group frees: destroying it alone would be a
collective, at a time when peers may be lost. So a session that ends well leaves its group to the next one.

The session must have ended well on every rank. A send of gloo ends when a receive has taken it. So if no rank has an
operation that failed or is under way, all messages were received, and none of the old session can be taken for one of
the new session. A rank knows this of itself alone. So when all ranks open the next session, each writes into the store
of the default group which group it could take, and the last one to come decides for all.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_LOOK = timedelta(seconds=1)
"""Length of one wait in the store, during which other threads of the process cannot use the store."""
_PAUSE_SECS = 0.05
_LANES = 16
"""The most tags of a session's messages. No message has the last one."""
_AT_ONCE = timedelta(milliseconds=1)


class Links:
    """The connections between all ranks: one gloo group, which one session has until ``give_back``.

    Args:
        world: Of the group.
        timeout: Longest wait for a rank.
        number: Of the group, equal on all ranks.
        group: Of all ranks.

    Attributes:
        group: As given. A wait on it that times out closes its connections, for all of its lanes.
        is_sound: No operation on the group has failed or been given up on this rank.
        first_tag: First tag of this session's messages. Earlier sessions on the group had others.
    """

    def __init__(self, world: _DefaultGroup, timeout: timedelta, number: int, group: dist.ProcessGroup) -> None:
        self.group, self.is_sound, self.first_tag = group, True, _LANES * world.opened
        self._world: _DefaultGroup | None = world
        self._timeout, self._number = timeout, number

    def cut(self) -> None:
        """Ends every wait on the group, on all ranks, by a wait that times out: only that closes gloo's connections."""
        self.is_sound = False
        with contextlib.suppress(RuntimeError, ValueError):  # the latter: the default group is gone
            peer = 0 if dist.get_rank() else 1
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            work = dist.irecv(nothing, src=peer, group=self.group, tag=self.first_tag + _LANES - 1)
            if work is not None:
                work.wait(_AT_ONCE)

    def give_back(self) -> None:
        """Leaves the group to another session, when this one has ended with no operation under way. A second call has
        no effect."""
        world, self._world = self._world, None
        if world is not None and self.is_sound:
            world.free[self._timeout] = self._number, weakref.ref(self.group)


class _DefaultGroup:
    """The groups of one default process group, in this process.

    Args:
        group: The default group.

    Attributes:
        opened: How often all ranks came to open a session. A rank that no longer waited when the last one came has a
            smaller number until it comes again.
        free: Timeout -> number and group that the newest session with it gave back. References are weak, so that the
            group ends with the default group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.of = weakref.ref(group)
        self.opened = 0
        self.free: dict[timedelta, tuple[int, weakref.ref[Any]]] = {}
        self._name = ""
        self._offered: tuple[int, weakref.ref[Any] | None] | None = None

    def begin(self, group: dist.ProcessGroup) -> None:
        """Has the ranks agree on a name in the store after they made the first group. The store may have entries of
        dead processes.

        The name is a sum over ranks, which no rank has before every other one has made the group as well.
        """
        name = torch.tensor([secrets.randbits(62) if dist.get_rank() == 0 else 0], device="cpu")
        dist.all_reduce(name, group=group)
        self._name, self.opened = f"moe_ckpt/links/{int(name)}", 1

    @property
    def has_begun(self) -> bool:
        return bool(self._name)

    def taken(self, timeout: timedelta) -> tuple[int, dist.ProcessGroup] | None:
        """Returns the group of ``free`` that all ranks can take over; None, on all of them, if there is none.

        A rank writes once which group it could take. If not all ranks come in time, those that did come do not write
        again the next time, but wait. So all ranks meet, whichever came late.

        Raises:
            RuntimeError: Not all of the ranks came.
        """
        store, name = distributed_c10d._get_default_store(), f"{self._name}/{self.opened}"
        if self._offered is None:
            self._offered = self._find(timeout)
            _tell(store, name, self._offered[0])
        _await(store, f"{name}/agreed", timeout)
        agreed, (number, reference), self._offered = store.get(f"{name}/agreed") == b"1", self._offered, None
        self.opened += 1
        group = reference() if agreed and reference is not None else None
        return None if group is None else (number, group)

    def _find(self, timeout: timedelta) -> tuple[int, weakref.ref[Any] | None]:
        """Returns number and group that this rank could take over; 0 if there is none."""
        number, reference = self.free.pop(timeout, (0, None))
        group = None if reference is None else reference()
        if group is None or group not in distributed_c10d._world.pg_map:  # it was destroyed
            return 0, None
        return number, reference


def _tell(store: Any, name: str, number: int) -> None:
    """Writes the number of this rank's group. The last rank decides whether all have written the number of one
    group."""
    ranks = dist.get_world_size()
    store.add(f"{name}/{number}", 1)
    if store.add(f"{name}/came", 1) == ranks:
        alike = number and store.add(f"{name}/{number}", 0) == ranks
        store.set(f"{name}/agreed", "1" if alike else "0")


_newest: _DefaultGroup | None = None


def take_links(timeout: timedelta) -> Links:
    """Returns the links for a new session: those of a session that has ended, or new ones. Called by all ranks at the
    same point.

    Args:
        timeout: Longest wait for a rank.

    Raises:
        RuntimeError: Not all ranks came.
    """
    global _newest
    default = dist.group.WORLD
    if default is None:
        raise RuntimeError("torch.distributed has no default process group: call init_process_group first")
    if _newest is None or _newest.of() is not default:
        _newest = _DefaultGroup(default)
    world = _newest
    taken = world.taken(timeout) if world.has_begun else None
    group = dist.new_group(backend="gloo", timeout=timeout) if taken is None else taken[1]
    if not world.has_begun:
        world.begin(group)
    return Links(world, timeout, world.opened if taken is None else taken[0], group)


def _await(store: Any, key: str, timeout: timedelta) -> None:
    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store.wait([key], _LOOK)
            return
        except RuntimeError as error:
            if isinstance(error, dist.DistNetworkError) or time.monotonic() > until:
                raise
            time.sleep(_PAUSE_SECS)
