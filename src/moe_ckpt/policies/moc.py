"""MoC: partial experts checkpointing (PEC, arXiv 2408.04307; MoC-System, ASPLOS'25)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moe_ckpt.core.operators import Catalog, expert_id
from moe_ckpt.core.plan import SnapshotPlan, save_full, save_nothing
from moe_ckpt.errors import ConfigError, NoMoELayerError
from moe_ckpt.policies.base import PolicyContext, interval_passed, require_positive
from moe_ckpt.policies.selectors import SELECTORS


@dataclass(frozen=True)
class MoC:
    """Save all gates and non-experts, and K experts of every MoE layer, at each checkpoint.

    A checkpoint stays loadable as a whole: the other experts are taken from the checkpoint that saved
    them last, and the tokens they have not seen are counted as lost (PLT) if a fault returns to it.
    The first checkpoint of a run is dense, since there is no older copy to fall back on.

    k: experts saved per MoE layer, 1 <= k <= E.
    selector: name of the selection rule, see ``policies.selectors``.
    """

    k: int = 1
    every_n_steps: int = 1
    selector: str = "sequential"

    def __post_init__(self) -> None:
        require_positive("MoC", k=self.k, every_n_steps=self.every_n_steps)
        if self.selector not in SELECTORS:
            raise ConfigError(f"MoC(selector={self.selector!r}): no such selector; choose from {sorted(SELECTORS)}")

    def check(self, catalog: Catalog) -> None:
        if not catalog.layers:
            raise NoMoELayerError(
                "MoC saves some experts of each MoE layer, but no MoE layer was found in the model. "
                "Register the layer's class with moe_ckpt.register_moe(...), or use the Dense policy."
            )
        for layer in catalog.layers:
            if self.k > layer.experts:
                raise ConfigError(f"MoC(k={self.k}): layer {layer.name!r} has only {layer.experts} experts")

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        if not interval_passed(context.step, context.last_step, self.every_n_steps):
            return save_nothing(context.step)
        chosen = {expert_id(layer, expert) for layer, expert in SELECTORS[self.selector](context, self.k)}
        chosen.update(context.missing)
        chosen.update(op.id for op in context.catalog.always_saved)
        return save_full(context.step, tuple(op.id for op in context.catalog.operators if op.id in chosen))

    def describe(self) -> dict[str, Any]:
        return {"name": "moc", **asdict(self)}
