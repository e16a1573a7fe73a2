"""A policy of one's own: at every step, the two experts of each layer with the most tokens that no checkpoint has."""

import tempfile
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from lives import start
from with_lightning import train

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import Catalog, Needs, PolicyContext, SnapshotPlan, Tier


@dataclass(frozen=True)
class Busiest:
    """Everything but the experts, and ``experts`` of each MoE layer: those whose loss would cost the most tokens."""

    experts: int = 2
    needs: ClassVar[Needs] = Needs(partial=True)  # it leaves experts at older versions: a failure may lose tokens

    def check(self, catalog: Catalog) -> None:
        if self.experts < 1:
            raise ConfigError(f"Busiest(experts={self.experts}): save at least one expert of each layer")

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        run, catalog = context.run, context.model.catalog
        chosen = [operator.id for operator in catalog.always_saved]
        unsaved = context.tokens.expected_unsaved[Tier.STORAGE]
        for operator in catalog.experts:
            tokens = unsaved[operator.layer]
            busier = (tokens > tokens[operator.expert]).sum()
            if busier < self.experts or operator.id in run.missing:  # missing: no checkpoint has it yet
                chosen.append(operator.id)
        return SnapshotPlan(run.step, tuple(chosen))

    def describe(self) -> dict[str, Any]:
        return {"name": "busiest", **asdict(self)}


def run(dirpath: str, kill_at: int | None = None) -> None:
    checkpoint = MoECheckpoint(Busiest(), dirpath=dirpath, when_busy="wait")
    train(checkpoint, kill_at)
    lost = checkpoint.last.lost_tokens if checkpoint.last else 0
    print(f"resumed at step {checkpoint.restored_step}, {lost} pairs of token and expert lost")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        start(run, root, 25)
        start(run, root)
