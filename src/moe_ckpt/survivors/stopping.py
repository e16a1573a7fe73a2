"""What a rank does when training stops at a failure: the newest step is sealed in memory before the rank goes."""

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
    """Decides whether the newest step may be sealed, and says what became of it.

    Args:
        survivor: The session's.
        rank: Of this process.
        host: Adapter of the run.
        secs: The longest that sealing may take.
        localized: Its log is completed as well; None if there is none.

    Attributes:
        moment: Of the iteration.
        termination: Handles SIGTERM, where nobody else does.
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
        """False in a forked child: state and slots are its parent's, which goes on."""
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
        """True if something is under way after which a step can be sealed that is newer, or whole again."""
        return self.moment in (Moment.REDUCING, Moment.WRITING, Moment.WRITTEN, Moment.BOOKING)

    def begin(self) -> None:
        """Training begins: handles SIGTERM from here on."""
        self.termination.watch()

    def end(self) -> None:
        """Training is over, or about to be: leaves SIGTERM to others."""
        self.termination.unwatch()

    def enter(self, moment: Moment) -> None:
        """The iteration comes to ``moment``. On the training thread.

        While another thread seals the step, this one waits, so that nothing changes what is sealed.
        """
        with self._sealing:
            if moment is Moment.WRITTEN_ALONE:
                self._survivor.lends, moment = False, Moment.WRITTEN
            self.moment = moment

    @contextlib.contextmanager
    def joining(self, *, update: bool) -> Iterator[None]:
        """The block joins the copy under way; after it, weights may change.

        Inside the block they do not, so a peer that is lost there is lost between two steps. Without an update, the
        weights are fingerprinted first, so that a later change by other code is noticed.

        Args:
            update: The optimizer is about to change them.
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
        """The session is at work: to seal in a signal handler could wait for locks held here.

        If SIGTERM came meanwhile, the process ends after that.

        Args:
            ended: A step is final with it.
        """
        after = Moment.RESTING if ended else self.moment
        self.enter(Moment.BOOKING)
        try:
            yield
        finally:
            self.enter(after)
        self.termination.settle()

    def survive(self, why: str, patience_secs: float = 0.0) -> None:
        """Training stops: seals the newest step, once. Never raises. Does nothing in a forked child.

        On the training thread, or on another while that one waits for what will not come.

        Args:
            why: For messages.
            patience_secs: The longest wait for a step that is under way on another thread.
        """
        if not self.is_here:
            return
        until = time.monotonic() + patience_secs
        while not self.is_whole and self.ends_soon and time.monotonic() < until:
            time.sleep(0.01)
        with self._sealing:  # waits for another thread that seals: this one may be about to end the process
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
            with _not_interrupted():  # including its messages: a handler may raise
                until = time.monotonic() + self._secs
                survived = self._survivor.seal(self._secs)
                if self._localized is not None:
                    self._localized.write_log(max(0.0, until - time.monotonic()))
                if survived is not None:
                    self._say(survived, why)

    def _say(self, survived: Survived, why: str) -> None:
        """This rank sealed its newest step, or did not, so that the next start uses an older checkpoint."""
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
        """Counts the step whose update is made. If it cannot: returns which step that is, and why."""
        try:
            if self._host.count_update():
                return None
        except Exception as error:  # whatever it is, older checkpoints count, and training ends as without us
            return f"the newest {self._unit}", str(error)
        step = f"{self._unit} {self._host.step + 1}"
        return step, (
            f"its update is made, but the loop has not come to the end of the {self._unit}, usually because it waits "
            "for a rank that died"
        )


@contextlib.contextmanager
def _not_interrupted() -> Iterator[None]:
    """A launcher that stops the job sends SIGTERM meanwhile, which a handler, or the default, would end this by."""
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
