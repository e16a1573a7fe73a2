"""All errors that this package raises, in two families.

``UserError``: something the caller gave cannot work; the message names both culprits and what to do.
``StoreError``: something outside (disk, peer, file) failed or is damaged; the message names step, rank
and file where they are known. Each subclasses a builtin and carries its facts as fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def _brief(text: str) -> str:
    """Shorten what a file says to what a person reads."""
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 4 :]}"


_MOST = 2000


class MoECheckpointError(Exception):
    """Base of all errors of this package. Can be pickled: ranks and worker processes send errors to each other."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[MoECheckpointError], args: tuple[Any, ...], fields: dict[str, Any]) -> MoECheckpointError:
    """Without ``__init__``, which builds the message from other arguments than the message.

    ``__base__`` is the base that gives instances their memory layout; its ``__new__`` is the one that fits.
    """
    error: MoECheckpointError = kind.__base__.__new__(kind, *args)
    error.args = args  # which OSError leaves to __init__ where a subclass has one
    error.__dict__.update(fields)
    return error


class UserError(MoECheckpointError):
    """The caller's input cannot work."""


class StoreError(MoECheckpointError):
    """Storage, a peer or a file failed."""


class ConfigError(UserError, ValueError):
    """Two settings, or a setting and the model, contradict each other."""


def optimizer_changed(which: str, stored: str, running: str) -> ConfigError:
    """A checkpoint's optimizer state is of another class of optimizer than this run's."""
    return ConfigError(
        f"{which}: the checkpoint was written with {stored}, but this run has {running}. One optimizer cannot use "
        "the state of the other, so nothing was loaded. To continue that run, build the optimizer that it had. To "
        "continue from its weights with a new optimizer, set another dirpath, and set weights_from= to the store, "
        "a step directory or an exported file."
    )


def finished_run(
    dirpath: str, step: int, reason: str, changes: tuple[str, ...], ineffective: tuple[str, ...] = ()
) -> ConfigError:
    """A finished run was started again with other hyperparameters, or with another policy.

    Args:
        ineffective: the ``changes`` that have no effect if the run is extended, because the checkpoint's value is used.
    """
    keeps = f", with the old values of: {'; '.join(ineffective)}" if ineffective else ""
    return ConfigError(
        f"{dirpath} holds a run that is finished ({reason}, at step {step}), and this script differs from it: "
        f"{'; '.join(changes)}. To use the new values, start a new run from the weights of the finished one: set "
        f"another dirpath, and weights_from={dirpath!r}. To train the finished run for longer, set "
        "MoECheckpoint(resume='extend') and a greater max_steps or max_epochs: it continues with its optimizer and "
        f"schedulers as they were{keeps}."
    )


