"""The options that users set: those of the engine alone, and those of every adapter; checked in one place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from moe_ckpt.core.user_text import parse_bytes, parse_secs, suggest_name
from moe_ckpt.errors import ConfigError
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.memory.options import Memory
from moe_ckpt.policies import EXAMPLES, class_of, default_policy, with_option
from moe_ckpt.policies.base import Needs, Policy, needs_of, require_served
from moe_ckpt.storage.local import ACCESS

_LONGEST_WAIT_SECS = 30 * 86_400.0
"""A month: longer than it is useful to wait for a peer, and short enough for every function that takes a timeout."""
RESUME = ("auto", "extend", "never")
ON_READ_ERROR = ("stop", "fallback")
_FOR_ADAPTERS = ("max_in_flight", "pinned", "local_ranks")
"""Fields that an adapter sets automatically."""


class OptionValues(TypedDict, total=False):
    """Keyword arguments of the adapters, for editors and type checkers; meanings and defaults: ``Options``."""

    resume: str
    save_last: bool
    retention: RetentionPolicy | None
    host_memory_bytes: int | str | None
    budget_fraction: float
    memory: Memory | None
    when_busy: str
    checksum_threads: int | None
    timeout_secs: float | str
    profile: str | os.PathLike[str] | None
    weights_from: str | os.PathLike[str] | None
    state_from: str | os.PathLike[str] | None
    on_read_error: str
    access: str


@dataclass(frozen=True)
class Settings:
    """Limits of the engine; every field has a safe default.

    Attributes:
        retention: Which committed checkpoints stay on storage.
        host_memory_bytes: Budget of this rank's snapshots in memory, as a number or as text such as "8GB"; None takes
            half of what is free. Three snapshots avoid stalls. If it does not hold ``max_in_flight`` + 1 of them, the
            newest committed one in private memory is dropped when room is needed.
        budget_fraction: Portion of the time between checkpoints that saving may take, above 0 and at most 1, for
            policies that compute what fits (MoEtion, MoEvement, GradientLog).
        when_busy: "skip" drops a checkpoint for which no buffer is free; "wait" stalls training until one is.
        checksum_threads: Threads of this rank that take checksums beside training; None: one for four of its cores.
        max_in_flight: Snapshots copied or being written at the same time.
        timeout_secs: Longest wait for a peer, or for the last writes at the end of training; a number, or text such as
            "10min".
        pinned: Use page-locked buffers, for copies from a GPU.
        local_ranks: Ranks that share this host's memory.
        memory: Keep snapshots in files on a tmpfs, which outlive the process; None: in private memory.

    Raises:
        ConfigError: An invalid value; the message names it.
    """

    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    host_memory_bytes: int | None = None
    budget_fraction: float = 1.0
    when_busy: str = "skip"
    checksum_threads: int | None = None
    max_in_flight: int = 2
    timeout_secs: float = 600.0
    pinned: bool = False
    local_ranks: int = 1
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.retention, RetentionPolicy):
            raise ConfigError(
                f"retention={self.retention!r}: give a RetentionPolicy, such as moe_ckpt.RetentionPolicy(keep_last=3)"
            )
        if self.memory is not None and not isinstance(self.memory, Memory):
            raise ConfigError(f"memory={self.memory!r}: give moe_ckpt.Memory(), or None for private memory")
        require_choice("when_busy", self.when_busy, ("skip", "wait"))
        if self.host_memory_bytes is not None:
            self._set("host_memory_bytes", parse_bytes(self.host_memory_bytes, "host_memory_bytes"))
        self._set("timeout_secs", parse_secs(self.timeout_secs, "timeout_secs", _LONGEST_WAIT_SECS))
        require_fraction("budget_fraction", self.budget_fraction)
        optional = () if self.checksum_threads is None else ("checksum_threads",)
        for name in ("max_in_flight", "local_ranks", *optional):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: must be a whole number greater than 0")

    def _set(self, name: str, value: Any) -> None:
        """Replaces a field that is text or a path object by the number or text for which it stands."""
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Options(Settings):
    """The options of every adapter, in addition to those of the engine (``Settings``).

    Attributes:
        policy: What is saved when; see ``moe_ckpt.policies``, also for ``Guarded``, which keeps another one within a
            budget of lost tokens.
        dirpath: The store: a directory that all ranks see, or an fsspec URL. One run per store.
        resume: "auto" resumes from the newest good step in ``dirpath``; a finished run is extended if only its length
            was raised. "extend" continues a finished run whatever has changed (Megatron: as "auto"). "never" ignores
            the checkpoints there.
        save_last: Save a complete checkpoint of the final state when training ends without an error.
        profile: File to which rank 0 writes the run's profile, for the simulator and the planner; None: no profile. See
            docs/profile.md.
        weights_from: Fine-tuning: weights that the run starts with, as long as ``dirpath`` holds no checkpoint. A store
            (its newest dense step), a step directory, a safetensors file or a directory of those, as ``moe-ckpt
            export`` and transformers write them. Step count, optimizer, schedules and position in the data start from
            scratch.
        state_from: A run under another framework (Lightning, ``attach``, transformers, torchtitan) that this one
            continues, as long as ``dirpath`` holds no checkpoint: a store (its newest dense step) or a step directory.
            Weights, optimizers, random numbers, schedules and step count are taken, the position in the data is not.
        on_read_error: What happens when storage does not return the newest checkpoint at a restart, although it may be
            intact: "stop" ends the run with an error that names step, rank and file; "fallback" resumes from the next
            older one, and retention keeps the newer.
        access: Who may read the store, on file systems: "private": this user only. "group": the user's group too,
            whatever the umask. "umask": as the umask allows. No effect for fsspec URLs.

    Raises:
        ConfigError: An invalid value, or two that contradict each other; the message names them.
    """

    policy: Policy = field(default_factory=default_policy)
    dirpath: str = "checkpoints"
    resume: str = "auto"
    save_last: bool = True
    profile: str | None = None
    weights_from: str | None = None
    state_from: str | None = None
    on_read_error: str = "stop"
    access: str = "private"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.policy, type) or not isinstance(self.policy, Policy):
            raise ConfigError(_not_a_policy(self.policy))
        require_served(self.policy, gradients=self.memory is not None)
        self._require_replicas()
        self._require_steps_without_storage()
        self._set("dirpath", require_path("dirpath", self.dirpath))
        require_choice("resume", self.resume, RESUME)
        require_choice("on_read_error", self.on_read_error, ON_READ_ERROR)
        require_choice("access", self.access, tuple(ACCESS))
        if not isinstance(self.save_last, bool):
            raise ConfigError(f"save_last={self.save_last!r}: choose True or False")
        if self.profile is not None:
            self._set("profile", require_path("profile", self.profile))
            if "://" in self.profile:
                raise ConfigError(f"profile={self.profile!r}: give the path of a local file, or None for no profile")
        for name in ("weights_from", "state_from"):
            if (source := getattr(self, name)) is not None:
                self._set(name, require_path(name, source))
                self._require_other_store(name, getattr(self, name))
        if self.weights_from is not None and self.state_from is not None:
            raise ConfigError(
                f"weights_from={self.weights_from!r} and state_from={self.state_from!r} contradict each other: a run "
                "begins with weights alone, or with the whole state of another"
            )

    def _require_replicas(self) -> None:
        required, available = self.needs.replicas, 0 if self.memory is None else self.memory.replicas
        if required > available:
            setting = "None" if self.memory is None else f"Memory(replicas={available})"
            raise ConfigError(
                f"policy={self.policy!r} needs copies of checkpoints in the memory of at least "
                f"{required} peer{'s' * (required > 1)}, and memory={setting} keeps copies on {available}: give "
                f"memory=moe_ckpt.Memory(replicas={required}), or a policy that keeps none there"
            )

    def _require_steps_without_storage(self) -> None:
        """Refuses a policy that sends gradients to peers if each step goes to storage: then peers get full state,
        too."""
        needs, memory = self.needs, self.memory
        if needs.gradients and needs.replicas and memory is not None and memory.cadence.every == 1:
            raise ConfigError(
                f"policy={self.policy!r} sends gradients to peers only at steps that do not go to storage, "
                f"and with memory=Memory(replicas={memory.replicas}) each step goes there (storage_every=1 is the "
                f"default): give memory=moe_ckpt.Memory(replicas={memory.replicas}, storage_every=100), or a duration, "
                "or a policy that sends full state"
            )

    def _require_other_store(self, name: str, path: str) -> None:
        source, store = (text if "://" in text else os.path.realpath(text) for text in (path, self.dirpath))
        if f"{source}/".startswith(f"{store.rstrip('/')}/"):
            raise ConfigError(
                f"{name}={path!r} lies in dirpath={self.dirpath!r}: a run resumes from its own checkpoints "
                "automatically, and a new run that starts from them needs another store. Set another dirpath"
            )

    @property
    def needs(self) -> Needs:
        """Returns the policy's needs."""
        return needs_of(self.policy)


