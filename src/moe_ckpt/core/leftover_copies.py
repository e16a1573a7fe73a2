"""Copies that some ranks still lack where their groups had no nodes for more: in as many domains as there can be.

One copy after the other goes to a domain that has none of its source and has room. Where all such domains are full,
copies of others make room there, one after the other, if that ends where there is room (an augmenting path). So no
other way to place them reaches more domains, while no rank holds over the bound because of that. What is left after
that goes to other nodes of domains that have a copy already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

T = TypeVar("T", int, str)
_Entry = tuple[float, int, T]
"""How much it holds, a number that breaks ties, and what it is."""
_LOOKED_AT = 16
"""Domains that are looked at for each copy, before the emptiest is taken."""


class LeftoverCopies:
    """Places copies of some ranks on one another.

    Args:
        domains: Per rank of the world its domains, of which the first and the last count.
        order: The ranks, those of a domain one after the other.
        peers: Per rank of the world, those that hold its copies; added to.
        replicas: Copies that each rank is to have.
        most: That a rank may hold so that copies of one rank lie in different domains.
    """

    def __init__(
        self,
        domains: Sequence[Sequence[str]],
        order: Sequence[int],
        peers: list[list[int]],
        replicas: int,
        most: int,
    ) -> None:
        self._domains, self._order, self._peers, self._replicas = domains, order, peers, replicas
        loads = dict.fromkeys(order, 0)
        for rank in order:
            for holder in peers[rank]:
                if holder in loads:
                    loads[holder] += 1
        self._holders = _Holders(domains, loads, most)
        self._taken = {rank: {domains[each][-1] for each in (rank, *peers[rank])} for rank in order}
        self._movable: dict[str, dict[int, int]] = {domain: {} for domain in self._holders.domains}
        self._open = dict.fromkeys(self._holders.domains)

    def place(self) -> None:
        """Adds to the peers."""
        left = []
        for rank in self._order:
            while len(self._peers[rank]) < self._replicas:
                if not self._parted(rank):
                    left.append(rank)
                    break
        for rank in left:
            while len(self._peers[rank]) < self._replicas and self._doubled(rank):
                pass

    # --- domains without a copy ---

    def _parted(self, rank: int) -> bool:
        """Whether a copy of this rank came to lie in another domain."""
        holder = self._across(rank)
        if holder is not None:
            self._give(rank, holder)
            return True
        taken = self._taken[rank]
        domain = None
        if self._holders.has_room_outside(taken):
            domain = self._holders.emptiest(lambda each: each not in taken and self._holders.room[each] > 0)
        if domain is None:
            domain = self._emptied(rank)
        if domain is not None:
            self._give_in(rank, domain)
        return domain is not None

    def _across(self, rank: int) -> int | None:
        """A rank on the other side of the world that holds fewer copies than it has.

        Ranks of a node find ranks of a node there, so that fewer sets of nodes have all copies of some rank.
        """
        names, holders = self._holders.domains, self._holders
        own, place, size = holders.place_of(rank)
        for step in range(min(len(names), _LOOKED_AT)):
            domain = names[(own + len(names) // 2 + step) % len(names)]
            if domain not in self._taken[rank]:
                for holder in (holders.at(domain, place, size), holders.least_loaded(domain)):
                    if holder is not None and holders.loads[holder] < self._replicas:
                        return holder
        return None

    def _give(self, rank: int, holder: int) -> None:
        domain = self._domains[holder][-1]
        self._peers[rank].append(holder)
        self._movable[domain][rank] = holder
        self._taken[rank].add(domain)
        self._holders.count(holder, 1)

    def _give_in(self, rank: int, domain: str) -> None:
        holder = self._holders.least_loaded(domain)
        if holder is not None:  # always, since domains have ranks
            self._give(rank, holder)

    def _emptied(self, rank: int) -> str | None:
        """A domain without a copy of this rank, in which others made room; None if there is none."""
        reached = [domain for domain in self._open if domain not in self._taken[rank]]
        way: dict[str, tuple[str, int]] = {}
        unseen = dict.fromkeys(domain for domain in self._open if domain in self._taken[rank])
        for domain in reached:  # grows
            for mover in self._movable[domain] if unseen else ():
                for other in [each for each in unseen if each not in self._taken[mover]]:
                    del unseen[other]
                    way[other] = domain, mover
                    if self._holders.room[other] > 0:
                        return self._moved(other, way)
                    reached.append(other)
        for domain in reached:  # nothing in them can ever go elsewhere
            del self._open[domain]
        return None

    def _moved(self, domain: str, way: dict[str, tuple[str, int]]) -> str:
        """Copies go on along the way that ends in ``domain``; returns where it begins, and where there is room now."""
        while domain in way:
            before, mover = way[domain]
            old = self._movable[before].pop(mover)
            self._peers[mover].remove(old)
            self._taken[mover].discard(before)
            self._holders.count(old, -1)
            self._give_in(mover, domain)
            domain = before
        return domain

    # --- domains with a copy ---

    def _doubled(self, rank: int) -> bool:
        """Whether there was another node for a copy of this rank; the one of the emptiest domain."""
        own, used = self._domains[rank][-1], {self._domains[each][0] for each in self._peers[rank]}
        found: list[int] = []

        def has_node(domain: str) -> bool:
            if domain == own:
                return False
            holder = self._holders.least_loaded(domain, lambda each: self._domains[each][0] not in used)
            found.extend([] if holder is None else [holder])
            return bool(found)

        self._holders.emptiest(has_node)
        for holder in found:
            self._peers[rank].append(holder)
            self._holders.count(holder, 1)
        return bool(found)


class _Holders:
    """Which of some ranks have room.

    Attributes:
        domains: Their domains.
        loads: Copies that each rank holds.
        room: Per domain, copies that its ranks can take until each holds ``most``.
    """

    def __init__(self, names: Sequence[Sequence[str]], loads: dict[int, int], most: int) -> None:
        self.loads, self.room = loads, dict[str, int]()
        self._domain_of, self._most = {rank: names[rank][-1] for rank in loads}, most
        self.domains = tuple(dict.fromkeys(self._domain_of.values()))
        self._numbers = {domain: at for at, domain in enumerate(self.domains)}
        self._ranks: dict[str, list[int]] = {domain: [] for domain in self.domains}
        self._places = dict[int, int]()
        for rank, domain in self._domain_of.items():
            self._places[rank] = len(self._ranks[domain])
            self._ranks[domain].append(rank)
        self._by_load: dict[str, list[_Entry[int]]] = {}
        self._held = dict[str, int]()
        for domain, ranks in self._ranks.items():
            self.room[domain] = sum(max(0, most - loads[rank]) for rank in ranks)
            self._held[domain] = sum(loads[rank] for rank in ranks)
            self._by_load[domain] = [(loads[rank], at, rank) for at, rank in enumerate(ranks)]
        self._all_room = sum(self.room.values())
        self._by_fullness = [self._entry(domain) for domain in self.domains]
        heapify(self._by_fullness)
        for heap in self._by_load.values():
            heapify(heap)

    def _entry(self, domain: str) -> _Entry[str]:
        return self._held[domain] / len(self._ranks[domain]), self._numbers[domain], domain

    def place_of(self, rank: int) -> tuple[int, int, int]:
        """(number of its domain, its place there, ranks of the domain)."""
        domain = self._domain_of[rank]
        return self._numbers[domain], self._places[rank], len(self._ranks[domain])

    def at(self, domain: str, place: int, size: int) -> int:
        """The rank of a domain with as large a portion of the others before it as one of ``size`` ranks at a place."""
        ranks = self._ranks[domain]
        return ranks[place * len(ranks) // size]

    def count(self, holder: int, copies: int) -> None:
        """That many more copies lie there."""
        domain, before = self._domain_of[holder], self.loads[holder]
        self.loads[holder] = after = before + copies
        freed = max(0, self._most - after) - max(0, self._most - before)
        self.room[domain] += freed
        self._all_room += freed
        self._held[domain] += copies
        heappush(self._by_fullness, self._entry(domain))
        heappush(self._by_load[domain], (after, self._places[holder], holder))

    def has_room_outside(self, domains: set[str]) -> bool:
        """Whether some rank in another domain can take a copy."""
        return self._all_room > sum(self.room.get(domain, 0) for domain in domains)

    def emptiest(self, is_fit: Callable[[str], bool]) -> str | None:
        """The domain with fewest copies per rank among those that fit."""
        return _first(self._by_fullness, lambda entry: entry == self._entry(entry[-1]), is_fit)

    def least_loaded(self, domain: str, is_fit: Callable[[int], bool] = lambda rank: True) -> int | None:
        """The rank of a domain that holds fewest copies, among those that fit."""
        return _first(self._by_load[domain], lambda entry: entry[0] == self.loads[entry[-1]], is_fit)


def _first(heap: list[_Entry[T]], is_true: Callable[[_Entry[T]], bool], is_fit: Callable[[T], bool]) -> T | None:
    """What the first entry names that is still true and fits; those that are no longer true are dropped."""
    kept: list[_Entry[T]] = []
    found = None
    while heap and found is None:
        entry = heappop(heap)
        if is_true(entry) and entry not in kept:
            kept.append(entry)
            found = entry[-1] if is_fit(entry[-1]) else None
    for entry in kept:
        heappush(heap, entry)
    return found
