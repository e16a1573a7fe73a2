"""The whole state of a run that another host trained: parameters, optimizer state, buffers, random numbers, schedules.

A checkpoint is read under the names of the model here, so that it is verified, compared and loaded like one of this
run. What only the other host understands (loops, callbacks, the position in the data) stays where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.interop.weights import choose, common_beginnings, raising_on_all_ranks
from moe_ckpt.interop.whole import unmark
from moe_ckpt.ports import Communicator, TrainingState
from moe_ckpt.reading.collective import on_rank_zero
from moe_ckpt.reading.index import TensorIndex, split_key
from moe_ckpt.reading.reader import StoreReader, locate, split_step
from moe_ckpt.reading.restore import MODEL, weight_specs
from moe_ckpt.reading.step_storage import listed_again
from moe_ckpt.recovery.resume import load_step
from moe_ckpt.storage import Storage

_Plain = Mapping[str, Any]
_HOSTS = {"lightning": "Lightning", "torch": "a PyTorch loop (moe_ckpt.attach, transformers, torchtitan)"}
"""Framework in the plain state -> who wrote it."""


@dataclass(frozen=True)
class Renaming:
    """The names of a checkpoint as those of the model here.

    Attributes:
        stored: What names begin with in the checkpoint, up to a dot; "" for nothing.
        here: The same in this model.
    """

    stored: str = ""
    here: str = ""

    def covers(self, name: str) -> bool:
        """Returns whether a name in the checkpoint, of a tensor or a module, is one of the model here."""
        return f"{name}.".startswith(self.stored)

    def name(self, name: str) -> str:
        """Returns the name here; of what is outside the model that name itself."""
        return (self.here + f"{name}.".removeprefix(self.stored)).rstrip(".") if self.covers(name) else name

    def key(self, key: str) -> str:
        """Returns a tensor key with the name here."""
        at = split_key(key)
        if at.optimizer is None:
            return f"{MODEL}{self.name(at.fqn)}"
        return f"optim/{at.optimizer}/{self.name(at.fqn)}/{at.state}"

    def entries(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what there is by name, by the names here."""
        return {self.name(name): value for name, value in entries.items()}


class _RenamingReader(StoreReader):
    """Reads one dense checkpoint of another host under the names of the model here.

    Args:
        storage: Of the store.
        state: Of the model here.
    """

    def __init__(self, storage: Storage, state: TrainingState) -> None:
        super().__init__(storage)
        self._state = state
        self._named: TensorIndex | None = None
        self.renaming = Renaming()
        self.keeps_groups = False
        """Param groups are divided otherwise, so this script's hyperparameters stay."""
        self.unused: list[str] = []

    def index(self, manifest: Manifest) -> TensorIndex:
        if self._named is None:
            stored = super().index(manifest)
            names = [key.removeprefix(MODEL) for key in stored.tensors if key.startswith(MODEL)]
            here = [spec.parameter for spec in weight_specs(self._state.specs())]
            self.renaming = Renaming(*common_beginnings(names, here))
            origins: dict[str, str] = {}
            for key in stored.tensors:
                other = origins.setdefault(self.renaming.key(key), key)
                if other != key:
                    raise ConfigError(
                        f"state_from: {other} and {key} of the checkpoint would both be {self.renaming.key(key)} here. "
                        "Rename the tensor outside of the model, or set weights_from= to begin from the weights"
                    )
            tensors = {name: stored.tensors[key] for name, key in origins.items()}
            self._named = TensorIndex(tensors, stored.side)
        return self._named

    def state(self, manifest: Manifest, rank: int) -> dict[str, Any]:
        """Returns the plain state of a rank, that of model and optimizers by the names here."""
        state = super().state(manifest, rank)
        framework = state.get("framework")
        if framework not in _HOSTS:
            raise UnsupportedError(
                f"state_from: checkpoint {manifest.directory} was written under {framework!r}, which keeps optimizer "
                "state of another form. Set weights_from= to begin from its weights"
            )
        return state | {"plain": self._by_names_here(state["plain"])}

    def _by_names_here(self, plain: _Plain) -> dict[str, Any]:
        here, renaming = self._state.plain(), self.renaming
        self.unused.clear()
        renamed: dict[str, Any] = {"frozen": list(map(renaming.name, plain["frozen"]))}
        if "varying_buffers" in plain:
            renamed["varying_buffers"] = list(map(renaming.name, plain["varying_buffers"]))
        for kind in ("buffers", "extra_state", "own_state"):  # a loss with weights around the model is each host's
            outside = {name: value for name, value in here[kind].items() if not f"{name}.".startswith(renaming.here)}
            inside = {name: value for name, value in plain.get(kind, {}).items() if renaming.covers(name)}
            renamed[kind] = outside | renaming.entries(inside)
            self.unused += sorted(plain.get(kind, {}).keys() - inside.keys())
        optimizers = []
        for number, entry in enumerate(plain["optimizers"]):
            groups = [{**group, "params": list(map(renaming.name, group["params"]))} for group in entry["param_groups"]]
            ours = here["optimizers"][number]["param_groups"] if number < len(here["optimizers"]) else groups
            if _divided(ours) != _divided(groups) and set().union(*_divided(ours)) == set().union(*_divided(groups)):
                groups, self.keeps_groups = ours, True
            by_name = {kind: renaming.entries(entry.get(kind, {})) for kind in ("scalars", "unsliced")}
            zeroed = list(map(renaming.name, entry.get("zeroed", ())))
            optimizers.append({**entry, **by_name, "zeroed": zeroed, "param_groups": groups})
        return renamed | {"optimizers": optimizers}


