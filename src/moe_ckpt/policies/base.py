"""The ``Policy`` protocol, the needs of a policy (``Needs``), and the facts that it decides from (``PolicyContext``).

A policy is a frozen value: the same context gives the same plan, on every rank and in the simulator. It keeps no state;
everything that it must know across steps and restarts (checkpoints started, versions, lost tokens) is in the context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.cadence import bytes_in_time
from moe_ckpt.core.operators import Catalog, Remembered
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.step import SnapshotPlan, Tier
from moe_ckpt.core.tokens import NO_COUNTS, Counts, FaultRecord
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.core.window import OperatorBytes, Window
from moe_ckpt.errors import ConfigError


@dataclass(frozen=True)
class Measured:
    """Times and rates measured so far. None until known. Times are the maximum over ranks, rates the minimum.

    Attributes:
        iteration_secs: Median time of iterations without checkpoint work.
        checkpoint_cost_secs: Time that one checkpoint adds to training: stalls plus the slowdown of the iterations
            during which it ran.
        persist_secs: Time from the start of a snapshot to its commit.
        copy_bytes_per_sec: Rate from live tensors to host memory.
        persist_bytes_per_sec: Rate from host memory to a commit.
        recent_iteration_secs: Median time of the last iterations, with or without checkpoint work, minus the time for
            which training waited.
        update_secs: Time of the optimizer's update, during which nothing may be copied.
        send_bytes_per_sec: Rate from host memory to the memory of all peers, including verification.
        copy_interference_secs: Time by which copying slows down an iteration, without waits, from iterations beside
            checkpoints of different sizes (``core.cadence``).
    """

    iteration_secs: float | None = None
    checkpoint_cost_secs: float | None = None
    persist_secs: float | None = None
    copy_bytes_per_sec: float | None = None
    persist_bytes_per_sec: float | None = None
    recent_iteration_secs: float | None = None
    update_secs: float | None = None
    send_bytes_per_sec: float | None = None
    copy_interference_secs: float | None = None

    @property
    def interference_secs(self) -> float:
        """Seconds by which checkpoint work slows down an iteration, without waits; 0 until known.

        A run that begins a checkpoint at every step has no iteration without checkpoint work: it can only know
        ``copy_interference_secs``.
        """
        if self.recent_iteration_secs is None or self.iteration_secs is None:
            return self.copy_interference_secs or 0.0
        return max(0.0, self.recent_iteration_secs - self.iteration_secs)

    @property
    def overlap_secs(self) -> float | None:
        """Seconds of the forward and backward pass, during which a copy causes no wait; None until known.

        The time that saving itself adds to an iteration is subtracted.
        """
        whole = self.recent_iteration_secs
        return None if whole is None else max(0.0, whole - self.interference_secs - (self.update_secs or 0.0))

    def copy_bytes(self, fraction: float = 1.0) -> int | None:
        """Returns the most bytes that one rank can copy during forward and backward; None until known."""
        return bytes_in_time(self.overlap_secs, self.copy_bytes_per_sec, fraction)

    def persist_bytes(self, every_n_steps: int, fraction: float = 1.0) -> int | None:
        """Returns the most bytes that one rank can commit in ``every_n_steps`` steps; None until known."""
        whole = self.recent_iteration_secs
        between = None if whole is None else whole * every_n_steps
        return bytes_in_time(between, self.persist_bytes_per_sec, fraction)

    def send_bytes(self, every_n_steps: int, fraction: float = 1.0) -> int | None:
        """Returns the most bytes that one rank can send to all its peers in so many steps; None until known."""
        whole = self.recent_iteration_secs
        between = None if whole is None else (whole - self.interference_secs) * every_n_steps
        return bytes_in_time(between, self.send_bytes_per_sec, fraction)


class Sends(NamedTuple):
    """The parts of a snapshot that must be sent to peers, because these lack the same state (``slices.local_state``).

    Attributes:
        shared: True if some state of gates and non-experts must be sent.
        experts: True if some state of experts must be sent.
        shared_weights: True if that includes weights of gates and non-experts, not only master weights and optimizer
            state.
        expert_weights: True if that includes weights of experts.
    """

    shared: bool = True
    experts: bool = True
    shared_weights: bool = True
    expert_weights: bool = True

    @property
    def nothing(self) -> bool:
        """True if peers have everything."""
        return not (self.shared or self.experts)

    def nbytes(self, size: OperatorBytes, *, expert: bool) -> int:
        """Returns the bytes that are sent of an operator that is saved in full.

        Args:
            size: The operator's size.
            expert: True if the operator is an expert.
        """
        if not (self.experts if expert else self.shared):
            return 0
        return size.sent(weights=self.expert_weights if expert else self.shared_weights)


ALL_SENT = Sends()


@dataclass(frozen=True)
class ModelFacts:
    """The model that is trained, and the ranks that hold it.

    Attributes:
        catalog: Its operators.
        placement: The ranks that hold each operator.
        sizes: Bytes of every operator, as its tensors are now; empty unless the policy needs them.
        coupled: Groups of operators that must be anchored in the same slot of a window, because they share a
            parameter and the optimizer's update of a row depends on its other rows.
    """

    catalog: Catalog
    placement: Placement
    sizes: Mapping[str, OperatorBytes] = field(default_factory=dict)
    coupled: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True)
class RunFacts:
    """The point that the run has reached.

    Attributes:
        step: Optimizer steps done (the state to be saved is the one after this step).
        last_step: Step of the newest checkpoint that was started, or None.
        index: Checkpoints started so far in this run, across restarts.
        missing: Operators that no checkpoint on storage holds, neither a committed one nor one under way.
        nothing_safe: Checkpoints were started, but none is committed or under way: they failed, or are in another
            store.
        window: The newest sparse window, unless one of its snapshots failed or was skipped; None if there is none.
        next_slot: How many slots of ``window`` were started; 0 if there is none.
        dense_step: Step of the newest dense checkpoint, started or committed; None if the policy does not need it.
        faults: Recoveries of the run so far.
    """

    step: int
    last_step: int | None = None
    index: int = 0
    missing: tuple[str, ...] = ()
    nothing_safe: bool = False
    window: Window | None = None
    next_slot: int = 0
    dense_step: int | None = None
    faults: tuple[FaultRecord, ...] = ()

    @property
    def lost_tokens(self) -> int:
        """Token-expert pairs lost in all recoveries."""
        return sum(fault.lost_tokens for fault in self.faults)


@dataclass(frozen=True)
class TokenFacts:
    """Tokens of each expert, ``[L, E]`` and reduced over ranks; columns beyond a layer's E are 0.

    For ``Tier.HOST`` and ``Tier.PEER`` there are counts if memory outlives the process. Both include what storage has.

    Attributes:
        unsaved: ``U[l][e]`` from committed checkpoints on storage only: the tokens lost by a failure that it survives.
            On several ranks, or on a GPU, those of the newest step are estimated (``RunLedger.likely``), since the
            ranks agree on them a step later. No other count includes them then.
        expected_unsaved: For each tier, ``U[l][e]`` once the snapshots under way are complete there.
        chosen_at: For each tier, the step of the newest snapshot, complete or under way, that holds the expert; -1 if
            none.
        routed: ``[L]``, token-expert pairs of each layer since the start of the run.
        popularity: Work that each expert got, counted as ``Needs.popularity`` says; empty if it says nothing.
    """

    unsaved: Counts = field(default_factory=lambda: NO_COUNTS)
    expected_unsaved: Mapping[Tier, Counts] = field(default_factory=dict)
    chosen_at: Mapping[Tier, Counts] = field(default_factory=dict)
    routed: Counts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    popularity: npt.NDArray[Any] = field(default_factory=lambda: NO_COUNTS)

    @property
    def routed_tokens(self) -> int:
        """Token-expert pairs of all layers since the start of the run."""
        return int(self.routed.sum())


@dataclass(frozen=True)
class MemoryFacts:
    """The room of a snapshot, and the tiers that it goes to.

    Attributes:
        budget_fraction: Portion of the time between checkpoints that saving may take.
        snapshot_bytes: Most bytes of one rank's snapshot that its host memory leaves room for; None if not known.
        at_once: Number of snapshots that may be under way at once, each with so many bytes.
        tiers: Tiers that the checkpoint of this step goes to. ``Tier.HOST`` is memory that outlives the process, if
            there is any, ``Tier.PEER`` that of the peers that get copies.
        sends: Parts of a snapshot that must be sent to peers.
        anchored_at: ``[operators]``, in the catalog's order: step of the newest anchor (``ledger.ledger.Anchors``),
            complete or under way, from which gradients (held or under way) bring the operator to the newest step; -1 if
            there is none. Empty if the policy does not need it.
    """

    budget_fraction: float = 1.0
    snapshot_bytes: int | None = None
    at_once: int = 1
    tiers: frozenset[Tier] = frozenset({Tier.STORAGE})
    sends: Sends = ALL_SENT
    anchored_at: Counts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def outlives_process(self) -> bool:
        """True if memory keeps this step's checkpoint, whether or not storage gets it."""
        return Tier.HOST in self.tiers

    @property
    def storage_due(self) -> bool:
        """True if the checkpoint of this step is also written to storage."""
        return Tier.STORAGE in self.tiers

    @property
    def sends_copies(self) -> bool:
        """True if a part of this step's checkpoint must be sent to peers."""
        return Tier.PEER in self.tiers and not self.sends.nothing