class UnsupportedError(UserError, NotImplementedError):
    """A strategy, optimizer or layout that this package refuses to handle."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'moe_ckpt[{extra}]'"
        )
        self.package = package
        self.extra = extra


def no_moe_layer(policy: str) -> ConfigError:
    """No MoE layer was recognised in a model, and the policy saves experts."""
    return ConfigError(
        f"{policy} saves some experts of each MoE layer, but no MoE layer was found in the model. Register the "
        "layer's class with moe_ckpt.register_moe(...), under Megatron set num_moe_experts, or use a policy that "
        "saves a model without MoE layers, too: Dense, CheckFreq, Gemini, MoEvement or GradientLog."
    )


class CoverageError(UserError, ValueError):
    """A catalog or a checkpoint lacks some state, or holds it twice."""

    def __init__(self, where: str, problems: tuple[str, ...]) -> None:
        shown = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        super().__init__(f"{where}: {shown}{more}")
        self.where = where
        self.problems = problems


class UnencodableStateError(UserError, TypeError):
    """Training state that cannot be written without pickle."""

    def __init__(self, path: str, type_name: str) -> None:
        super().__init__(
            f"training state at {path!r} is a {type_name}, which moe_ckpt cannot write: checkpoints hold tensors, "
            "numbers, strings, bytes, lists, tuples and dicts only, because reading anything else would need pickle. "
            "Return plain data from the state_dict() or on_save_checkpoint() that produced it."
        )
        self.path = path
        self.type_name = type_name


class _FileError(StoreError):
    """A file of a checkpoint is not as it should be; of which step and rank it is may be known."""

    _advice = ""

    def __init__(self, path: str, reason: str, *, step: int | None = None, rank: int | None = None) -> None:
        where = "".join(f", {k} {v}" for k, v in (("step", step), ("rank", rank)) if v is not None)
        reason = _brief(reason)
        super().__init__(f"{path}{where}: {reason}{self._advice}")
        self.path = path
        self.reason = reason
        self.step = step
        self.rank = rank


class DamagedError(_FileError, ValueError):
    """The bytes of a file differ from those that were written."""


class StoreUnreadableError(_FileError, OSError):
    """Storage did not return what a checkpoint needs, even after retries. The checkpoint may be intact."""

    _advice = (
        ". Start again when the storage answers. To continue from an older checkpoint instead, set "
        "on_read_error='fallback', or move the step directory away"
    )

    def __init__(self, path: str, cause: str, *, step: int | None = None, rank: int | None = None) -> None:
        super().__init__(path, f"cannot be read: {cause}", step=step, rank=rank)


class StoreForbiddenError(StoreUnreadableError, PermissionError):
    """This user has no permission to read a file that a checkpoint needs."""

    _advice = (
        ". Give this user permission to read it, or run as the user that wrote it (files are private unless access= "
        "is set)"
    )


def state_refused(path: str, what: str, cause: str, advice: str = "") -> StoreError:
    """An object does not accept the state that a checkpoint holds for it."""
    return StoreError(
        f"{path} holds state of {what} that could not be restored ({cause}). "
        + (
            advice
            or f"Either the file is not the one that the run wrote, or {what} has changed: restore the code and "
            "configuration of the run, or move the step directory away to continue from the checkpoint before "
            "it."
        )
    )


class FormatVersionError(StoreError, ValueError):
    """The store was written in a format version that this package does not read."""

    def __init__(self, path: str, version: object, supported: int) -> None:
        super().__init__(
            f"{path} is in on-disk format version {_brief(repr(version))}; this moe_ckpt reads version {supported} "
            "only. Open or export it with the moe_ckpt that wrote it, or start the run anew in an empty directory."
        )
        self.path = path
        self.version = version
        self.supported = supported


class StoreInUseError(StoreError, RuntimeError):
    """Another run holds the store's lock."""

    def __init__(self, path: str, holder: str, advice: str = "") -> None:
        super().__init__(
            f"the store {path} is in use by another run ({holder}). "
            + (advice or "Give each run its own dirpath, or stop the other run first.")
        )
        self.path = path
        self.holder = holder


class StoreUnwritableError(StoreError, OSError):
    """The store's directory cannot be created or written."""


class NoCheckpointError(StoreError, FileNotFoundError):
    """The path holds no checkpoint that can be loaded."""


class NotFiniteError(StoreError, ValueError):
    """A checkpoint holds NaN or infinite values, from which no training goes on, unless the user names it.

    Attributes:
        where: The checkpoint: its directory or its step.
        first: The first such tensor.
    """

    def __init__(self, where: str, first: str) -> None:
        super().__init__(f"{where} holds values that are not finite (NaN or infinity), {first} for one")
        self.where = where
        self.first = first


class StepRemovedError(StoreError, LookupError):
    """A step was removed from its store while it was read. What was read of it was not damaged.

    Attributes:
        root: Of the store.
        directories: The steps that are gone, newest first.
        path: The file that was missed.
    """

    def __init__(self, root: str, directories: tuple[str, ...], path: str) -> None:
        super().__init__(
            f"{', '.join(directories)} of {root} was removed by retention while it was read ({path} is gone, and so is "
            "the manifest); it was not damaged. Read a newer step, or give the store, of which the newest step is "
            "taken. If reading takes longer than the run keeps a step, raise keep_last in its RetentionPolicy, or set "
            "keep_every_n_steps"
        )
        self.root = root
        self.directories = directories
        self.path = path


class FilesGoneError(StoreError, FileNotFoundError):
    """Files that this run wrote, and that a checkpoint needs, are gone from the store."""

    def __init__(self, root: str, step: int, paths: tuple[str, ...]) -> None:
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        super().__init__(
            f"files that the checkpoint of step {step} needs are gone from {root}: {', '.join(paths[:3])}{more}. "
            "Something deleted or replaced them during training, so everything is saved again"
        )
        self.root = root
        self.step = step
        self.paths = paths