def make_options(
    where: str,
    policy: Policy | None,
    dirpath: str | os.PathLike[str],
    values: OptionValues,
    adapter_options: Sequence[str] = (),
) -> Options:
    """Returns the checked options of an adapter that was called with ``values``.

    Args:
        where: Name of what the user called, for messages.
        policy: None for the default, ``CheckFreq()``.
        dirpath: See ``Options``.
        values: The other keyword arguments, as given. None stands for the default of ``retention``.
        adapter_options: Names of the adapter's own arguments, which are not in ``values``; for messages.

    Raises:
        ConfigError: An unknown option, or a value that cannot be.
    """
    chosen: dict[str, Any] = {name: value for name, value in values.items() if (name, value) != ("retention", None)}
    names = [f.name for f in fields(Options) if f.name not in _FOR_ADAPTERS]
    for name in chosen:
        if name not in names:
            raise ConfigError(f"{where}({name}=...): no such option; {_hint(name, [*names, *adapter_options])}")
    try:
        options = Options(policy=default_policy() if policy is None else policy, dirpath=dirpath, **chosen)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if options.memory is None and options.resume == "auto":  # else it hardly comes from the store
        from moe_ckpt.run.documents import read_ahead  # imports torch, and programs that train nothing have options too

        read_ahead(dirpath)
    return options