@dataclass(frozen=True)
class PolicyContext:
    """Everything that a policy may know at one step, equal on every rank.

    Attributes:
        model: The model, and the ranks that hold it.
        run: The point that the run has reached.
        measured: Times and rates.
        tokens: Tokens of each expert.
        memory: Room of a snapshot, and the tiers that it goes to.
    """

    model: ModelFacts
    run: RunFacts
    measured: Measured = Measured()
    tokens: TokenFacts = field(default_factory=TokenFacts)
    memory: MemoryFacts = field(default_factory=MemoryFacts)

    def copy_bytes(self, fraction: float = 1.0) -> int | None:
        """Returns the most bytes that one rank can copy during forward and backward and has room for; None until
        known."""
        copied, room = self.measured.copy_bytes(fraction), self.memory.snapshot_bytes
        return copied if copied is None or room is None else min(copied, room)


@runtime_checkable
class Policy(Protocol):
    """Decides, after every optimizer step, what to snapshot.

    Called on every rank, on the training thread, before the next forward pass; must be fast and pure.

    A policy that needs further facts also has an attribute or property ``needs``, of type ``Needs``. It is not a member
    of this protocol, so three methods are enough; ``needs_of`` reads it.
    """

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """Returns what to save of the state after ``context.run.step``; an empty plan saves nothing."""

    def check(self, catalog: Catalog) -> None:
        """Checks that this policy can serve a model. Called once, before training.

        Raises:
            ConfigError: This policy cannot serve this model.
        """

    def describe(self) -> dict[str, Any]:
        """Returns name and parameters as plain data, which are written into every manifest."""