class SaveFailedError(StoreError, RuntimeError):
    """A checkpoint could not be committed; earlier ones are untouched."""

    def __init__(self, step: int, causes: tuple[str, ...]) -> None:
        super().__init__(
            f"the checkpoint of step {step} was not committed; earlier checkpoints are untouched. Cause: "
            + "; ".join(causes)
        )
        self.step = step
        self.causes = causes


_LOST = ("reset by peer", "closed by peer", "connection closed", "broken pipe", "connection refused")
"""What causes say, in any case of letters, where no time ran out."""
_CAUSE_CHARACTERS = 160
"""The most that a message quotes of a cause. Those of gloo are longer, and do not help a user."""


class PeerLostError(StoreError, RuntimeError):
    """Another rank did not answer within the timeout, or its connection was lost."""

    def __init__(self, rank: int, waited_for: str, timeout_secs: float, cause: str, hint: str = "") -> None:
        short = cause if len(cause) <= _CAUSE_CHARACTERS else f"{cause[:_CAUSE_CHARACTERS]} (...)"
        is_lost = any(text in cause.lower() for text in _LOST)
        what = "lost the connection to a peer while waiting for" if is_lost else "timed out waiting for"
        advice = "" if is_lost else f". If a rank was only slow, raise timeout_secs={timeout_secs:g}"
        super().__init__(
            f"rank {rank} {what} {waited_for}: {short}. The first error in the other ranks' output shows the cause"
            + advice
            + (f". {hint}" if hint else "")
        )
        self.rank = rank
        self.waited_for = waited_for
        self.timeout_secs = timeout_secs
        self.cause = cause


def stale_generation(rank: int, generation: int, newest: tuple[int, int]) -> StoreError:
    """Processes of different starts of the run take part in one job."""
    others = f"generation {newest[0]}" if newest[0] == newest[1] else f"generations {newest[0]} to {newest[1]}"
    return StoreError(
        f"rank {rank} is of generation {generation} of the run, and received a message of {others}: a process that "
        "was paused, or that a restart left behind, still takes part. End all processes of the job, and start again"
    )


def torn_snapshot(step: int, keys: tuple[str, ...]) -> StoreError:
    """The state changed while it was being copied, so the snapshot is not of one step."""
    more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
    advice = "Change weights only in optimizer steps, in on_train_batch_end, or between epochs"
    if any(".base_layer." in key for key in keys):
        advice = (
            "PEFT's adapters on a stack of experts (LoraConfig(target_parameters=...)) write to it in each forward "
            "pass. From now on training waits until it is copied; nothing has to be done"
        )
    return StoreError(f"{', '.join(keys[:4])}{more} changed while step {step} was being copied. {advice}")


def sparse_window(directory: str, first: int, last: int) -> UnsupportedError:
    """A sparse window was given where a dense checkpoint is needed. Only training can turn the one into the other."""
    return UnsupportedError(
        f"checkpoint {directory} is a sparse window of the steps {first} to {last}: its operators are of different "
        "steps, and only computing these steps again brings them to the same step. Start the training script again "
        "with the same dirpath and without ckpt_path, or use a dense checkpoint, such as the last one of a run "
        "that finished normally."
    )


class OtherLayoutError(ConfigError):
    """A sparse window or a gradient log was written with another number of ranks, or other parallel degrees."""

    def __init__(self, directory: str, reason: str, advice: str, what: str = "a sparse window") -> None:
        super().__init__(
            f"checkpoint {directory} is {what} {reason}: its steps can only be computed again in the layout that they "
            f"were first computed in. {advice}"
        )
        self.directory = directory
        self.reason = reason


