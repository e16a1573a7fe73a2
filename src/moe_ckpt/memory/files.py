"""The memory of one rank: slots of this life, and those that earlier lives of the run left on this node."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ckpt.errors import ConfigError, DamagedError, MemoryFullError
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.format.slot import SlotHeader
from moe_ckpt.memory.arena import ARENA, COPIES, Arena, Buffer
from moe_ckpt.memory.directory import (
    DIVERGED,
    RankDirectory,
    boot_id,
    entries,
    generation_note,
    holder_of,
    make_rank_directory,
    newest_named,
    owner_of,
    rank_directories,
    remove_empty,
    said_holder,
)
from moe_ckpt.memory.mapping import Identity, identity
from moe_ckpt.memory.slot import COPY_PREFIX, HEADER_SUFFIX, OWN_PREFIX, Slot, forget_starts, set_aside
from moe_ckpt.storage.local import free_bytes
from moe_ckpt.threads import ThreadName, named_thread

log = logging.getLogger("moe_ckpt")

_PATIENCE_SECS, _PAUSE_SECS = 5.0, 0.01
"""Longest wait for a process that holds a directory of this rank, and the pause between two attempts."""
_ABANDONED_SECS = 86_400.0
"""A run without a living process is over after this time; before, it may be waiting for its restart."""


@dataclass(frozen=True, eq=False)
class FoundSlot:
    """A sealed slot of an earlier life. Its slices are not verified."""

    slot: Slot
    header: SlotHeader

    def slices(self) -> Iterator[tuple[SliceEntry, torch.Tensor]]:
        """Yields each slice with its bytes (uint8, a view). Raises ``DamagedError`` if a part is of another slot."""
        for part in self.header.parts:
            for entry in self.header.slices(part, str(self.slot.path)):
                yield entry, self.slot.memory[part.begin + entry.begin : part.begin + entry.end]


class MemoryFiles:
    """Makes slots for one rank in one life of a run, and owns the slots that earlier lives left. See the package.

    Args:
        root: A directory of this node.
        run_id: Of the store.
        generation: Number of this life.
        life: Token of this life, equal on every rank.
        rank: This process's.
        store: Directory or URL of the run's checkpoints.

    Raises:
        ConfigError: The directory cannot be used.
        OSError: The directory cannot be written.
    """

    def __init__(self, root: str, run_id: str, generation: int, life: str, rank: int, store: str) -> None:
        self.run_id, self.generation, self.life, self.rank = run_id, generation, life, rank
        self.root, self._store = root, store
        self._noted: set[int] = set()
        self._making, self._copying = threading.Lock(), threading.Lock()
        self._own = make_rank_directory(root, run_id, generation, rank, store)
        self._left: list[RankDirectory] = []
        self._unread: set[Path] = set()
        self._is_closed = False
        self._numbers = itertools.count()
        self._limit, self._locks = 0, False
        self._arenas: dict[str, Arena] = {}
        self._removing: list[threading.Thread] = []

    @property
    def path(self) -> Path:
        """Returns the directory of this life's slots."""
        return self._own.path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Returns the rank directories that this process has locked: that of this life first."""
        return tuple(directory.path for directory in (self._own, *self._left))

    def open_arena(self, limit: int, *, locks: bool = False) -> None:
        """Makes this life's arenas, in the files of the arenas that this rank's earlier life left.

        Call ``take_left`` for the same rank before, and ``adopt`` with its slots afterwards.

        Args:
            limit: The most bytes that the arena may have, adopted rooms apart.
            locks: See ``Arena``.

        Raises:
            OSError: An arena cannot be made.
        """
        self._limit, self._locks = limit, locks
        for name in (ARENA, COPIES):
            # A file of the newest life that had one saves time. A slot that could not be opened keeps its bytes.
            for directory in self._left:
                with contextlib.suppress(OSError):
                    if directory.path not in self._unread:
                        os.link(directory.path / name, self.path / name, follow_symlinks=False)
                        break
            self._arena_at(name)

    def _arena_at(self, name: str) -> Arena:
        """Returns an arena of this life, which is made again if somebody has deleted its file."""
        with self._making:
            arena = self._arenas.get(name)
            if arena is None or self._own.is_gone or arena.is_gone:
                self._make_again()
                if name == ARENA:
                    arena = Arena(self._limit, path=self.path / name, locks=self._locks)
                else:
                    arena = Arena(_most_nbytes(str(self.path)), path=self.path / name)
                self._arenas[name] = arena
            return arena

    @property
    def arena(self) -> Arena:
        """Returns the arena of this rank's own snapshots. Call ``open_arena`` before."""
        return self._arenas[ARENA]

    def adopt(self, slots: Sequence[FoundSlot]) -> list[FoundSlot]:
        """Protects slots in the arenas of this life from being overwritten.

        Returns:
            The slots that can be used: all, unless a fault of this library gave two of them the same bytes.
        """
        sound = []
        for leftover in newest_first(slots):
            try:
                for arena in self._arenas.values():
                    leftover.slot.adopt(arena)
                sound.append(leftover)
            except ValueError as error:
                log.error("the memory slot %s is set aside, and not used: %s", leftover.slot.path, error)
                set_aside(leftover.slot.path)
        return sound

    def slot(self, buffer: Buffer) -> Slot:
        """Returns a new slot whose bytes are in a room of the arena."""
        return Slot.of(self._next_path(OWN_PREFIX), buffer)

    def grow(self, end: int, **how: Any) -> bool:
        """Grows the arena as ``Arena.grow`` does. Waits for deletions under way if the file system has no room."""
        return self._grow(self._arena_at(ARENA), end, **how)

    def _grow(self, arena: Arena, end: int, **how: Any) -> bool:
        try:
            return arena.grow(end, **how)
        except MemoryFullError:
            if not self.wait_removed():
                raise
            return arena.grow(end, **how)

    def describe(self) -> None:
        """Writes down who owns the slots, before one is sealed. Raises ``MemoryFullError`` if there is no room."""
        self._own.describe(self._store)

    def shrink(self) -> bool:
        """Gives unused memory at the arena's end back to the file system; False if there is none. On any thread."""
        before = self.arena.nbytes
        self.arena.shrink(0)
        return self.arena.nbytes < before

    def _next_path(self, kind: str) -> Path:
        return self.path / f"{kind}_{next(self._numbers):03d}"

    def make(self, nbytes: int, require: Callable[[int], None] = lambda nbytes: None) -> Slot:
        """Makes a slot for a copy of another rank's snapshot, or for plain state. On any thread.

        Args:
            nbytes: Of the slot, whose room ``Slot.remove`` gives back.
            require: Called before memory is made for the slot, with its bytes.

        Raises:
            MemoryFullError: There is no room.
            OSError: The slot cannot be made, or ``close`` was called: the next life may have the directory by now.
        """
        with self._copying:
            if self._is_closed:
                raise OSError(errno.EBADF, f"the memory of this start of the run is closed: {self.path}")
            arena = self._arena_at(COPIES)
            self.describe()
            while (rooms := arena.take([nbytes])) is None:
                self._grow(arena, arena.end_for([nbytes]), require=lambda lacking: require(nbytes))
        return Slot.of(self._next_path(COPY_PREFIX), rooms[0], frees=True)

    def fits(self, nbytes: int) -> bool:
        """Returns whether the file system has so many bytes free at the moment."""
        try:
            return free_bytes(str(self.path)) >= nbytes
        except FileNotFoundError:  # it is made again
            return os.path.isdir(self.root)
        except OSError:
            return False

    def _make_again(self) -> None:
        """Makes the directory again if somebody has deleted it. Raises ``OSError`` if that cannot be done."""
        gone = self._own
        if not gone.is_gone:
            return
        try:
            self._own = make_rank_directory(self.root, self.run_id, self.generation, self.rank, self._store)
        except ConfigError as error:
            raise OSError(str(error)) from error
        gone.release()
        for generation in tuple(self._noted):
            self.note_generation(generation)

    def note_generation(self, generation: int) -> None:
        """Notes that this life uses another generation, too (``generation_note``). An error is a warning."""
        self._noted.add(generation)
        try:
            self._own.note(generation_note(generation))
        except OSError as error:
            log.warning("cannot record in %s that generation %d is in use: %s", self.path, generation, error)

    @property
    def diverged(self) -> bool:
        """Returns whether a life diverged (``DIVERGED``) whose directory this process has taken over."""
        return any(directory.diverged for directory in self._left)

    def note_divergence(self) -> None:
        """Notes that this life has diverged (``DIVERGED``). An error is a warning."""
        try:
            self._own.note(DIVERGED)
        except OSError as error:
            log.warning("cannot record that steps were computed again with another result: %s", error)

    def forget_divergence(self) -> None:
        """Removes the notes of earlier lives that they diverged: this life has ended a step."""
        for directory in self._left:
            directory.forget_divergence()

    def remove_logs(self) -> None:
        """Deletes the upstream logs of earlier lives, which this one has no use for."""
        for directory in self._left:
            directory.remove_logs()

    def remove(self, leftovers: list[FoundSlot]) -> None:
        """Deletes slots of earlier lives. When this returns, no later life resumes from them. On any thread.

        Another thread frees their memory, which takes the kernel a tenth of a second per GB.

        Args:
            leftovers: The slots; this list is emptied, since a reference to a slot keeps its memory.
        """
        slots = [leftover.slot for leftover in leftovers]
        leftovers.clear()
        for slot in slots:
            with contextlib.suppress(OSError):  # ``_remove`` meets the same error, and warns
                slot.unseal()
        if not slots:
            return
        thread = named_thread(ThreadName.REMOVE, self._remove, slots)
        try:
            with self._making:
                thread.start()
                self._removing = [*(other for other in self._removing if other.is_alive()), thread]
        except RuntimeError:  # no thread to be had
            self._remove(slots)

    def _remove(self, slots: list[Slot]) -> None:
        while slots:
            slots.pop().remove()
        for directory in tuple(self._left):
            directory.drop_arenas()
        arena = self._arenas.get(ARENA)
        if arena is not None and not arena.adopted_nbytes and arena.nbytes > self._limit:
            arena.shrink(self._limit)

    def wait_removed(self) -> bool:
        """Waits until the memory of all slots given to ``remove`` is free; False if no deletion was under way."""
        with self._making:
            threads = [thread for thread in self._removing if thread.is_alive()]
        for thread in threads:
            thread.join()
        return bool(threads)

    def take_left(self, *, same_rank: bool) -> list[FoundSlot]:
        """Takes over the slots that ended lives left on this node. Directories of living processes are left alone.

        An error with one directory or slot is a warning, and the others are taken over all the same. A directory of
        this rank may be locked by a process that is dying, or by a command that works there: this waits for those, up
        to ``_PATIENCE_SECS`` in all.

        Args:
            same_rank: Take the directories of this rank; else all that nobody has taken. The ranks of a node call it
                with True first, and with False once all of them have done that.

        Returns:
            The slots that could be opened, of the directories that this call took, the newest step first.
        """
        before, until = len(self._left), time.monotonic() + _PATIENCE_SECS if same_rank else None
        for generation, rank, path in list(rank_directories(self._run)):
            if generation != self.generation and (rank == self.rank) == same_rank:
                self._take(path, until)
        return newest_first(slot for directory in self._left[before:] for slot in self._open_slots(directory))

    def _open_slots(self, directory: RankDirectory) -> Iterator[FoundSlot]:
        for path in directory.slots:
            try:
                yield FoundSlot(*Slot.open(path))
            except DamagedError as error:
                log.warning("the memory slot %s is damaged: it is set aside, and not used: %s", path, error)
                set_aside(path)
            except OSError as error:
                log.warning("the memory slot %s is not used: %s", path, error)
                self._unread.add(directory.path)

    def _take(self, path: Path, until: float | None) -> None:
        """Takes over one directory.

        Args:
            path: Of the directory.
            until: ``time.monotonic`` until which to wait for a process that holds sealed slots; None: do not wait.
        """
        try:
            while (taken := RankDirectory.take(path)) is None and time.monotonic() < (until or 0.0):
                if not _has_sealed(path):
                    break
                time.sleep(_PAUSE_SECS)
            if taken is None:
                # Directories of other ranks are taken by any rank of the node: it is no fault if one of them holds it.
                is_missed = until is not None and _has_sealed(path)
                level = logging.WARNING if is_missed else logging.INFO
                log.log(level, "%s is not used: %s holds it", path, said_holder(holder_of(path)))
                return
            self._left.append(taken)
            taken.clear_unsealed()
            if taken.is_empty:  # else lives that die one after the other would leave ever more directories
                self._left.remove(taken)
                taken.remove()
        except OSError as error:
            log.warning("the content of %s is not used: %s", path, error)

    def close(self, *, keep: bool) -> None:
        """Unlocks all directories. A second call has no effect.

        Args:
            keep: Leave sealed slots to the next start of the run. Else all slots of this rank are removed, and those of
                earlier lives on this node, unless a living process holds them.
        """
        self.wait_removed()
        with self._copying:
            self._is_closed = True
        self._arenas.clear()  # their memory lives as long as its users
        directories, self._left = self._left, []
        for directory in (self._own, *directories):
            if keep:
                directory.clear_unsealed()
            if keep and (directory.slots or directory.diverged):
                directory.release()
            else:
                directory.remove()
        if not keep:
            self._remove_rest()

    def _remove_rest(self) -> None:
        """Removes directories of earlier lives whose processes were alive when this life began. Those of this life are
        for the other ranks to remove."""
        for generation, _, path in list(rank_directories(self._run)):
            if generation >= self.generation:
                continue
            try:
                taken = RankDirectory.take(path)
            except OSError as error:
                log.warning("%s is not removed: %s", path, error)
                continue
            if taken is not None:
                taken.remove()

    @property
    def _run(self) -> Path:
        return self.path.parent.parent


