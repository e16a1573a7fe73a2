"""The part that adapters of the user's own training loops share: position, refusals, ``finish`` and ``close``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from moe_ckpt.data import RecoverableDistributedSampler, draws_new_order, samplers_of
from moe_ckpt.driver.changes import Change
from moe_ckpt.driver.host import End, Host, SealingSurvivors, Stateful, loading_state, require_framework
from moe_ckpt.driver.run import CLOSE_SECS, Driver
from moe_ckpt.driver.states import State
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.run_records import Finished
from moe_ckpt.format.tree import encode_tree
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.recovery.recovery_plan import RecoveryPlan
from moe_ckpt.run.events import StepRecord
from moe_ckpt.run.options import Options
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.stopwatch import timed

_Self = TypeVar("_Self", bound="AttachedCheckpoint")
UNCOUNTED = 16
"""Steps of each optimizer without ``after_step``: more than any loop makes between two."""


class LoopPosition:
    """The position of a loop. Calls on the training thread.

    Attributes:
        unit: The framework's name for a step.
        arguments: Further arguments of ``after_step``, for messages.
        step: Steps done.
        counters: Further counters of the loop, as of that step.
        moved: A step was done in this process.
        is_updating: An update has begun that no step has counted, so weights may be those of the next step.
    """

    unit, arguments = "step", ""

    def __init__(self) -> None:
        self.moved = self.is_updating = False
        self.set_position(0, {})

    def set_position(self, step: int, counters: Mapping[str, Any]) -> None:
        """Sets the position at which training begins."""
        self.step, self.counters = int(step), counters  # numpy's numbers are no JSON

    def count(self, call: str, step: int, counters: Mapping[str, Any] | None) -> None:
        """Counts a step.

        Args:
            call: The function that the loop called, for messages.
            step: Steps done, this one included.
            counters: Plain data by name; None: unchanged.

        Raises:
            ConfigError: The step does not follow the one before.
            UnencodableStateError: A counter, which is named, is no plain data.
        """
        if step != self.step + 1:
            raise ConfigError(
                f"{call}({step}) follows {self.unit} {self.step}: call it once per {self.unit}, with the number of "
                f"{self.unit}s done, and start from the position that resume() returned"
            )
        if counters is not None:
            encode_tree(counters, "counters")  # which raises, before a checkpoint would
            self.counters = deepcopy(dict(counters))
        self.step, self.moved, self.is_updating = int(step), True, False

    def require_counted(self, call: str) -> None:
        """Raises ``ConfigError`` between an update and ``after_step``: the state has no step's number yet."""
        if self.is_updating:
            after_step = f"after_step({self.step + 1}{self.arguments})"
            raise ConfigError(
                f"{call}: weights are no longer those of {self.unit} {self.step}, for optimizer.step() or "
                f"before_step() was called since, but {after_step} was not called, so they cannot be saved under "
                f"their own number. Call {after_step} first: a loop that ends early does so after it"
            )


