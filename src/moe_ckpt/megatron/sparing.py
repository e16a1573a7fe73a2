"""Skips work in the replay of a sparse window: parameters not anchored yet need no gradients and no update.

An optimization that must not change results, and one that all ranks make or none. Frozen parameters get no gradient of
their weights. The input of the first layer requires gradients always, also where the embedding is not trained: so every
layer's input does, whatever is left out in front of it, and messages between stages and between the ranks of an expert
layer stay as they are. Gradients are still reduced in Megatron's buffers, where zeros lie in place of what is
skipped. So collectives and their order are the same on all ranks; only that of ``overlap_grad_reduce``, which waits for
each parameter, comes at the end of the backward pass.

Norms of all gradients, and whether fp16 overflowed, are recorded at each iteration, and used again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_ckpt.driver.host import loading_state
from moe_ckpt.driver.replaying import StepSource
from moe_ckpt.megatron.inventory import ModelInventory
from moe_ckpt.megatron.optimizers import STEP, StateSlot, leaves, slots
from moe_ckpt.modeling.sparing import WithoutGradients
from moe_ckpt.recovery.replay import Replay

FACTS = "replay"
"""Where the plain state has what a replay uses again."""
_OVERFLOWS = "_unscale_main_grads_and_check_for_nan"
_NORM_OF_GROUP = "_get_grad_norm_for_group"
"""Since 0.19: of parameters that are clipped by themselves, as heads that predict further tokens can be."""
_NEEDING_GRADIENTS = (
    *("fp8", "fp4", "delay_wgrad_compute", "defer_embedding_wgrad_compute", "cpu_offloading"),
    *("enable_cuda_graph", "external_cuda_graph"),
)
"""Options of Megatron's under which no gradient is left out."""
_BEHIND_THE_INPUT = re.compile(r"(.*\blayers\.\d+\.|output_layer\.|decoder\.final_)")


class GradientFacts:
    """The facts that an iteration's update was made by: norms and overflows. From the constructor until ``close``.

    Megatron computes them in methods of its optimizers, which are replaced on these objects.

    Args:
        optimizer: Megatron's.

    Attributes:
        is_supported: They are found where Megatron-Core 0.16 to 0.19 computes them.
        prescribed: ``recorded`` of the iteration that is computed again; None to use what is computed.
    """

    def __init__(self, optimizer: Any) -> None:
        self.prescribed: Mapping[str, Any] | None = None
        self._norms: list[float] = []
        self._overflows: list[bool] = []
        self._replaced: list[tuple[Any, str]] = []
        scaled = _scaled(leaves(optimizer))
        self.is_supported = _has_known_facts(optimizer, scaled)
        if self.is_supported:
            self._replace(optimizer, "get_grad_norm", "norms", self._norms)
            if hasattr(optimizer, _NORM_OF_GROUP):
                self._replace(optimizer, _NORM_OF_GROUP, "norms", self._norms)
            for leaf in scaled:
                self._replace(leaf, _OVERFLOWS, "overflows", self._overflows)

    def _replace(self, owner: Any, name: str, kind: str, taken: list[Any]) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def computed(*args: Any, **kwargs: Any) -> Any:
            fact = original(*args, **kwargs)  # in a replay too, for it asks other ranks
            if self.prescribed is not None and len(taken) < len(self.prescribed[kind]):
                fact = self.prescribed[kind][len(taken)]
            taken.append(fact)
            return fact

        setattr(owner, name, computed)
        self._replaced.append((owner, name))

    def begin(self) -> None:
        """An update begins."""
        self._norms.clear()
        self._overflows.clear()

    def recorded(self) -> dict[str, Any]:
        """Returns the facts of the newest iteration, for its plain state."""
        return {"norms": list(self._norms), "overflows": list(self._overflows)}

    def close(self) -> None:
        """Removes the replacements. Safe to call twice."""
        self.prescribed = None
        while self._replaced:
            owner, name = self._replaced.pop()
            vars(owner).pop(name, None)


