"""Decides at a failure whether the newest step can be sealed in memory before the rank ends, and reports the result."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

from moe_ckpt.core.user_text import human_bytes
from moe_ckpt.driver.host import Host, LocalizedRecovery
from moe_ckpt.driver.states import Moment
from moe_ckpt.notices import announce
from moe_ckpt.survivors.newest_step import Survived, Survivor
from moe_ckpt.survivors.termination import Termination

log = logging.getLogger("moe_ckpt")


_WHOLE = (Moment.RESTING, Moment.REDUCING)


class Surviving:
    """Decides whether the newest step can be sealed, and reports the result.

    Args:
        survivor: Seals the step.
        rank: Rank of this process.
        host: Adapter of the run.
        secs: Most seconds that sealing may take.
        localized: Its log is completed as well; None if there is none.

    Attributes:
        moment: The moment of the iteration.
        termination: Handles SIGTERM, unless other code does.
    """

    def __init__(
        self,
        survivor: Survivor,
        rank: int,
        host: Host,
        secs: float,
        localized: LocalizedRecovery | None = None,
    ) -> None:
        self._host, self._localized = host, localized
        self.moment = Moment.UNKNOWN
        self.termination = Termination(self, secs)
        self._survivor, self._secs, self._unit, self._rank = survivor, secs, host.unit, rank
        self._once = threading.Lock()
        self._sealing = threading.RLock()
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a forked child, since state and slots belong to its parent."""
        return os.getpid() == self._pid

    @property
    def is_over(self) -> bool:
        """True if sealing was tried already."""
        return self._once.locked()

    @property
    def is_whole(self) -> bool:
        """True if the newest step can be sealed now."""
        return self.moment in _WHOLE

    @property
    def ends_soon(self) -> bool:
        """True if a newer step, or this step again, can be sealed soon."""
        return self.moment in (Moment.REDUCING, Moment.WRITING, Moment.WRITTEN, Moment.BOOKING)

    def begin(self) -> None:
        """Begins to handle SIGTERM, when training begins."""
        self.termination.watch()

    def end(self) -> None:
        """Ends the handling of SIGTERM, when training ends."""
        self.termination.unwatch()

    def enter(self, moment: Moment) -> None:
        """Notes that the iteration has reached ``moment``. On the training thread.

        Waits while another thread seals the step, so that the sealed state does not change.
        """
        with self._sealing:
            if moment is Moment.WRITTEN_ALONE:
                self._survivor.lends, moment = False, Moment.WRITTEN
            self.moment = moment

    @contextlib.contextmanager
    def joining(self, *, update: bool) -> Iterator[None]:
        """Encloses the join of the copy under way, after which weights may change.

        Weights do not change inside the block, so a peer that is lost there is lost between two steps. Without an
        update, the weights are fingerprinted, so that a later change by other code is noticed.

        Args:
            update: True if the optimizer is about to change weights.
        """
        if update and self.is_whole:
            self.enter(Moment.REDUCING)
        yield
        if update:
            self.enter(Moment.WRITING)
        elif self.moment is Moment.RESTING:
            self._survivor.note_weights()
            self.enter(Moment.EXPOSED)
        elif self.moment is not Moment.EXPOSED:
            self.enter(Moment.UNKNOWN)

    @contextlib.contextmanager
    def booking(self, *, ended: bool = True) -> Iterator[None]:
        """Encloses work of the session, whose locks would block a signal handler that seals.

        If SIGTERM came meanwhile, the process ends after the block.

        Args:
            ended: True if a step is final after the block.
        """
        after = Moment.RESTING if ended else self.moment
        self.enter(Moment.BOOKING)
        try:
            yield
        finally:
            self.enter(after)
        self.termination.settle()

    def survive(self, why: str, patience_secs: float = 0.0) -> None:
        """Seals the newest step, once, because training stops. Never raises. Does nothing in a forked child.

        On the training thread, or on another while that one waits for a lost peer.

        Args:
            why: Why training stops, for messages.
            patience_secs: Longest wait for a step that is under way on another thread.
        """
        if not self.is_here:
            return
        with _not_interrupted():  # including its messages: a handler may raise
            self._survive(why, patience_secs)

    def _survive(self, why: str, patience_secs: float) -> None:
        until = time.monotonic() + patience_secs
        while not self.is_whole and self.ends_soon and time.monotonic() < until:
            time.sleep(0.01)
        with self._sealing:  # waits while another thread seals, since this one may be about to end the process
            if not self._once.acquire(blocking=False):
                return
            if self.moment is Moment.WRITTEN:
                uncounted = self._uncounted()
                if uncounted is not None:
                    message = "training stops (%s), and rank %d does not keep %s in memory: %s"
                    log.warning(message, why, self._rank, *uncounted)
                    return
                self.moment = Moment.RESTING
            if self.moment is Moment.EXPOSED:
                self.moment = Moment.RESTING if self._are_unchanged() else Moment.UNKNOWN
            if not self.is_whole:
                level = logging.WARNING if self.moment is Moment.WRITING else logging.INFO
                message = "the newest %s is not sealed after %s: parameters are %s"
                log.log(level, message, self._unit, why, self.moment.value)
                return
            until = time.monotonic() + self._secs
            survived = self._survivor.seal(self._secs)
            if self._localized is not None:
                self._localized.write_log(max(0.0, until - time.monotonic()))
            if survived is not None:
                self._say(survived, why)

    def _say(self, survived: Survived, why: str) -> None:
        """Logs whether this rank sealed its newest step."""
        if survived.problem:
            verb = "may not keep" if survived.is_open else "could not keep"
            log.warning(
                "training stops (%s), and rank %d %s %s %d in memory: %s",
                *(why, self._rank, verb, self._unit, survived.step, survived.problem),
            )
            return
        cost = "a checkpoint of which was there"
        if survived.nbytes:
            cost = f"{human_bytes(survived.nbytes)} in {survived.secs:.1f} s"
        (announce if self._rank == 0 else log.info)(
            "training stops (%s): rank %d keeps its state of %s %d in memory, %s",
            *(why, self._rank, self._unit, survived.step, cost),
        )

    def _are_unchanged(self) -> bool:
        try:
            return self._survivor.has_noted_weights()
        except Exception as error:  # as below
            log.warning("whether weights are those of the newest %s is not known: %s", self._unit, error)
            return False

    def _uncounted(self) -> tuple[str, str] | None:
        """Counts a step whose update was made. Returns None; if that is impossible, (name of the step, why)."""
        try:
            if self._host.count_update():
                return None
        except Exception as error:  # whatever it is: older checkpoints are used, and training ends as it would have
            return f"the newest {self._unit}", str(error)
        step = f"{self._unit} {self._host.step + 1}"
        return step, (
            f"its update is made, but the loop has not come to the end of the {self._unit}, usually because it waits "
            "for a rank that died"
        )


@contextlib.contextmanager
def _not_interrupted() -> Iterator[None]:
    """Defers SIGTERM to the end of the block. A launcher that stops the job may send it meanwhile."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            signal.raise_signal(signal.SIGTERM)
