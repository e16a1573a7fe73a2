"""A second simulator, written from the docstrings of ``sim.scenario`` and ``sim.system``: one iteration at a time,
dense checkpoints to storage, one failure after another. It shares no code with the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Naive:
    """copy, move: seconds of a snapshot into host memory, and on to storage. load: of all state after a failure.

    room: seconds beside an iteration in which a copy does not make training wait. buffers: snapshots in flight at most.
    """

    every: int
    iteration: float
    room: float
    copy: float
    move: float
    load: float
    detect: float
    restart: float
    failures: list[float]
    until: float
    buffers: int = 2
    sync: bool = False
    skip: bool = False
    now: float = 0.0
    step: int = 0
    saved: int = 0
    begun: int = 0
    stall: float = 0.0
    lost: float = 0.0
    down: float = 0.0
    retrieve: float = 0.0
    under_way: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> Naive:
        moments = [*(at for at in self.failures if at < self.until), self.until]
        for at in moments:
            if at < self.now:  # came while a former one was repaired, and was met there
                continue
            while self._trains(at):
                pass
            self.now = at
            if at < self.until:
                self._repair([later for later in moments if later > at])
        return self

    def _trains(self, limit: float) -> bool:
        """One iteration, if it ends in time."""
        now, waited, beside = self.now, 0.0, 0.0
        self._commit(now)
        if self.step // self.every > self.begun // self.every:
            if len(self.under_way) >= self.buffers and not self.skip:
                free = self.under_way[len(self.under_way) - self.buffers][0]
                waited, now = free - now, free
                self._commit(min(now, limit))
            if len(self.under_way) < self.buffers and now < limit:
                free = self.under_way[-1][0] if self.under_way else 0.0
                ready = max(now + self.copy, free) + self.move
                self.under_way.append((ready, self.step))
                self.begun = self.step
                if self.sync:
                    waited, now = waited + ready - now, ready
                    self._commit(min(now, limit))
                else:
                    beside = max(0.0, self.copy - self.room)
        if now + beside + self.iteration > limit:
            # Cut off: what it waited before it began is a stall, the rest is lost.
            self.stall += min(waited, limit - self.now)
            self.lost += max(0.0, limit - now)
            self._commit(limit)
            return False
        self.stall += waited + beside
        self.now, self.step = now + beside + self.iteration, self.step + 1
        return True

    def _commit(self, now: float) -> None:
        while self.under_way and self.under_way[0][0] <= now:
            self.saved = self.under_way.pop(0)[1]

    def _repair(self, later: list[float]) -> None:
        """Back to what is saved; each further failure before all is loaded begins this anew."""
        self._commit(self.now)
        self.lost += (self.step - self.saved) * self.iteration
        self.step = self.begun = self.saved
        self.under_way.clear()
        for moment in later:
            start, spent = self.now, 0.0
            for name, secs in (("down", self.detect + self.restart), ("retrieve", self.load if self.saved else 0.0)):
                part = max(0.0, min(secs, moment - start - spent))
                setattr(self, name, getattr(self, name) + part)
                spent += part
            self.now = start + spent
            if self.now < moment or moment == self.until:
                return
