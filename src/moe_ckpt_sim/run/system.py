"""A checkpointing system: a policy of the library, and what is done with its snapshots and after a failure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_ckpt.core.plan import Tier
from moe_ckpt.core.quantities import parse_bytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.pace.cadence import StorageCadence
from moe_ckpt.policies.base import Needs, Policy, needs_of, require_served
from moe_ckpt_sim.checks import above_zero, flag, given, one_of, portion, whole

DURABLE = ("storage", "node", "peers")
ROLLBACKS = ("global", "localized")
INTERVALS = ("policy", "young", "daly", "oracle")


@dataclass(frozen=True)
class System:
    """One system to simulate.

    Attributes:
        policy: Decides what to save, at each step. The very object that a Trainer would be given.
        durable: Where a snapshot must be to count: on "storage", in the memory of its own "node", which outlives the
            process, or in that of ``replicas`` "peers" besides.
        storage_every: Which of those in memory also go to storage, for when memory is lost (``pace.cadence``); None:
            none, and training then starts from scratch.
        when_busy, max_in_flight: As ``run.options.Settings``.
        rollback: Who goes back after a failure: all ranks, or only the stages that lost a rank ("localized": stages
            keep what they sent each other, upstream logging, MoEvement, section 3.4).
        freeze: Replay leaves out the weight gradients and updates of operators that are not anchored yet.
        interval: Who chooses the interval of a policy that has ``every_n_steps``: the "policy" itself, "young" or
            "daly" by their formulas, or an "oracle" that tries them all on the same failures.
        max_overhead: None, or the portion of training time that an interval from a formula may cost at most.
        upstream_bytes: What each rank may spend on its log under "localized", as in ``moe_ckpt.Memory``, also as text
            such as "8GB"; None: as much as it needs. Where it does not reach far enough, all ranks go back.
        survivors: Ranks that live on seal the newest step in memory, as ``moe_ckpt.Memory(survivor_secs=...)`` has it;
            the papers' systems do not.
    """

    name: str
    policy: Policy
    durable: str = "storage"
    replicas: int = 2
    storage_every: int | float | str | None = None
    when_busy: str = "wait"
    max_in_flight: int = 2
    rollback: str = "global"
    freeze: bool = True
    interval: str = "policy"
    max_overhead: float | None = None
    survivors: bool = False
    upstream_bytes: float | str | None = None

    def __post_init__(self) -> None:
        owner = f"System {self.name!r}"
        if not isinstance(self.policy, Policy):
            raise ConfigError(f"{owner}(policy={self.policy!r}): not a policy: it has no plan(), check() or describe()")
        require_served(self.policy, gradients=True)
        one_of(owner, DURABLE, durable=self.durable)
        one_of(owner, ROLLBACKS, rollback=self.rollback)
        one_of(owner, INTERVALS, interval=self.interval)
        one_of(owner, ("skip", "wait"), when_busy=self.when_busy)
        whole(owner, replicas=self.replicas, max_in_flight=self.max_in_flight)
        above_zero(owner, **given(max_overhead=self.max_overhead))
        try:
            if self.upstream_bytes is not None:
                object.__setattr__(self, "upstream_bytes", parse_bytes(self.upstream_bytes, "upstream_bytes"))
            _ = self.cadence
        except ConfigError as error:
            raise ConfigError(f"{owner}: {error}") from error
        portion(owner, **given(max_overhead=self.max_overhead))
        flag(owner, freeze=self.freeze, survivors=self.survivors)
        kept = self.replicas if self.durable == "peers" else 0
        if self.needs.replicas > kept:
            raise ConfigError(
                f"{owner}(durable={self.durable!r}, replicas={kept}): {type(self.policy).__name__} is for checkpoints "
                f"in the memory of at least {self.needs.replicas} peers; use durable: peers, or policy Dense"
            )
        if self.needs.gradients and self.durable == "storage":
            raise ConfigError(
                f"{owner}(durable='storage'): {type(self.policy).__name__} keeps its log in memory that outlives the "
                "process; use durable: peers or node, or another memory than off"
            )
        if self.rollback == "localized" and not self.sparse:
            raise ConfigError(
                f"{owner}(rollback='localized'): only a policy with sparse windows (MoEvement) takes a snapshot at "
                "every iteration that one stage can be brought back from; use rollback: global"
            )
        if self.rollback == "localized" and self.durable == "storage":
            raise ConfigError(
                f"{owner}(rollback='localized', durable='storage'): the ranks that go back load from memory that "
                "outlives their processes; use durable: peers or node, or rollback: global"
            )
        if self.rollback == "global" and self.upstream_bytes is not None:
            raise ConfigError(
                f"{owner}(rollback='global', upstream_bytes={self.upstream_bytes}): all ranks go back, none reads "
                "a log; use rollback: localized, or leave upstream_bytes out"
            )
        if self.interval != "policy" and not hasattr(self.policy, "every_n_steps"):
            raise ConfigError(
                f"{owner}(interval={self.interval!r}): {type(self.policy).__name__} has no every_n_steps to choose; "
                "use interval: policy"
            )

    @property
    def cadence(self) -> StorageCadence | None:
        """Which checkpoints in memory also go to storage; None where none does, or where all are there anyway."""
        cadence = None if self.storage_every is None else StorageCadence(self.storage_every)
        return None if self.durable == "storage" else cadence

    @property
    def log_bytes(self) -> float | None:
        """``upstream_bytes`` as a number."""
        return None if self.upstream_bytes is None else float(self.upstream_bytes)

    @property
    def needs(self) -> Needs:
        """Of the policy."""
        return needs_of(self.policy)

    @property
    def memory_tiers(self) -> frozenset[Tier]:
        """Tiers of a checkpoint that stays in memory."""
        return frozenset({Tier.HOST, Tier.PEER} if self.durable == "peers" and self.replicas else {Tier.HOST})

    @property
    def sparse(self) -> bool:
        return self.needs.windows

    @property
    def tiered(self) -> bool:
        """Whether its plans say what goes on to storage; else that is what memory holds when storage is due."""
        return self.needs.tiers and self.durable != "storage"

    @property
    def seals(self) -> bool:
        """Whether survivors seal anything: there must be memory that outlives their processes."""
        return self.survivors and self.durable != "storage"

    @property
    def in_trainer(self) -> bool:
        """Whether every framework can run it: localized rollback is for Megatron pipelines."""
        return self.rollback == "global"


@dataclass(frozen=True)
class SimulatedMemory:
    """The group ``memory``: memory as a Trainer has it by ``moe_ckpt.Memory``, in place of what the system says itself.

    Attributes:
        durable, replicas: As in ``System``.
        storage_every: As in ``moe_ckpt.Memory``.
        survivors: As in ``System``; a Trainer's do by default.
    """

    durable: str
    replicas: int = 2
    storage_every: int | float | str = 1
    survivors: bool = True

    def applied_to(self, system: System) -> System:
        """The same system on this memory. Raises ``ConfigError`` where the two do not go together."""
        return replace(system, **vars(self))
