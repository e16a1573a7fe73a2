"""The context of a session: one record with all that its parts need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.format.manifest import LayerRecord, ModelRecord
from moe_ckpt.policies.base import Policy
from moe_ckpt.ports import Communicator, GradientRecord, TrainingState, TransferGate
from moe_ckpt.run.events import Observer, SessionEvent
from moe_ckpt.run.options import Settings
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.lock import StoreLock


@dataclass(frozen=True, eq=False)
class RunContext:
    """The surroundings of one life of a run, on one rank.

    Attributes:
        storage: Of the store.
        policy: Decides what is saved at which step.
        catalog: Of the model.
        state: Live tensors.
        comm: The ranks.
        settings: Limits of the engine.
        placement: Ranks of the operators.
        lock: Of the store.
        aliases: Names of tied parameters -> the name in the catalog.
        on_phase: See ``driver.run.on_phase``.
        observers: Receive every event.
        gate: Delays copies and sends; None: they begin at once.
        gradients: Record of consumed gradients; None if the policy does not log them.
    """

    storage: Storage
    policy: Policy
    catalog: Catalog
    state: TrainingState
    comm: Communicator
    settings: Settings
    placement: Placement
    lock: StoreLock
    aliases: Mapping[str, str] = field(default_factory=dict)
    on_phase: Callable[[str], None] | None = None
    observers: Sequence[Observer] = ()
    gate: TransferGate | None = None
    gradients: GradientRecord | None = None

    def tell(self, event: SessionEvent) -> None:
        """Sends an event to all observers."""
        for observer in self.observers:
            observer(event)

    @cached_property
    def model(self) -> ModelRecord:
        """Returns the model as manifests describe it."""
        layers = tuple(LayerRecord(layer.name, layer.experts, layer.top_k) for layer in self.catalog.layers)
        return ModelRecord(self.catalog.fingerprint, layers, dict(self.aliases))
