"""Messages to the user, the same for every framework."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.core.user_text import human_bytes, name_ranks
from moe_ckpt.interop.handover import Handover
from moe_ckpt.interop.weights import LoadedWeights
from moe_ckpt.notices import announce
from moe_ckpt.ports import StateTensor, TensorSpec
from moe_ckpt.reading.memory.memory_shares import LeftBehind
from moe_ckpt.run.options import Options
from moe_ckpt.slices.assignment import is_weight
from moe_ckpt.slices.local_state import estimate_checkpoint_bytes

log = logging.getLogger("moe_ckpt")


class Messages:
    """The messages of one run, printed on rank 0.

    Args:
        unit: The framework's name for a step.
        dirpath: The store.
        rank: Of this process.
    """

    def __init__(self, unit: str, dirpath: str, rank: int) -> None:
        self._unit, self._dirpath, self._rank = unit, dirpath, rank

    def _say(self, message: str, *args: object, warns: bool = False) -> None:
        if self._rank == 0:
            announce(message, *args, level=logging.WARNING if warns else logging.INFO)

    def _warn(self, message: str, *args: object) -> None:
        self._say(message, *args, warns=True)

    def setup(
        self,
        options: Options,
        catalog: Catalog,
        specs: Collection[TensorSpec],
        tensors: Iterable[StateTensor],
        ranks: int,
    ) -> None:
        """Describes policy, model and store at a start, so that users see which MoE layers were found.

        Args:
            options: Of the run.
            catalog: Of the model.
            specs: Of the tensors of all ranks.
            tensors: Those of this rank.
            ranks: The number of ranks.
        """
        counts = [layer.experts for layer in catalog.layers]
        experts = f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else f"{counts[0]}" if counts else ""
        layers = "no MoE layer was found (tell of one by moe_ckpt.register_moe, under Megatron by num_moe_experts)"
        if counts:
            layers = f"{len(counts)} MoE layer{'s' * (len(counts) > 1)} of {experts} experts"
        parameters = sum(prod(spec.global_shape) for spec in specs if is_weight(spec))
        held = sum(tensor.local.numel() for tensor in tensors if is_weight(tensor))
        where = f"{ranks} ranks, {'sharded' if held < parameters else 'a copy on each'}" if ranks > 1 else "1 rank"
        self._say(
            "%s: %s, %s parameters on %s. Checkpoints go to %s, about %s where all is saved (with Adam); memory that "
            "outlives the process: %s",
            *(_as_written(options.policy), layers, f"{parameters:,}", where, self._dirpath),
            *(human_bytes(estimate_checkpoint_bytes(specs)), "off" if options.memory is None else "on"),
            warns=not counts,
        )

    def new_run(self, resume: str, generation: int) -> None:
        """Says that a new run begins.

        Args:
            resume: The option.
            generation: Number of this start of the run; 0 if the store is new.
        """
        if resume == "never" and generation:
            self._say(
                "training starts from scratch, because resume='never' is set; the checkpoints in %s stay", self._dirpath
            )
        else:
            self._say("training starts from scratch: %s holds no checkpoint yet", self._dirpath)

    def weights(self, loaded: LoadedWeights) -> None:
        """Says that a new run begins with loaded weights."""
        self._say(
            "a new run starts with %s; %s count, optimizer, schedules and data start from scratch", loaded, self._unit
        )

    def handed_over(self, handover: Handover) -> None:
        """Says which state of another host's run was loaded. Called after ``resumed``."""
        self._say("%s", handover, warns=bool(handover.not_taken))

    def resumed(
        self, step: int, source: str, fault: FaultRecord, plt: float, besides: str = "", dirpath: str | None = None
    ) -> None:
        """Says where training resumes, and what was lost.

        Args:
            step: The restored one.
            source: ``Restored.origin``.
            fault: The lost tokens.
            plt: Of the run.
            besides: A warning to add.
            dirpath: The store of the checkpoint, if it is another one.
        """
        lost, portion = f"all experts are of that {self._unit}", ""
        if fault.stale_experts:
            lost = f"{fault.stale_experts} experts are older than that, {fault.lost_tokens:,} tokens lost"
            portion = f"MLT {fault.mlt:.2%}, "
        where = f"{self._unit} {step} from {_path(dirpath or self._dirpath, source)}"
        self._say("resumed at %s: %s (%sPLT %s)%s", where, lost, portion, f"{plt:.2%}", besides, warns=bool(besides))

    def uncounted(self, step: int, updates: int) -> None:
        """Warns that optimizers step, but ``after_step`` is not called.

        Args:
            step: The newest one that was counted.
            updates: Calls of ``optimizer.step`` since.
        """
        self._warn(
            "optimizers stepped %d times since step %d, and after_step(%d) was not called: nothing is saved. Call "
            "after_step once per step, after optimizer and schedulers",
            *(updates, step, step + 1),
        )

    def no_position(self) -> None:
        """Says that a restart will not know which data were trained on."""
        self._say(
            "a restart will draw its data from where the loop begins: nothing in stateful= has a position in the data, "
            "and after_step gets no counters. Give a StatefulDataLoader or a RecoverableDistributedSampler, unless the "
            "loop chooses its data by the number of the step"
        )

    def stopped(self, step: int, committed: int | None) -> None:
        """Says what of a training that did not end normally is saved.

        Args:
            step: The newest step.
            committed: The newest one of which there is a checkpoint; None if there is none.
        """
        lost = step - (committed or 0)
        if lost > 0:
            newest = f"The newest checkpoint is of {self._unit} {committed}"
            where = "There is no checkpoint" if committed is None else newest
            again = f"{lost} {self._unit}s" if lost > 1 else f"one {self._unit}"
            self._say("training stopped at %s %d. %s: %s will be computed again", self._unit, step, where, again)

    def left_behind(self, step: int, lost_checkpoint: LeftBehind | None) -> None:
        """Warns that the run continues from ``step`` on storage, if memory held newer steps that are lost."""
        if lost_checkpoint is None:
            return
        unit, newest = self._unit, lost_checkpoint.step
        if newest is None:
            self._say(
                "no node has a checkpoint of an earlier start in memory: %ss after %d that were only in memory are "
                "lost, and are computed again",
                *(unit, step),
            )
            return
        lost = f"{unit}s {step + 1} to {newest} are" if newest > step + 1 else f"{unit} {newest} is"
        if lost_checkpoint.writers:
            self._warn(
                "%s lost, and must be computed again: memory holds only a part of %s %d, and the part of %s is on no "
                "surviving node. More copies on other nodes, Memory(replicas=...), survive the loss of more nodes",
                *(lost, unit, newest, name_ranks(lost_checkpoint.writers)),
            )
        else:
            self._warn(
                "%s lost, and must be computed again: memory holds no whole checkpoint of %s that this run can use",
                *(lost, "them" if newest > step + 1 else "it"),
            )

    def inexact(self, why: str | None) -> None:
        """Says why the resumed run is inexact; nothing if ``why`` is None."""
        if why is not None:
            self._warn("%s", why)

    def replayed(self, first: int, last: int, source: str) -> None:
        """Says that a sparse window is replayed from step ``first``.

        Args:
            first: First step of the window.
            last: Its last step.
            source: ``Restored.origin``.
        """
        self._say(
            "resumed at %s %d from %s: the %ss of its sparse window, up to %d, are computed again",
            *(self._unit, first, _path(self._dirpath, source), self._unit, last),
        )

    def routed_otherwise(self, first: int, last: int) -> None:
        """Warns that replayed steps of a sparse window, those after ``first``, had other token counts than before."""
        self._warn(
            "the %ss %d to %d, computed again, gave experts other numbers of tokens than the first time: data or "
            "kernels do not repeat, so the state is close to the run's, and not equal to it. Random numbers that a "
            "dataset draws in workers of its loader, and kernels that are not deterministic, do that "
            "(docs/moevement.md, Other tokens than the first time)",
            *(self._unit, first + 1, last),
        )

    def unfinished(self, step: int, window: tuple[int, int]) -> None:
        """Warns that training ended before the replay of a sparse window did.

        Args:
            step: The newest one.
            window: First and last step of the window.
        """
        self._warn(
            "training ended at %s %d, before the sparse window of %ss %d to %d was computed again: nothing was saved, "
            "and the optimizer state in memory is incomplete. The store is unchanged; the next start continues from "
            "that window.",
            *(self._unit, step, self._unit, *window),
        )

    def unsaved(self, step: int, newest: int | None) -> None:
        """Warns that the newest step is in no checkpoint, if so: its state was gone when training ended.

        Args:
            step: The newest one.
            newest: Step of the newest checkpoint; None if there is none.
        """
        if newest == step:
            return
        unit = self._unit
        state = "the store holds no checkpoint" if newest is None else f"the newest checkpoint is of {unit} {newest}"
        self._warn(
            "training ended between two optimizer %ss, after %s %d, whose last batch accumulated gradients only, and "
            "those are in no checkpoint: %s, and the next start computes %ss %d to %d again. Stop training in a batch "
            "that makes a step, or save more often",
            *(unit, unit, step, state, unit, (newest or 0) + 1, step),
        )

    def passed_over(self, step: int, loaded: int) -> None:
        """Warns if training continues from ``step`` of the store, though the host had ``loaded`` a newer one."""
        if step < loaded:
            self._warn(
                "%s %d had been loaded, but training continues from %s %d of the checkpoint in %s, with the bits of "
                "the run. To continue from the other one, choose another dirpath",
                *(self._unit, loaded, self._unit, step, self._dirpath),
            )

    def gone_back(self, step: int, before: int) -> None:
        """Warns if a second fit of the same trainer begins at an older step than the last one of the first fit.

        Args:
            step: The restored one.
            before: The last one of the first fit.
        """
        unit = self._unit
        steps = f"{unit}s {step + 1} to {before} are" if before > step + 1 else f"{unit} {before} is"
        if step < before:
            self._warn(
                "fit() was called again on a Trainer that had come to %s %d, but with save_last=False the newest "
                "checkpoint is of %s %d: %s computed again. Leave save_last=False out to go on from the end of the fit "
                "before",
                *(unit, before, unit, step, steps),
            )


def _as_written(value: Any) -> str:
    """Returns a policy or its argument as a user writes it: without arguments that have the default value."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_written, value))}]"
    if not is_dataclass(value):
        return repr(value)
    arguments = [(field, getattr(value, field.name)) for field in fields(value) if field.repr]
    changed = [f"{field.name}={_as_written(argument)}" for field, argument in arguments if argument != field.default]
    return f"{type(value).__name__}({', '.join(changed)})"


def _path(dirpath: str, source: str) -> str:
    """Returns ``source``, a ``Restored.origin``, with the path of the checkpoint in place of its directory's name."""
    *memory, directory = source.split(" ")
    return source if directory == "memory" else " ".join([*memory, os.path.join(dirpath, directory)])