def _not_a_policy(value: object) -> str:
    """Returns the message for a value of ``policy`` that is no policy."""
    if isinstance(value, type) and isinstance(value, Policy):
        return f"policy={value.__name__} is the class of a policy; create a policy from it: policy={value.__name__}()"
    name = class_of(value) if isinstance(value, str) else None
    if name is not None:
        return f"policy={value!r} is text; give the policy itself: policy={name}(), with {name} from moe_ckpt.policies"
    advice = f"give a policy such as {EXAMPLES}, from moe_ckpt.policies"
    if isinstance(value, (str, os.PathLike)):
        return f"policy={value!r}: {advice}. The directory of the checkpoints is given by name: dirpath={str(value)!r}"
    return f"policy={value!r}: {advice}"


def _hint(name: str, names: Sequence[str]) -> str:
    if name in ("guard", "mlt_budget"):
        return "wrap the policy: policy=Guarded(policy, budget, mlt_budget)"
    owner = with_option(name)
    if owner is not None:
        return f"it is an option of the policy: policy={owner}({name}=...)"
    if name in (option.name for option in fields(RetentionPolicy)):
        return f"it is an option of the retention: retention=RetentionPolicy({name}=...)"
    return suggest_name(name, names)


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ``ConfigError`` unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}={value!r}: choose from {', '.join(map(repr, choices))}")


def require_fraction(name: str, value: object) -> None:
    """Raises ``ConfigError`` unless ``value`` is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError(f"{name}={value!r}: must be a number above 0 and at most 1, the portion of time to use")


def require_path(name: str, value: object) -> str:
    """Returns a path or URL as text.

    Raises:
        ConfigError: It is empty, holds a NUL, or is no path at all.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"{name}={value!r}: must be a path, as text or pathlib.Path")
    return text
