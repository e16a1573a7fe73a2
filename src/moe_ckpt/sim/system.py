"""A checkpointing system: a policy of the library, and what is done with its snapshots and after a failure."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import Policy, uses_windows
from moe_ckpt.sim.checks import above_zero, flag, given, one_of, portion, whole

DURABLE = ("storage", "peers")
ROLLBACKS = ("global", "localized")
INTERVALS = ("policy", "young", "daly", "oracle")


@dataclass(frozen=True)
class System:
    """One system to simulate.

    policy: decides what to save, at each step. The very object that a Trainer would be given.
    durable: where a snapshot must be to outlive a failure: on "storage", or in the memory of ``replicas`` "peers".
    backup_every_secs: systems with peers also write to storage this often, for when a node and its peers all fail;
        None: never, and training begins anew.
    when_busy, max_in_flight: as ``engine.settings.Settings``.
    rollback: who goes back after a failure: all ranks, or only the stages that lost a rank ("localized": stages keep
        what they sent each other, upstream logging, MoEvement, section 3.4).
    freeze: replay leaves out the weight gradients and updates of operators that are not anchored yet.
    interval: who chooses the interval of a policy that has ``every_n_steps``: the "policy" itself, "young" or "daly" by
        their formulas, or an "oracle" that tries them all on the same failures.
    max_overhead: None, or the portion of training time that an interval from a formula may cost at most.
    """

    name: str
    policy: Policy
    durable: str = "storage"
    replicas: int = 2
    backup_every_secs: float | None = None
    when_busy: str = "wait"
    max_in_flight: int = 2
    rollback: str = "global"
    freeze: bool = True
    interval: str = "policy"
    max_overhead: float | None = None

    def __post_init__(self) -> None:
        owner = f"System {self.name!r}"
        if not isinstance(self.policy, Policy):
            raise ConfigError(f"{owner}(policy={self.policy!r}): not a policy: it has no plan(), check() or describe()")
        one_of(owner, DURABLE, durable=self.durable)
        one_of(owner, ROLLBACKS, rollback=self.rollback)
        one_of(owner, INTERVALS, interval=self.interval)
        one_of(owner, ("skip", "wait"), when_busy=self.when_busy)
        whole(owner, replicas=self.replicas, max_in_flight=self.max_in_flight)
        above_zero(owner, **given(backup_every_secs=self.backup_every_secs, max_overhead=self.max_overhead))
        portion(owner, **given(max_overhead=self.max_overhead))
        flag(owner, freeze=self.freeze)
        if self.rollback == "localized" and not self.sparse:
            raise ConfigError(
                f"{owner}(rollback='localized'): only a policy with sparse windows (MoEvement) takes a snapshot at "
                "every iteration that one stage can be brought back from; use rollback: global"
            )
        if self.rollback == "localized" and self.durable != "peers":
            raise ConfigError(
                f"{owner}(rollback='localized', durable={self.durable!r}): the ranks that go back load from peers; use "
                "durable: peers, or rollback: global"
            )
        if self.interval != "policy" and not hasattr(self.policy, "every_n_steps"):
            raise ConfigError(
                f"{owner}(interval={self.interval!r}): {type(self.policy).__name__} has no every_n_steps to choose; "
                "use interval: policy"
            )

    @property
    def sparse(self) -> bool:
        return uses_windows(self.policy)

    @property
    def in_trainer(self) -> bool:
        """Whether a Trainer can run all of it today: replicas on peers and localized rollback are simulated only."""
        return self.durable == "storage" and self.rollback == "global"