def _most_nbytes(path: str) -> int:
    """Returns a limit for copies of other ranks, in bytes, which they never reach: the machine's memory, or the file
    system if that is smaller."""
    machine, status = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), os.statvfs(path)
    return min(machine, status.f_blocks * status.f_frsize or machine)


def _has_sealed(path: Path) -> bool:
    return any(path.glob(f"*{HEADER_SUFFIX}"))


def newest_first(slots: Iterable[FoundSlot]) -> list[FoundSlot]:
    """Returns slots by step and life."""
    return sorted(slots, key=lambda slot: (-slot.header.step, -slot.header.identity.generation))


def newest_generation(run: Path) -> int:
    """Returns the newest generation of a run's directory, or -1."""
    directories = list(rank_directories(run))
    return max((max(generation, newest_named(path)) for generation, _, path in directories), default=-1)


def left_bytes(run: Path) -> int:
    """Returns the bytes that ended lives of a run left, which are free once a life that took them over has its own
    slots."""
    return used_bytes(*(path for _, _, path in rank_directories(run) if not holder_of(path)))


def sweep(beginning: Path) -> int:
    """Removes the directories of runs that are over: of another boot, or without a living process for a day.

    An error with one of them is a warning, since this run can begin all the same.

    Args:
        beginning: The directory of the run that begins; those of other runs are in the same directory.

    Returns:
        How many bytes were freed.
    """
    freed = 0
    for run in [run for run in entries(beginning.parent) if run != beginning and run.is_dir()]:
        nbytes = used_bytes(run)
        try:
            if _is_over(run) and remove_run(run):
                nbytes -= used_bytes(run)
                freed += nbytes
                log.info("%s: %s bytes of an ended run were removed", run, f"{nbytes:,}")
            elif nbytes:
                log.info("%s holds %s bytes of another run; moe-ckpt memory lists them", run, f"{nbytes:,}")
        except OSError as error:
            log.warning("%s is not touched: %s", run, error)
    return freed


