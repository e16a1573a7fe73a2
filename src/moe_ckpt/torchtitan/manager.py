"""The checkpoint manager that torchtitan's ``Trainer`` calls, built on the adapter of PyTorch loops."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, TRAIN_STATE, BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools import filesystem

from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.memory.options import Memory
from moe_ckpt.modeling.blocks import is_dtensor
from moe_ckpt.plain.checkpoint import PlainCheckpoint
from moe_ckpt.policies.base import Policy
from moe_ckpt.run.options import Options, OptionValues, make_options

_INITIAL = "set weights_from= to a store or to safetensors with this model's names"
_LAST = "the last step is saved whole; `moe-ckpt export` writes its weights as safetensors"
_INSTEAD = {
    "initial_load_path": _INITIAL,
    "initial_load_model_only": _INITIAL,
    "initial_load_in_hf": _INITIAL,
    "initial_load_in_hf_quantized": _INITIAL,
    "last_save_model_only": _LAST,
    "last_save_in_hf": _LAST,
    "export_dtype": _LAST,
    "keep_latest_k": "set retention=RetentionPolicy(keep_last=...)",
    "load_step": "a run resumes from its newest checkpoint; a new one starts from an older step with weights_from=",
    "exclude_from_loading": "a run resumes with all of its state; a new one takes weights alone, with weights_from=",
    "enable_first_step_checkpoint": "the policy decides which steps are saved",
    "create_seed_checkpoint": "a new run begins as torchtitan initializes it, on any number of ranks",
    "load_only": "set policy=Dense(every_n_steps=...) to a number of steps that the run does not reach",
}
"""Fields of torchtitan's own managers that have no effect here -> what to do instead."""
_THEIRS = re.compile(r"step-\d+")