class LoopHost(Host):
    """The host of the user's own training loop: only the loop knows its length, and what else it changes.

    Args:
        stateful: Objects that are saved beside model and optimizers, by name.
        loop: Its position.

    Attributes:
        framework: Its name; the plain state has it in lower case.
        attach: The function that was given ``stateful``, for messages.
        loaders: The data loaders in ``stateful``, by name.

    Raises:
        ConfigError: An object lacks ``state_dict`` or ``load_state_dict``.
    """

    framework = "torch"
    attach = "moe_ckpt.attach"

    def __init__(self, stateful: Mapping[str, Stateful], loop: LoopPosition) -> None:
        for name, target in stateful.items():
            if isinstance(getattr(target, "base_dataloader", None), DataLoader):
                raise ConfigError(
                    f"{self.attach}: {name} ({type(target).__name__}) is what accelerate makes of a data loader, which "
                    "is a batch ahead. Give the StatefulDataLoader itself, and loop over that"
                )
            if isinstance(getattr(getattr(target, "loader", target), "sampler", None), RecoverableDistributedSampler):
                raise ConfigError(
                    f"{self.attach}: {name} ({type(target).__name__}) has a RecoverableDistributedSampler, whose "
                    "position is what was trained on, and not what a loader has fetched. Give the sampler itself in "
                    "its place, use an ordinary DataLoader, and call the sampler's advance after each batch"
                )
            drawing = next(filter(draws_new_order, samplers_of(getattr(target, "loader", target))), None)
            if drawing is not None and hasattr(target, "state_dict"):
                raise ConfigError(
                    f"{self.attach}: the {type(drawing).__name__} in {name} ({type(target).__name__}) draws a new "
                    "order after a restart. Give the loader shuffle=True in its place, or a sampler with state_dict "
                    "and load_state_dict. Or leave the loader out: a restarted run then goes on with other data"
                )
            if not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
                is_loader = isinstance(target, DataLoader)
                raise ConfigError(
                    f"{self.attach}: {name} ({type(target).__name__}) lacks state_dict or load_state_dict, so it "
                    "cannot be restored. "
                    + ("Use torchdata's StatefulDataLoader" if is_loader else "Give it both, or leave it out")
                )
        self.stateful, self.loop, self.unit = stateful, loop, loop.unit
        wrapped = {name: getattr(target, "loader", target) for name, target in stateful.items()}
        self.loaders = {name: target for name, target in wrapped.items() if isinstance(target, DataLoader)}

    @property
    def step(self) -> int:
        return self.loop.step

    def loader_generators(self) -> dict[str, torch.Tensor]:
        """Returns states of generators that were given to data loaders, which draw orders and seeds of workers from it.

        A loader's own state has the order of one epoch only (torchdata 0.11): later ones follow from the generator.
        """
        return {name: one.generator.get_state() for name, one in self.loaders.items() if one.generator is not None}

    def restore_loader_generators(self, plain: Mapping[str, Any]) -> None:
        """Restores what ``loader_generators`` returned, from the entry of that name in ``plain``."""
        recorded = plain.get("loader_generators", {})
        for name, loader in self.loaders.items():
            if name in recorded and loader.generator is not None:
                loader.generator.set_state(recorded[name])

    def admits(self, manifest: Manifest, plain: Mapping[str, Any]) -> None:
        """Raises for the state of another framework, or of other stateful objects."""
        require_framework(plain, self.framework, f"checkpoint {manifest.directory}")
        if self.stateful.keys() != plain["stateful"].keys():
            raise ConfigError(
                f"checkpoint {manifest.directory} holds the state of {sorted(plain['stateful'])}, and this run gives "
                f"{sorted(self.stateful)} to {self.attach}: give objects of the same names. To go on with others, "
                "choose another dirpath, and set state_from= to the store of this checkpoint"
            )

    def continue_finished(
        self, manifest: Manifest, finished: Finished, changes: Sequence[Change], plt: float
    ) -> tuple[bool, str]:
        return True, (
            f". The run is finished ({finished.reason}): training that ends at {self.unit} {manifest.step} does "
            "nothing, longer training continues. For another experiment choose another dirpath"
        )

    def end(self) -> End:
        return End("training ended")


_OTHER_LOADER = (
    "Its dataset, sampler or number of workers is another one than in the run: build it as in the run, or begin "
    "another run from its weights (weights_from=)."
)


