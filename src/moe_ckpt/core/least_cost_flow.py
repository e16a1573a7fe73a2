"""The cheapest way to send as much as possible through a small network (successive shortest paths, whole numbers)."""

from __future__ import annotations

from collections import deque


class Network:
    """Places and arcs between them. Costs may be negative as long as no cycle costs less than nothing.

    Args:
        places: How many; they are numbers from 0 on.
    """

    def __init__(self, places: int) -> None:
        self._ends: list[int] = []
        self._rooms: list[int] = []
        self._costs: list[int] = []
        self._out: list[list[int]] = [[] for _ in range(places)]

    def add(self, begin: int, end: int, room: int, cost: int = 0) -> int:
        """Returns the number of a new arc.

        Args:
            begin: Its first place.
            end: Its second place.
            room: The most that may go along it.
            cost: Of each.
        """
        number = len(self._ends)
        for one, other, most, price in ((begin, end, room, cost), (end, begin, 0, -cost)):
            self._out[one].append(len(self._ends))
            self._ends.append(other)
            self._rooms.append(most)
            self._costs.append(price)
        return number

    def sent(self, arc: int) -> int:
        """What goes along an arc: the room of the arc back."""
        return self._rooms[arc ^ 1]

    def send(self, begin: int, end: int) -> int:
        """Returns how much arrives: as much as possible, and of all ways to send that, at the least cost."""
        total = 0
        while True:
            least = self._least_costs(begin)
            if end not in least:
                return total
            while amount := self._along(begin, end, least):
                total += amount

    def _least_costs(self, begin: int) -> dict[int, int]:
        """From there to each place that can be reached over arcs with room (Bellman and Ford)."""
        found = {begin: 0}
        waiting, waits = deque([begin]), {begin}
        while waiting:
            one = waiting.popleft()
            waits.remove(one)
            for arc in self._out[one]:
                other, cost = self._ends[arc], found[one] + self._costs[arc]
                if self._rooms[arc] and (other not in found or cost < found[other]):
                    found[other] = cost
                    if other not in waits:
                        waiting.append(other)
                        waits.add(other)
        return found

    def _along(self, begin: int, end: int, least: dict[int, int]) -> int:
        """Sends what fits along one of the cheapest ways; returns how much, 0 if none is left."""
        arrived = {begin: -1}
        waiting = deque([begin])
        while waiting and end not in arrived:
            one = waiting.popleft()
            for arc in self._out[one]:
                other = self._ends[arc]
                is_cheapest = least.get(other) == least[one] + self._costs[arc]
                if self._rooms[arc] and is_cheapest and other not in arrived:
                    arrived[other] = arc
                    waiting.append(other)
        if end not in arrived:
            return 0
        way, place = list[int](), end
        while place != begin:
            way.append(arrived[place])
            place = self._ends[arrived[place] ^ 1]
        amount = min(self._rooms[arc] for arc in way)
        for arc in way:
            self._rooms[arc] -= amount
            self._rooms[arc ^ 1] += amount
        return amount
