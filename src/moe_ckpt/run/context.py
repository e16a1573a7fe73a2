"""The context of a session: what it gets when it is made, in one record for all its parts."""

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
        policy: What is saved when.
        catalog: Of the model.
        state: Live tensors.
        comm: The ranks.
        settings: How the machine may be used.
        placement: Which rank holds what.
        lock: Of the store.
        aliases: Names of tied parameters -> the name in the catalog.
        on_phase: See ``driver.run.on_phase``.
        observers: Get every event.
        gate: Holds copies and sends back; None: they go at once.
        gradients: What optimizers consumed, where the policy logs that.
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
        """Returns what manifests say of the model."""
        layers = tuple(LayerRecord(layer.name, layer.experts, layer.top_k) for layer in self.catalog.layers)
        return ModelRecord(self.catalog.fingerprint, layers, dict(self.aliases))