class AttachedCheckpoint:
    """Checkpoints one training loop. All ranks call each method, on the training thread.

    Args:
        host: Of the loop.
        options: Checked.

    Attributes:
        options: As given, checked.
        stopwatch: Counts how long checkpointing keeps the training thread.
    """

    _host: LoopHost
    _undo: ExitStack
    """Removes all hooks."""

    def __init__(self, host: LoopHost, options: Options) -> None:
        self.options, self._host = options, host
        again = "resume() was called twice: call it once, before the first step"
        over = "call nothing after finish() or close(); to train again, attach again"
        advice = {
            State.OPEN: (
                "resume() was not called, so training would start from scratch and ignore existing checkpoints. Call "
                f"it before the first step; to start from scratch, use {host.attach}(resume='never')"
            ),
            **dict.fromkeys((State.READY, State.WINDOW, State.TRAINING, State.REPLAYING), again),
            **dict.fromkeys((State.ENDED, State.CLOSED), over),
        }
        self._driver = Driver(host, options, advice)
        self.stopwatch = self._driver.stopwatch
        self._undo = ExitStack()

    @property
    def session(self) -> CheckpointSession:
        """The session, with its catalog, its ledger and the newest committed step."""
        return self._driver.session

    @property
    def survivors(self) -> SealingSurvivors | None:
        """Seals the newest step when training stops; None without memory that outlives the process."""
        return self._driver.survivors

    @property
    def last(self) -> StepRecord | None:
        """The record of the newest step; None before the first."""
        return self._driver.last

    @property
    def restored_step(self) -> int | None:
        """The step of the checkpoint that training resumed from; None for a new run."""
        return self._driver.restored_step

    @property
    def recovery_plan(self) -> RecoveryPlan | None:
        """The recovery plan of the checkpoint that training resumed from, on this rank; None before, and for a new run.

        It says for each operator whether it came from memory of this node or of others, or from storage.
        """
        return None if self._driver.restored is None else self._driver.restored.plan

    @property
    def replaying(self) -> bool:
        """True during the replay of a sparse window, until whose end the model has no complete state."""
        return self._driver.replaying is not None

    @timed
    def save(self, *, wait: bool = True) -> bool:
        """Saves a complete checkpoint of the newest step, whatever the policy. Call it after ``after_step``.

        Nothing is written if there is one already.

        Args:
            wait: Wait until the checkpoint is committed; else it is written during training, like any other.

        Returns:
            Whether there is a checkpoint. False in a replay, when the model holds no complete state of the run.

        Raises:
            ConfigError: An optimizer stepped since, and ``after_step`` was not called yet.
            SaveFailedError: The checkpoint could not be committed, or not in time.
        """
        self._require_counted("save()")
        return self._driver.save(wait=wait)

    def finish(self, *, ended: bool = True) -> None:
        """Saves a complete last checkpoint after training ended without an error, and waits for it.

        Safe to call twice, and just before ``sys.exit``. Leaving a ``with`` block calls it.

        Args:
            ended: The run is finished, and a later start says so. False for a job that another one continues, after a
                time limit or a signal.

        Raises:
            ConfigError: An optimizer stepped since the newest step, and ``after_step`` was not called yet.
            SaveFailedError: The checkpoint could not be committed.
        """
        if self._driver.lifecycle.state is State.ENDED:
            return
        self._require_counted("finish()")
        self._leave_peers()
        try:
            self._driver.catch_up()
            self._driver.finish(moved=self._host.loop.moved, ended=ended)
        finally:
            self._undo.close()

    def close(self, timeout_secs: float | None = None, failure: BaseException | str | None = None) -> None:
        """Releases threads, lock and hooks after a failure. Safe to call twice, and after ``finish``.

        Args:
            timeout_secs: Longest wait for checkpoints under way.
            failure: What happened. Memory that outlives the process then keeps the newest step, within
                ``Memory(survivor_secs)``, unless the failure came in the middle of an update.
        """
        if failure is not None:
            self._driver.survive(failure)
        self._undo.close()
        self._driver.close(timeout_secs)

    def iterate_quietly(self, loader: DataLoader[Any]) -> None:
        """Makes the first iterator of a restored loader draw no random number, of the run or of its own generator.

        A new iterator draws its seed, and a shuffled epoch's order; the run did so when the epoch began. If that epoch
        has ended, the loader makes a second iterator, which draws those of the next. ``resume`` calls this for loaders
        in ``stateful``, so call it for others only. A loader that does not take the restored position says so then, by
        ``StoreError``.
        """
        make, restored = loader._get_iterator, self._driver.restored
        path = self.options.dirpath if restored is None else restored.path

        def first() -> Any:
            loader._get_iterator = second  # type: ignore[method-assign]
            generator = loader.generator
            before, state = capture_rng(), None if generator is None else generator.get_state()
            with loading_state(f"the data loader {type(loader).__name__}", path, _OTHER_LOADER):
                iterator = make()
            restore_rng(before)
            if generator is not None:
                generator.set_state(state)
            return iterator

        def second() -> Any:
            loader.__dict__.pop("_get_iterator", None)
            self._epoch_begins()
            return make()

        loader._get_iterator = first  # type: ignore[method-assign]
        self._undo.callback(lambda: loader.__dict__.pop("_get_iterator", None))

    def _epoch_begins(self) -> None:
        """A restored loader is about to draw the numbers of an epoch, which the run had not begun."""

    def _quieten_loaders(self) -> None:
        """Does ``iterate_quietly`` for all loaders in ``stateful``, after they were restored."""
        for loader in self._host.loaders.values():
            self.iterate_quietly(loader)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None and self.session.is_open:  # else it was finished or closed inside
                self.finish()
        finally:
            self.close(CLOSE_SECS, error)

    def _require_counted(self, call: str) -> None:
        if not self.replaying:  # else nothing is saved
            self._host.loop.require_counted(call)

    def _leave_peers(self) -> None:
        """Tells other ranks that this one trains no more, if they depend on it."""
        return