class Sparing(StepSource):
    """Leaves out work on what is frozen, beside whatever computes the iterations.

    Args:
        chunks: The model on this rank.
        inventory: Of these.
        optimizer: Megatron's.
        facts: Of the optimizer.
    """

    def __init__(self, chunks: Sequence[Any], inventory: ModelInventory, optimizer: Any, facts: GradientFacts) -> None:
        self._chunks, self._inventory, self._facts = chunks, inventory, facts
        self._slots = slots(optimizer)
        self._leaves = leaves(optimizer)
        self._spared: WithoutGradients | None = None
        self._handles: list[RemovableHandle] = []
        self._put_back: list[Callable[[], None]] = []

    def prepare(self, replay: Replay, recorded: Mapping[str, Any]) -> None:
        self._release()
        if FACTS not in recorded:
            return  # written by an earlier release, or behind the window
        with loading_state("the iterations of a sparse window", replay.upcoming_path):
            facts = recorded[FACTS]
            self._facts.prescribed = {"norms": list(facts["norms"]), "overflows": list(facts["overflows"])}
        names = replay.frozen_parameters()
        frozen = [live for live in self._inventory.parameters if all(part.name in names for part in live.parts)]
        behind = [live.parameter for live in frozen if _BEHIND_THE_INPUT.match(live.parts[0].name)]
        self._without_overlap()
        modules = [module for chunk in self._chunks for module in chunk.modules()]
        self._spared = WithoutGradients(modules, behind, connected=False)
        self._skip_updates([self._slots[live.parameter] for live in frozen if live.parameter in self._slots])
        owners = (module for module in modules if isinstance(getattr(module, "layers", None), nn.ModuleList))
        self._handles += [owner.register_forward_pre_hook(_require_gradients, with_kwargs=True) for owner in owners]

    def _without_overlap(self) -> None:
        """Reductions wait for the whole backward pass, instead of for each parameter's gradient."""
        for chunk in self._chunks:
            self._set(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False)
            self._set(getattr(chunk, "config", None), "grad_sync_func", None)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name, value)
        if before is not value:
            setattr(owner, name, value)
            self._put_back.append(lambda: setattr(owner, name, before))

    def _skip_updates(self, frozen: Sequence[StateSlot]) -> None:
        for leaf in self._leaves:
            # What has no state yet gets it, and its count, by an update.
            frozen_slots = [slot for slot in frozen if slot.leaf is leaf and slot.updated is not None and slot.state]

            def before(
                optimizer: Any, args: Any, kwargs: Any, frozen_slots: Sequence[StateSlot] = frozen_slots
            ) -> None:
                for slot in frozen_slots:
                    if slot.updated is not None:
                        slot.updated.grad = None

            def after(optimizer: Any, args: Any, kwargs: Any, frozen_slots: Sequence[StateSlot] = frozen_slots) -> None:
                for slot in frozen_slots:
                    if isinstance(count := slot.state.get(STEP), torch.Tensor):
                        count += 1  # all parameters have one count

            self._handles.append(leaf.optimizer.register_step_pre_hook(before))
            self._handles.append(leaf.optimizer.register_step_post_hook(after))

    def _release(self) -> None:
        self._facts.prescribed = None
        if self._spared is not None:
            self._spared.close()
            self._spared = None
        while self._handles:
            self._handles.pop().remove()
        while self._put_back:
            self._put_back.pop()()

    def close(self) -> None:
        self._release()


def _require_gradients(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Before the forward pass of what owns layers."""
    hidden_states = kwargs.get("hidden_states", args[0] if args else None)
    if torch.is_grad_enabled() and isinstance(hidden_states, torch.Tensor) and hidden_states.is_floating_point():
        hidden_states.requires_grad_()


class Spares:
    """Decides whether, and how, this rank leaves out work in replays.

    Args:
        chunks: The model on this rank.
        inventory: Of these.
        optimizer: Megatron's.
        possible: ``may_spare`` on all ranks. If one of them computed gradients that others leave out, some messages
            would not be waited for.
        records: The policy has windows.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], inventory: ModelInventory, optimizer: Any, possible: bool, records: bool
    ) -> None:
        self._parts = chunks, inventory, optimizer
        self._possible = possible
        self._facts = GradientFacts(optimizer) if records and self._possible else None

    def update_begins(self) -> None:
        """Begins an update, before ``optimizer.step``."""
        if self._facts is not None:
            self._facts.begin()

    def captured(self) -> dict[str, Any]:
        """Returns entries of the plain state."""
        return {} if self._facts is None else {FACTS: self._facts.recorded()}

    def source(self) -> StepSource:
        """Returns the source that leaves out work, beside what computes the iterations."""
        chunks, inventory, optimizer = self._parts
        if self._possible and self._facts is None:
            self._facts = GradientFacts(optimizer)
        if self._facts is None:
            return StepSource()
        return Sparing(chunks, inventory, optimizer, self._facts)

    def close(self) -> None:
        """Removes what was replaced on the optimizers. Safe to call twice."""
        if self._facts is not None:
            self._facts.close()


def may_spare(chunks: Sequence[nn.Module], optimizer: Any) -> bool:
    """Returns whether gradients can be left out exactly, and only the optimizers read them.

    fp8 keeps casts of weights by what they are needed for, captured graphs stay as they were captured, deferred
    gradients are not made where hooks could leave them out, and an output layer that defers its own needs one to run.
    """
    configs: list[Any] = [getattr(chunk, "config", None) for chunk in chunks]
    for config in configs:
        if any(getattr(config, name, None) for name in _NEEDING_GRADIENTS):
            return False
        if getattr(config, "cuda_graph_impl", "none") != "none":
            return False
    members = leaves(optimizer)
    if any(getattr(leaf.config, "log_num_zeros_in_grad", False) for leaf in members):
        return False
    return _has_known_facts(optimizer, _scaled(members))


def _scaled(members: Sequence[Any]) -> list[Any]:
    return [leaf for leaf in members if getattr(leaf, "grad_scaler", None) is not None]


def _has_known_facts(optimizer: Any, scaled: Sequence[Any]) -> bool:
    """Whether norms and overflows are found where Megatron-Core 0.16 to 0.19 computes them."""
    chained = hasattr(optimizer, "chained_optimizers") and hasattr(optimizer, "get_grad_norm")
    return chained and all(hasattr(leaf, _OVERFLOWS) for leaf in scaled)