class LoaderPosition:
    """The position of a loader as plain data: torchtitan's own is a pickle, which no checkpoint may hold.

    Args:
        loader: Its data set's state must be plain data, tensors or arrays.

    Attributes:
        loader: As given.
    """

    def __init__(self, loader: ParallelAwareDataloader) -> None:
        self.loader = loader
        if loader.num_workers and hasattr(loader.dataset, "state_dict"):
            loader.dataset.state_dict = partial(_copied_state, loader.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and the number of ranks that the data is divided over."""
        return {"ranks": self.loader.dp_world_size, "loader": StatefulDataLoader.state_dict(self.loader)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of ``state_dict``.

        Raises:
            ConfigError: The data is divided over another number of ranks.
        """
        ranks = self.loader.dp_world_size
        if state["ranks"] != ranks:
            raise ConfigError(
                f"the checkpoint's run divided its data by {state['ranks']}, and this one by {ranks}: positions in the "
                "data cannot be carried over. Use as many ranks for data parallelism, or start a new run with "
                "weights_from="
            )
        StatefulDataLoader.load_state_dict(self.loader, state["loader"])


def _copied_state(data: Any) -> Any:
    """Returns a data set's state that stays as it is: a worker compares it with the next one, and sends it later.

    torchtitan's data sets return lists that they change.
    """
    return deepcopy(type(data).state_dict(data))


class CheckpointManager(BaseCheckpointManager):
    """Checkpoints a torchtitan ``Trainer``, and resumes it from the newest checkpoint when it is started again.

    Args:
        config: The line in the config of the ``Trainer``, which gives the rest.

    Attributes:
        checkpoint: The checkpoints of this run; None with ``enable=False``.

    Raises:
        ConfigError: Options contradict each other.
        UnsupportedError: The model is divided into pipeline stages, or over a part of the ranks.
    """

    @named_arguments
    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The line in the config of a ``Trainer``: ``checkpoint=CheckpointManager.Config(policy=...)``.

        Attributes:
            enable: False: no checkpoints.
            folder: The store: a directory in ``dump_folder``, another one that all ranks see, or an fsspec URL.
            interval: Steps between reports of their position by workers of the data loader. A restart loads the batches
                since the last report again. The policy decides which steps are saved.
            policy: Decides what is saved at which step. None: ``CheckFreq()``.
            resume, save_last, retention, host_memory_bytes, budget_fraction, memory, when_busy, timeout_secs, profile,
                weights_from, state_from, on_read_error, access, checksum_threads: See ``moe_ckpt.run.options.Options``.
        """

        enable: bool = True
        interval: int = 1
        policy: Annotated[Policy | None, tyro.conf.Suppress] = None
        resume: str = "auto"
        save_last: bool = True
        retention: Annotated[RetentionPolicy | None, tyro.conf.Suppress] = None
        host_memory_bytes: int | str | None = None
        budget_fraction: float = 1.0
        memory: Annotated[Memory | None, tyro.conf.Suppress] = None
        when_busy: str = "skip"
        timeout_secs: float | str = 600.0
        profile: str | None = None
        weights_from: str | None = None
        state_from: str | None = None
        on_read_error: str = "stop"
        access: str = "private"
        checksum_threads: int | None = None

        def __post_init__(self) -> None:
            for field in fields(BaseCheckpointManager.Config):
                default = field.default if field.default_factory is MISSING else field.default_factory()
                if field.name in _INSTEAD and getattr(self, field.name) != default:
                    raise ConfigError(
                        f"CheckpointManager.Config({field.name}={getattr(self, field.name)!r}): has no effect here; "
                        f"{_INSTEAD[field.name]}"
                    )
            if self.interval < 1:
                raise ConfigError(f"CheckpointManager.Config(interval={self.interval}): must be 1 or more")
            self.options("")

        def options(self, base_folder: str) -> Options:
            """Returns the checked options of a run whose ``dump_folder`` is ``base_folder``."""
            values = OptionValues(**{name: getattr(self, name) for name in OptionValues.__annotations__})  # type: ignore[typeddict-item]
            return make_options(
                "CheckpointManager.Config", self.policy, filesystem.join(base_folder, self.folder), values
            )

        def to_dict(self) -> dict[str, Any]:
            """Returns the fields for a printed config, which torchtitan writes as JSON too."""
            plain = (str, int, float, list, type(None))
            values = {field.name: getattr(self, field.name) for field in fields(self)}
            return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Sequence[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable, self.save_future = config.enable, None
        self.checkpoint: PlainCheckpoint | None = None
        if not config.enable:
            return
        self._trainer: Any = states.get(TRAIN_STATE)
        self._loader = dataloader
        _require_supported(model_parts, self._trainer)
        stateful = {**states, LR_SCHEDULER: lr_schedulers}
        if dataloader is not None:
            if not (hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")):
                raise ConfigError(
                    f"CheckpointManager: the data loader {type(dataloader).__name__} lacks state_dict or "
                    "load_state_dict, so its position cannot be restored. Give it both, or use torchtitan's "
                    "ParallelAwareDataloader"
                )
            is_pickled = isinstance(dataloader, ParallelAwareDataloader)
            stateful[DATALOADER] = LoaderPosition(dataloader) if is_pickled else dataloader
        options = config.options(base_folder)
        _require_own_folder(options.dirpath)
        self.checkpoint = PlainCheckpoint(options, model_parts[0], list(optimizers), stateful)
        self._is_loaded, self._step = False, 0
        self._validated: Callable[[], None] | None = None

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise ConfigError(f"CheckpointManager.load(step={step}): {_INSTEAD['load_step']}")
        checkpoint, trainer = self._open(), self._trainer
        position = checkpoint.resume()
        self._is_loaded, self._step = True, position.step
        if position.step and not position.restored:  # by another host
            trainer.step = position.step
            if isinstance(self._loader, ParallelAwareDataloader):
                checkpoint.iterate_quietly(self._loader)
        if hasattr(trainer, "validator"):
            trainer.validator.validate = self._before_counting(trainer.validator.validate)
        return position.restored

    def _open(self) -> PlainCheckpoint:
        if self.checkpoint is None:
            raise ConfigError("CheckpointManager: enable=False, so there are no checkpoints")
        return self.checkpoint

    def _before_counting(self, validate: Callable[..., None]) -> Callable[..., None]:
        """Returns ``validate``, after which a waiting step is counted: validation draws random numbers of the run."""

        def validated(*args: Any, **kwargs: Any) -> None:
            validate(*args, **kwargs)
            if self._validated is not None:
                count, self._validated = self._validated, None
                count()

        return validated

    def _maybe_wait_for_staging(self) -> None:
        self._open().before_step()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        validator = getattr(self._trainer, "validator", None)

        def count() -> None:
            self._open().after_step(curr_step)
            self._step = curr_step
            if last_step:
                self._open().finish()

        if validator is not None and validator.should_validate(curr_step):
            self._validated = count
        else:
            count()
        return True

    def _wait_for_saving(self) -> None:
        return

    def _close(self) -> None:
        """Ends the run, or closes it after a failure: torchtitan calls this while it handles the error."""
        checkpoint, error = self._open(), sys.exc_info()[1]
        if error is None and not self._is_loaded:
            checkpoint.close()
            return
        if error is None and self._trainer is not None:
            self._trainer.step = self._step  # it counts a step that it cancels, when data runs out
        checkpoint.__exit__(None if error is None else type(error), error, None)


def _require_own_folder(path: str) -> None:
    """Raises if torchtitan's own manager has saved this run, since it would start from scratch."""
    theirs = [name for name in filesystem.listdir(path) if _THEIRS.fullmatch(name)] if filesystem.isdir(path) else []
    if theirs:
        raise ConfigError(
            f"CheckpointManager.Config(folder=...): {path} holds checkpoints of torchtitan's own manager, such as "
            f"{theirs[0]}, which cannot be resumed from here. Choose another folder for a new run"
        )


def _require_supported(model_parts: Sequence[nn.Module], trainer: Any) -> None:
    """Raises unless each rank holds all of the model, or a part of each tensor, and runs its layers step by step."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    config = getattr(trainer, "config", None)
    if ranks > 1 and config is not None and config.parallelism.spmd_backend == "spmd_types":
        raise UnsupportedError(
            "CheckpointManager: parallelism.spmd_backend='spmd_types', torchtitan's default, keeps tensors of which it "
            f"is unknown what part each of the {ranks} ranks holds. Set 'partial_dtensor' or 'full_dtensor'"
        )
    if config is not None and torch.cuda.is_available() and not config.training.disable_cuda_graphs:
        raise UnsupportedError(
            "CheckpointManager: training.disable_cuda_graphs=False, torchtitan's default. A graph that is replayed "
            "calls no hook of a router, so tokens would not be counted. Set training.disable_cuda_graphs=True"
        )
    if len(model_parts) != 1 or getattr(getattr(trainer, "parallel_dims", None), "pp_enabled", False):
        raise UnsupportedError(
            "CheckpointManager: the model is divided into pipeline stages, of which each rank holds only some. Set "
            "parallelism.pipeline_parallel_degree=1, or use torchtitan's own CheckpointManager for this run"
        )
    for name, parameter in model_parts[0].named_parameters():
        if is_dtensor(parameter) and parameter.device_mesh.size() != ranks:
            raise UnsupportedError(
                f"CheckpointManager: parameter {name!r} lies on {parameter.device_mesh}, which is not all of the "
                f"{ranks} ranks, so it is unknown what the others hold. Set "
                "parallelism.spmd_backend='partial_dtensor'"
            )