def used_bytes(*paths: Path) -> int:
    """Counts the bytes of all files below ``paths``; a file that several lives share counts once."""
    sizes: dict[Identity, int] = {}
    for directory, _, names in itertools.chain.from_iterable(map(os.walk, paths)):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(directory, name))
                sizes[identity(status)] = status.st_size
    return sum(sizes.values())


def _is_over(run: Path) -> bool:
    paths = [path for _, _, path in rank_directories(run)]
    owners = list(map(owner_of, paths))
    if owners and all(owner.boot_id not in ("", boot_id()) for owner in owners):
        return True
    newest = max((owner.begun_unix_secs for owner in owners), default=0.0)
    for path in (run, *entries(run), *paths):  # a directory changes when a slot is sealed there
        with contextlib.suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return time.time() - newest > _ABANDONED_SECS


def _taken(run: Path, held: contextlib.ExitStack) -> list[RankDirectory] | None:
    """Returns all of a run's directories on this node, locked until ``held`` ends; None if a process holds one."""
    taken = []
    for path in [path for _, _, path in rank_directories(run)]:
        directory = RankDirectory.take(path)
        if directory is not None:
            held.callback(directory.release)
            taken.append(directory)
        elif path.exists():
            return None
    return taken


def retry_run(run: Path) -> bool:
    """Allows a run to resume once more from slots with which its last starts failed.

    Returns:
        False, without any change, if one of the run's processes is alive.

    Raises:
        OSError: A directory cannot be locked; nothing was changed.
    """
    with contextlib.ExitStack() as held:
        taken = _taken(run, held)
        for directory in taken or ():
            for slot in directory.slots:
                forget_starts(slot)
        return taken is not None


def remove_run(run: Path) -> bool:
    """Removes all that a run has on this node.

    A life that begins meanwhile keeps its directories: only locked and empty directories are removed.

    Returns:
        False, without any change, if one of the run's processes is alive.

    Raises:
        OSError: A directory cannot be read or locked; nothing was changed.
    """
    with contextlib.ExitStack() as held:
        taken = _taken(run, held)
        if taken is None:
            return False
        for directory in taken:
            directory.remove()
    for generation in entries(run):
        remove_empty(generation)
    remove_empty(run)
    return True