def _divided(groups: Iterable[_Plain]) -> list[set[str]]:
    return [set(group["params"]) for group in groups]


@dataclass(frozen=True)
class Handover:
    """A checkpoint of another host whose tensors are loaded into the model and the optimizers here.

    Attributes:
        reader, manifest: Of the checkpoint.
        plain: The plain state for this rank; what is ``plain`` in it, by the names here.
        path: Of its file.
        passed_over: Said of newer sparse windows; "" if there are none.
        taken: What ``hand_out`` loaded, as text.
        not_taken: What it did not, and why.
    """

    reader: _RenamingReader
    manifest: Manifest
    plain: _Plain
    path: str
    passed_over: str = ""
    taken: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)

    @property
    def groups(self) -> Sequence[Any]:
        """Hyperparameters as the other script had set them; () where this script's stay."""
        return () if self.reader.keeps_groups else self.plain["configured"]["optimizers"]

    def hand_out(self, objects: Iterable[Any]) -> None:
        """Loads the state of schedules and gradient scalers into those of this run, which are paired in their order.

        Args:
            objects: What this run has besides model and optimizers.
        """
        if self.reader.keeps_groups:
            self.not_taken.append("hyperparameters, as param groups are divided otherwise")
        stored = [state for state in self._states() if isinstance(state, Mapping)]
        listed = list(objects)
        for kind, mark, is_one in _KINDS:
            states = [state for state in stored if mark in state]
            takers = [one for one in listed if is_one(one)]
            fits = len(states) == len(takers) and all(
                one.state_dict().keys() == state.keys() for one, state in zip(takers, states, strict=True)
            )
            if not (states or takers):
                continue
            if not fits:
                self.not_taken.append(f"{kind}s ({len(states)} there, {len(takers)} here, or of other classes)")
            elif self.reader.keeps_groups and kind == _SCHEDULE:
                self.not_taken.append(f"{kind}s, which have a rate for each group")
            else:
                for one, state in zip(takers, states, strict=True):
                    one.load_state_dict(dict(state))
                self.taken.append(f"{len(states)} {kind}{'s' * (len(states) > 1)}")

    def _states(self) -> Iterator[Any]:
        yield from self.plain.get("stateful", {}).values()
        checkpoint = unmark(self.plain.get("checkpoint", {}), {})
        yield from checkpoint.get("lr_schedulers", ())
        yield from checkpoint.values()

    def __str__(self) -> str:
        beginnings = [
            f"{where} with {beginning!r}"
            for where, beginning in (("there", self.reader.renaming.stored), ("here", self.reader.renaming.here))
            if beginning
        ]
        names = f", and names begin {' and '.join(beginnings)}" if beginnings else ""
        taken = ["weights", "optimizer state", "random numbers", *self.taken]
        besides = ["the position in the data", "counters", "the state of callbacks", *self.not_taken]
        besides += self.reader.unused
        return (
            f"the state is that of {_HOSTS[self.plain['framework']]}{names}. Taken: {', '.join(taken)}. Not taken: "
            f"{'; '.join(besides)}{self.passed_over}"
        )


_SCHEDULE = "learning rate schedule"
_KINDS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    # torchtitan keeps its schedulers in one object
    (_SCHEDULE, "last_epoch", lambda one: hasattr(one, "get_last_lr") or hasattr(one, "schedulers")),
    ("gradient scaler", "_growth_tracker", lambda one: hasattr(one, "get_backoff_factor")),
)
"""What it is, a key of its state, whether an object is one. To ask all for their state would move data loaders."""


def load_handover(
    path: str | os.PathLike[str], state: TrainingState, comm: Communicator, experts: Sequence[int]
) -> Handover:
    """Loads the tensors of another host's checkpoint. A collective; the caller loads the plain state.

    Args:
        path: Of a store (its newest good dense step) or a step directory.
        state: Of the model and the optimizers here.
        comm: Of all ranks.
        experts: Of each MoE layer that was found here.

    Raises:
        ConfigError: Optimizers, groups or types are others; they are named, and nothing was changed.
        CoverageError: Names or shapes are others; likewise.
        UnsupportedError: It is of Megatron, or a sparse window.
        StoreError: It is not there or damaged.
    """
    text = os.fspath(path)

    def admits(manifest: Manifest, plain: _Plain) -> None:
        stored = [layer.experts for layer in manifest.model.layers]
        if stored != list(experts):
            raise ConfigError(
                f"state_from={text}: the run there has MoE layers of {stored} experts, and this one of "
                f"{list(experts)}. Tell both hosts of the same layers (moe_ckpt.register_moe)"
            )

    def newest() -> Handover:
        directory, passed = on_rank_zero(comm, lambda: choose(text, "state_from"), f"load the state of {text}")
        if directory is None:
            raise UnsupportedError(
                f"state_from={text}: safetensors files hold weights alone. Give a store or a step directory, or set "
                "weights_from="
            )
        reader = _RenamingReader(locate(text)[0], state)
        with raising_on_all_ranks(comm, text, directory):
            _, restored = load_step(comm, lambda: (reader, reader.manifest(directory)), state, admits)
        return Handover(reader, restored.manifest, restored.plain, restored.path, passed)

    return newest() if split_step(text)[1] is not None else listed_again(newest)