class ReplayDivergedError(UserError, RuntimeError):
    """Steps that were computed again, or updates that were repeated, differ from what was recorded."""

    def __init__(self, step: int, difference: str, changed: str = "", *, logged: bool = False) -> None:
        cause = f" This script differs from the run's, which may be the cause: {changed}." if changed else ""
        if logged:
            super().__init__(
                f"repeating the updates of a gradient log did not come to step {step}: {difference}. Something other "
                "than the optimizers seems to have changed weights or optimizer state in a way that is not seen "
                "(docs/gradient_log.md, Limits), so nothing is taken that only this log leads to: a start goes back to "
                "the newest step that was saved in full, in memory or on storage. If there is none, run moe-ckpt "
                "memory clear on every node to begin anew. Take a policy that saves full state (MoEvement, Dense, MoC)"
            )
        else:
            super().__init__(
                f"computing step {step} again did not repeat it: {difference}.{cause} The state differs from "
                "the run's, so training stops. Data, seeds and configuration must be those of the run; to return to an "
                "older dense checkpoint, move the newer step directories away, and run moe-ckpt memory clear on every "
                "node of a run with memory."
            )
        self.step = step
        self.difference = difference
        self.changed = changed
        self.logged = logged


class RecoveryLoopError(StoreError, RuntimeError):
    """Several starts in a row resumed from the same checkpoint in memory, and none of them completed a step."""

    def __init__(self, directory: str, starts: int, slots: Sequence[str], run_id: str, root: str) -> None:
        of = f"--run {run_id} --directory {root}"
        shown = ", ".join(slots[:4]) + (f" and {len(slots) - 4} more" if len(slots) > 4 else "")
        super().__init__(
            f"the last {starts} starts resumed from {directory} in memory, and none of them completed a step; the end "
            "of their logs shows the cause. This start does not try again. When the cause is fixed, run on every node: "
            f"moe-ckpt memory retry {of}; to return to the checkpoint on storage: moe-ckpt memory clear {of}. Its "
            f"slots: {shown}"
        )
        self.directory = directory
        self.starts = starts
        self.slots = tuple(slots)
        self.run_id = run_id


class HostMemoryError(UserError, MemoryError):
    """A snapshot does not fit into the budget of host memory."""

    def __init__(
        self,
        needed_bytes: int,
        budget_bytes: int,
        what: str = "one snapshot",
        advice: str = "",
        rank: int | None = None,
    ) -> None:
        where = "this rank" if rank is None else f"rank {rank}"
        super().__init__(
            f"{what} needs {needed_bytes:,} bytes of host memory on {where}, but its budget is {budget_bytes:,} "
            f"bytes. {advice or f'Set host_memory_bytes to {needed_bytes} or more.'}"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class DeviceMemoryError(StoreError, MemoryError):
    """A device has no room for the state that a start restores. The checkpoint is as it was.

    Attributes:
        needed_bytes: Of the optimizer state that is still to be made on the device.
        free_bytes: Of the device.
    """

    def __init__(self, device: str, needed_bytes: int, free_bytes: int, own_bytes: int, total_bytes: int) -> None:
        super().__init__(
            f"{device} has {free_bytes:,} bytes free, but the optimizer state of the checkpoint needs "
            f"{needed_bytes:,} more there. Of its {total_bytes:,} bytes this process has {own_bytes:,}, and others, "
            f"with what CUDA itself takes, {max(0, total_bytes - free_bytes - own_bytes):,}. If another process uses "
            "the card (nvidia-smi lists them), end it, and start again: the checkpoint is as it was. Else let this "
            "card have less of the model"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


LARGER_FILE_SYSTEM = (
    "Make the file system larger (Docker: --shm-size; Kubernetes: an emptyDir of medium Memory with a sizeLimit), or "
    "set Memory(directory=...) to another one"
)
"""What to do where slots of host memory find no room."""


class MemoryGoneError(StoreError, FileNotFoundError):
    """Somebody deleted what a rank has in memory while it trains."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} is gone: something deleted it while this run trains. It is made again, and no start can return "
            "to what lay there. Where users log in to compute nodes, systemd-logind does that to /dev/shm when the "
            "last of a user's sessions ends: set RemoveIPC=no in /etc/systemd/logind.conf, or give "
            "Memory(directory=...) a tmpfs of its own"
        )
        self.path = path


class MemoryFullError(StoreError, OSError):
    """The file system of ``Memory(directory=...)`` has no room for a slot."""

    def __init__(self, directory: str, needed_bytes: int, free_bytes: int, advice: str = LARGER_FILE_SYSTEM) -> None:
        lacks = "" if free_bytes < needed_bytes else ", and it may have no file left (df -i)"
        super().__init__(
            f"{directory} has {free_bytes:,} bytes free, but a snapshot of this rank needs {needed_bytes:,} there"
            f"{lacks}. {advice}"
        )
        self.directory = directory
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
