"""A checkpointing system: a policy of the library, where its snapshots go, and how it recovers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_ckpt.core.cadence import StorageCadence
from moe_ckpt.core.step import Tier
from moe_ckpt.core.user_text import parse_bytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import Needs, Policy, needs_of, require_served
from moe_ckpt_sim.checks import above_zero, flag, not_none, one_of, portion, whole

DURABLE = ("storage", "node", "peers")
ROLLBACKS = ("global", "localized")
INTERVALS = ("policy", "young", "daly", "oracle")


@dataclass(frozen=True)
class System:
    """One system to simulate.

    Attributes:
        policy: The policy, the same object that a Trainer would get.
        durable: The place where a snapshot counts as durable: on "storage", in the memory of its own "node", which
            outlives the process, or also in that of ``replicas`` "peers".
        storage_every: The checkpoints in memory that also go to storage, in case memory is lost (``core.cadence``);
            None: none, and after a loss of memory training starts from scratch.
        when_busy, max_in_flight: As in ``run.options.Settings``.
        rollback: The ranks that go back after a failure: all ("global"), or only the stages that lost a rank
            ("localized": stages log what they send each other, MoEvement, section 3.4).
        freeze: Replay leaves out the weight gradients and updates of operators that are not anchored yet, as in the
            paper. A trainer of this library leaves out nothing.
        interval: The rule for the interval of a policy with ``every_n_steps``: the "policy" itself, the formulas
            "young" or "daly", or an "oracle" that tries many intervals on the same failures.
        max_overhead: The greatest portion of training time that an interval from a formula may cost; None: any.
        upstream_bytes: Host memory of each rank for its log under "localized", as in ``moe_ckpt.Memory``, also as text
            such as "8GB"; None: as much as it needs. If it is too short for a recovery, all ranks go back.
        survivors: Surviving ranks seal the newest step in memory, as with ``moe_ckpt.Memory(survivor_secs=...)``; the
            papers' systems do not.
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
        above_zero(owner, **not_none(max_overhead=self.max_overhead))
        try:
            if self.upstream_bytes is not None:
                object.__setattr__(self, "upstream_bytes", parse_bytes(self.upstream_bytes, "upstream_bytes"))
            _ = self.cadence
        except ConfigError as error:
            raise ConfigError(f"{owner}: {error}") from error
        portion(owner, **not_none(max_overhead=self.max_overhead))
        flag(owner, freeze=self.freeze, survivors=self.survivors)
        copies = self.replicas if self.durable == "peers" else 0
        if self.needs.replicas > copies:
            raise ConfigError(
                f"{owner}(durable={self.durable!r}, replicas={copies}): {type(self.policy).__name__} is for "
                f"checkpoints in the memory of at least {self.needs.replicas} peers; use durable: peers, or policy "
                "Dense"
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
        """The cadence of flushes from memory to storage; None if there are none, or all snapshots go to storage."""
        cadence = None if self.storage_every is None else StorageCadence(self.storage_every)
        return None if self.durable == "storage" else cadence

    @property
    def log_bytes(self) -> float | None:
        """``upstream_bytes`` as a number."""
        return None if self.upstream_bytes is None else float(self.upstream_bytes)

    @property
    def needs(self) -> Needs:
        """The needs of the policy."""
        return needs_of(self.policy)

    @property
    def memory_tiers(self) -> frozenset[Tier]:
        """The tiers of a checkpoint that stays in memory."""
        return frozenset({Tier.HOST, Tier.PEER} if self.durable == "peers" and self.replicas else {Tier.HOST})

    @property
    def sparse(self) -> bool:
        return self.needs.windows

    @property
    def tiered(self) -> bool:
        """True if plans say what goes to storage; otherwise storage gets what memory holds when it is due."""
        return self.needs.tiers and self.durable != "storage"

    @property
    def seals(self) -> bool:
        """True if survivors seal the newest step, which needs memory that outlives their processes."""
        return self.survivors and self.durable != "storage"

    @property
    def in_trainer(self) -> bool:
        """True if every framework can run the system; localized rollback is for Megatron pipelines."""
        return self.rollback == "global"


@dataclass(frozen=True)
class SimulatedMemory:
    """The config group ``memory``: memory as ``moe_ckpt.Memory`` sets it up, which replaces the system's own settings.

    Attributes:
        durable, replicas: As in ``System``.
        storage_every: As in ``moe_ckpt.Memory``.
        survivors: As in ``System``; true by default, as in a Trainer.
    """

    durable: str
    replicas: int = 2
    storage_every: int | float | str = 1
    survivors: bool = True

    def applied_to(self, system: System) -> System:
        """Returns the system on this memory. Raises ``ConfigError`` if the two do not fit."""
        return replace(system, **vars(self))