class NamedPolicy:
    """Base class of the package's own policies, frozen dataclasses: manifests and configs call them by one name."""

    name: ClassVar[str]

    def describe(self) -> dict[str, Any]:
        """Returns name and parameters as plain data, which are written into every manifest."""
        return {"name": self.name, **vars(self)}


AS_CONSUMED, BF16 = "as_consumed", "bf16"
"""Types of logged gradients (``Needs.gradients``)."""

TOKENS, GATE_WEIGHTS, DECAYED = "tokens", "gate_weights", "decayed"
"""Ways to count popularity (``Needs.popularity``)."""


@named_arguments
@dataclass(frozen=True)
class Needs:
    """Needs of a policy, beyond the engine's default facts, and of its checkpoints. By default: nothing.

    It is read when the policy is given to an adapter or a simulation, and must not change. A policy that wraps another
    passes on all of its needs (``Wrapper``), changed by ``dataclasses.replace`` if necessary.

    Attributes:
        sizes: It uses ``ModelFacts.sizes``, which is empty otherwise.
        popularity: It uses ``TokenFacts.popularity``, which is empty otherwise: "tokens" routed since the newest window
            began, or since the run's start; "gate_weights" of these tokens, summed, in arbitrary units, or tokens
            where a router does not return its weights; or tokens per step, "decayed": ``A <- 0.9 A + 0.1 count``.
        windows: It spreads checkpoints over sparse windows (``SnapshotPlan.window``). It gets ``ModelFacts.sizes``,
            ``coupled``, ``snapshot_bytes`` and ``dense_step``, and is asked about step 0 too. Training must be able to
            compute each step again exactly.
        gradients: It plans logs of gradients (``SnapshotPlan.gradients``), at each step, in memory that outlives the
            process; adapters refuse it without such memory. It gets ``ModelFacts.sizes``, ``coupled``,
            ``snapshot_bytes`` and ``anchored_at``. "as_consumed": a log has them as optimizers consume them. "bf16":
            every rank rounds them to bf16 before each update, so a log takes 2 bytes per parameter and a replay
            repeats training exactly; this changes training. Such a policy cannot be combined with others (``AnyOf``).
        tiers: It plans checkpoints in memory and on storage separately, by ``MemoryFacts.tiers``. For
            the simulator, which otherwise writes to storage whatever memory holds.
        partial: Its checkpoints hold some experts in older versions, so a failure loses tokens.
        lost_tokens: It uses ``RunFacts.faults`` or ``TokenFacts.routed``, as a policy with a budget does: what it saves
            changes during training, even if nothing else does.
        alone: It cannot be combined with other policies (``AnyOf``): it counts steps from the newest checkpoint,
            whichever policy started it, or spreads one over several steps.
        boost: Experts that are stale after a failure get this portion more tokens (0.1: 10 %), until they have made up
            for the lost ones (``boost.layer``). None: no more tokens.
        replicas: Its checkpoints must lie in the memory of at least this many peers. Adapters and simulator refuse it
            if memory keeps fewer copies.
        bubbles: Its copies and sends use the bubbles of a pipeline schedule first (``bubbles.schedule``), if there is a
            pipeline.
        period_steps: Its plans repeat after this many steps, counted from step 0: the same facts give the same plan at
            steps that differ by a multiple of it. For the simulator, which simulates a repeated period only once.
        next_due: ``next_due(context)`` returns the first step from ``context.run.step`` on at which the policy may want
            a checkpoint, if nothing else changes. None: it may want one at each step. For the simulator, which does not
            call ``plan`` before that step.
        warning: ``warning(context)`` returns why the policy cannot do in this run what it was set to do, and what to
            set instead; None if it can. Rank 0 asks until it gets a text or rates are measured, and, if there are
            windows, whenever one of another length begins.
    """

    sizes: bool = False
    popularity: str | None = None
    windows: bool = False
    gradients: str | None = None
    tiers: bool = False
    partial: bool = False
    lost_tokens: bool = False
    alone: bool = False
    boost: float | None = None
    replicas: int = 0
    bubbles: bool = False
    period_steps: int = 1
    next_due: Callable[[PolicyContext], int] | None = None
    warning: Callable[[PolicyContext], str | None] | None = None

    def __post_init__(self) -> None:
        require_positive("Needs", period_steps=self.period_steps)
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 0:
            raise ConfigError(f"Needs(replicas={self.replicas!r}): replicas must be a whole number of at least 0")
        require_boost("Needs(boost", self.boost)
        for name, choices in (("popularity", (TOKENS, GATE_WEIGHTS, DECAYED)), ("gradients", (AS_CONSUMED, BF16))):
            if (value := getattr(self, name)) not in (None, *choices):
                raise ConfigError(f"Needs({name}={value!r}): choose {', '.join(map(repr, choices))}, or None")
        for name in ("next_due", "warning"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise ConfigError(f"Needs({name}={value!r}): give a function that takes a PolicyContext, or None")
        for name in ("sizes", "windows", "tiers", "partial", "lost_tokens", "alone", "bubbles"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"Needs({name}={value!r}): choose True or False")

    @property
    def stored_gradients(self) -> str | None:
        """Type, as named in shards' headers, to which wider gradients are rounded. None if they are not rounded."""
        return self.gradients.upper() if self.gradients == BF16 else None

    def due(self, context: PolicyContext) -> int:
        """Returns the first step from ``context.run.step`` on at which the policy is to be asked; see ``next_due``."""
        step = context.run.step
        return step if self.next_due is None else max(step, int(self.next_due(context)))


def needs_of(policy: Policy) -> Needs:
    """Returns ``policy.needs``; ``Needs()`` for a policy that has none.

    Raises:
        ConfigError: ``needs`` is not a ``Needs``.
    """
    # The class is asked first: an AttributeError inside a property must not count as "no needs".
    needs = policy.needs if hasattr(type(policy), "needs") else getattr(policy, "needs", None)  # type: ignore[attr-defined]
    if needs is None:
        return Needs()
    if not isinstance(needs, Needs):
        name = type(policy).__name__
        raise ConfigError(
            f"{name}.needs is {needs!r}: make it a property, or a ClassVar, that returns moe_ckpt.policies.Needs(...)"
        )
    return needs


def require_served(policy: Policy, *, gradients: bool = False) -> None:
    """Raises ``ConfigError`` if the run cannot provide what the policy needs.

    Args:
        policy: The policy.
        gradients: True if there is memory that outlives the process and can hold a log of gradients.
    """
    if needs_of(policy).gradients and not gradients:
        raise ConfigError(
            f"{type(policy).__name__} logs the gradients of each step (Needs.gradients), which only memory that "
            "outlives the process holds: give memory=moe_ckpt.Memory(...)"
        )


_unknown_sizes = Remembered(lambda everything, sizes: list(filterfalse(sizes.__contains__, everything)), most=4)


def require_sizes(where: str, catalog: Catalog, sizes: Mapping[str, OperatorBytes], hint: str = "") -> None:
    """Raises ``ConfigError`` unless ``sizes`` has every operator of the catalog.

    Args:
        where: Policy that needs them, for the message.
        catalog: Of the model.
        sizes: ``ModelFacts.sizes``.
        hint: What to do, for the message.
    """
    unknown = _unknown_sizes(catalog.everything, sizes)
    if unknown:
        raise ConfigError(
            f"{where}: ModelFacts.sizes must have every operator of the catalog, but {len(unknown)} are not there, "
            f"such as {unknown[0]}{hint}"
        )


def next_multiple(last_step: int | None, every_n_steps: int) -> int:
    """Returns the first multiple of ``every_n_steps`` after ``last_step``.

    A policy that is due from there on makes up for a skipped checkpoint at the next step, and then continues on the
    multiples.
    """
    return ((last_step or 0) // every_n_steps + 1) * every_n_steps


def require_boost(where: str, boost: object) -> None:
    """Raises ``ConfigError`` unless ``boost`` is None, or above 0 and at most 1. ``where`` is like "Policy(name"."""
    number = isinstance(boost, (int, float)) and not isinstance(boost, bool)
    if boost is not None and not (number and 0 < boost <= 1):  # type: ignore[operator]
        raise ConfigError(
            f"{where}={boost!r}): the portion by which experts get more tokens until they have made up for what a "
            "failure lost must be a number above 0 and at most 1, such as 0.1 for 10 %; None switches it off"
        )


def require_positive(policy: str, *words: str, **values: int | str) -> None:
    """Raises ``ConfigError``, which names policy and setting, unless every value is an int >= 1 or one of ``words``."""
    computed = f", or {'one of ' * (len(words) > 1)}{', '.join(map(repr, words))} to compute it from measurements"
    for name, value in values.items():
        if value not in words and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            or_word = computed if words else ""
            raise ConfigError(f"{policy}({name}={value!r}): {name} must be a whole number of at least 1{or_word}")


def require_operators(policy: str, catalog: Catalog, window: int | None) -> None:
    """Raises ``ConfigError`` unless a model has at least as many operators as ``window`` has steps, and one at all."""
    count = len(catalog.operators)
    if not count:
        raise ConfigError(f"{policy}: the model has no parameters, so there is nothing to save")
    if window is not None and window > count:
        raise ConfigError(
            f"{policy}(window={window}): the model has only {count} operators, and every step of a window saves at "
            f"least one of them in full; give a window of at most {count}"
        )
