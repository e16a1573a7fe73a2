"""Writes and reads Megatron's own checkpoint format (``torch_dist``) by Megatron's functions, in the running job.

It is for exchange with Megatron's training script, converters and inference. To resume a failed run, use
``MegatronCheckpoint.resume``, whose files hold no code.

The content is that of ``megatron.training``: ``model`` (``model0``, ... for chunks), ``optimizer``,
``opt_param_scheduler``, ``rng_state``, ``iteration``, ``checkpoint_version``, and in a job of its training script
``args``. Added are ``consumed_train_samples``, which Megatron keeps in ``args``, and the random numbers of each rank,
for a job of as many ranks; Megatron saves those of one data-parallel rank, unless there is expert parallelism.

Bugs of megatron-core 0.16.1 (``core/optimizer/distrib_optimizer.py``) are worked around. Saving: with several buckets,
all but the first get another parameter's state. Loading: torch's Adam and AdamW, but not FusedAdam, which counts steps
per group.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_ckpt.driver.host import Stateful
from moe_ckpt.errors import ConfigError, MissingPackageError, UnsupportedError
from moe_ckpt.megatron.compat import look_up, megatron_core
from moe_ckpt.megatron.host import Progress, capture_generators, restore_generators
from moe_ckpt.megatron.inventory import chunks_of, require_halves, unwrap_module
from moe_ckpt.megatron.optimizers import TORCH_ADAM, leaves, make_state, read_step, slots, write_step
from moe_ckpt.megatron.world import from_rank_zero, require_groups
from moe_ckpt.modeling.optimizer_state import STEP

log = logging.getLogger("moe_ckpt")

CHECKPOINT_VERSION = 3.0
"""Megatron's number for how attention's weights are ordered."""
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""Makes Megatron save optimizer state in tensors of the weights' shapes, which can be resharded."""
_OWN_RNG = "moe_ckpt_rng_state"
_MEGATRONS_NAMES = {
    "python": "random_rng_state",
    "numpy": "np_rng_state",
    "torch": "torch_rng_state",
    "cuda": "cuda_rng_state",
    "tracker": "rng_tracker_states",
}
"""Generator, as of ``capture_generators`` -> Megatron's key of its state."""


def export_torch_dist(
    path: str | os.PathLike[str],
    model_chunks: Sequence[nn.Module] | nn.Module,
    optimizer: Any = None,
    scheduler: Stateful | None = None,
    *,
    iteration: int = 0,
    consumed_samples: int = 0,
) -> None:
    """Writes the state of the job with Megatron's ``dist_checkpointing.save``. A collective, between iterations.

    Megatron loads it into the same model in any layout. Optimizer state it loads with other tensor, pipeline and data
    parallelism, but not between expert parallelism of 1 and more, nor with and without the distributed optimizer; use a
    checkpoint of this package for that. Wrong values that Megatron alone saves with several buckets are corrected
    (``buckets_in_place``).

    Megatron starts a process that imports the main script again: guard that with ``if __name__ == "__main__"``. The
    directory is closed to other users; its files follow the umask.

    Args:
        path: A directory, new or empty, on storage that all ranks see. For Megatron's training script name it
            ``<load>/iter_0000500``, and write ``500`` into ``<load>/latest_checkpointed_iteration.txt``.
        model_chunks: As of ``megatron.attach``.
        optimizer: None to write the weights alone.
        scheduler: As of ``megatron.attach``.
        iteration: Iterations done.
        consumed_samples: Samples consumed.

    Raises:
        MissingPackageError: psutil is missing, without which Megatron hangs.
        ConfigError: ``path`` is not empty, or cannot be made, or the optimizer has made no step.
        UnsupportedError: An unknown optimizer or version of Megatron-Core.
    """
    require_groups()
    if importlib.util.find_spec("psutil") is None:
        raise MissingPackageError("psutil", "moe_ckpt.megatron.export_torch_dist", "megatron")
    if optimizer is not None and read_step(optimizer) is None:
        raise ConfigError("the optimizer has made no step: export after the first one, or with optimizer=None")
    serialization = _serialization()
    chunks = chunks_of(model_chunks)
    require_halves(chunks)
    for chunk in chunks:  # the distributed optimizer would gather weights in the next forward pass
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            wrapped: Any = chunk
            wrapped.start_param_sync(force_sync=True)
    state = _model_state(chunks)
    if optimizer is not None:
        with buckets_in_place(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=dict(_METADATA))
    state |= {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        "consumed_train_samples": consumed_samples,
        **{cell.key: cell for cell in _filled_cells()},
    }
    if scheduler is not None:
        state["opt_param_scheduler"] = dict(scheduler.state_dict())
    # The command line of Megatron-LM's training script, if this is a job of it.
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is not None:
        state["args"] = argparse.Namespace(
            **{**vars(args), "iteration": iteration, "consumed_train_samples": consumed_samples}
        )
    _make_directory(os.fspath(path))
    serialization.save(state, os.fspath(path), content_metadata=dict(_METADATA))


def import_torch_dist(
    path: str | os.PathLike[str],
    model_chunks: Sequence[nn.Module] | nn.Module,
    optimizer: Any = None,
    scheduler: Stateful | None = None,
    *,
    weights_only: bool = False,
) -> Progress:
    """Loads a ``torch_dist`` checkpoint into live objects, with Megatron's loader, and returns its position.

    A collective, before training. Megatron's loader unpickles (``common.pt``, ``.metadata``), so the writer of those
    files can run code in this job: open only what you trust. Nothing in this package calls this function.

    On the same layout training resumes exactly. Megatron's loader alone does not achieve that with torch's AdamW under
    the distributed optimizer: it fails before the first step, gives all parameters one step count, which each of them
    then advances, and copies that count with the tensors. This function works around these.

    To start a checkpointed run from it, give it to ``resume``, which calls it if the run has no checkpoint::

        ckpt = megatron.attach(chunks, optimizer, scheduler, dirpath="checkpoints")
        progress = ckpt.resume(lambda: megatron.import_torch_dist(path, chunks, optimizer, scheduler))

    Args:
        path: A directory such as ``<load>/iter_0000500``, of ``export_torch_dist`` or of Megatron's training script.
        model_chunks: As of ``megatron.attach``.
        optimizer: None to leave it as it is.
        scheduler: None to leave it as it is.
        weights_only: Load no state of the two, and set the optimizer's master weights to the loaded weights.

    Raises:
        ConfigError: It is no such checkpoint, or its optimizer state is of another kind of layout. For other misfits
            (another model) Megatron raises ``CheckpointingException`` or ``RuntimeError``, when memory may be changed
            in part: do not train on then.
        UnsupportedError: An unknown optimizer or version of Megatron-Core.
    """
    require_groups()
    serialization = _serialization()
    path = os.fspath(path)
    if not os.path.isfile(os.path.join(path, "metadata.json")):
        raise ConfigError(f"{path} is no checkpoint of Megatron: it has no metadata.json. Give its iter_... directory")
    common = serialization.load_common_state_dict(path)
    chunks = chunks_of(model_chunks)
    metadata = serialization.load_content_metadata(preloaded_state_dict=common) or dict(_METADATA)
    with_optimizer = optimizer is not None and not weights_only
    if with_optimizer:
        _require_optimizer(path, common, optimizer)
    if scheduler is not None and not weights_only and "opt_param_scheduler" not in common:
        raise ConfigError(f"{path} holds no scheduler: give scheduler=None, and set the schedule yourself")
    state = _model_state(chunks, metadata)
    if with_optimizer:
        make_loadable(optimizer)
        with buckets_in_place(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=True, metadata=dict(metadata))
    generators = None
    if not weights_only:
        stored = serialization.load_sharded_metadata(path)
        generators = next((cell for cell in _cells() if cell.unique_key in stored), None)
        if generators is None:
            log.warning("the checkpoint has no random number generators for this layout: they are not changed")
        else:
            state[generators.key] = generators
    loaded = serialization.load(state, path)
    for name, chunk in _named(chunks):
        chunk.load_state_dict(loaded[name])
    if with_optimizer:
        load_optimizer(optimizer, loaded["optimizer"])
    elif optimizer is not None:
        optimizer.reload_model_params()
    if scheduler is not None and not weights_only:
        scheduler.load_state_dict(common["opt_param_scheduler"])
    if generators is not None:
        _restore(generators.key, loaded[generators.key])
    samples = common.get("consumed_train_samples", getattr(common.get("args"), "consumed_train_samples", 0))
    return Progress() if weights_only else Progress(int(common.get("iteration", 0)), int(samples), restored=True)


def _serialization() -> Any:
    """Returns the module with ``save`` and ``load``."""
    module = "megatron.core.dist_checkpointing.serialization"
    for name in ("save", "load", "load_common_state_dict", "load_content_metadata", "load_sharded_metadata"):
        look_up(module, name)
    return importlib.import_module(module)


def _named(chunks: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    """Returns chunks under Megatron's names."""
    inner = [unwrap_module(chunk) for chunk in chunks]
    return [("model", inner[0])] if len(inner) == 1 else [(f"model{at}", chunk) for at, chunk in enumerate(inner)]


def _model_state(chunks: Sequence[nn.Module], metadata: Mapping[str, Any] = _METADATA) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict(metadata=dict(metadata)) for name, chunk in _named(chunks)}


def _make_directory(path: str) -> None:
    """Makes the directory on rank 0; raises on all ranks if it cannot, or if it is not empty."""

    def problem() -> str:
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            return "is not empty: Megatron would overwrite its files. Give a new directory" if os.listdir(path) else ""
        except OSError as error:
            return f"cannot be made: {error.strerror}. Give another directory"

    if why := from_rank_zero(problem, f"make {path}"):
        raise ConfigError(f"{path} {why}")


def _require_optimizer(path: str, common: Mapping[str, Any], optimizer: Any) -> None:
    """Raises ``ConfigError`` where Megatron's loader would fail half-way: another number or kind of optimizers."""
    if "optimizer" not in common:
        raise ConfigError(f"{path} holds no optimizer: set weights_only=True to start from its weights")
    stored = common["optimizer"]
    stored_optimizers = list(stored.values()) if all(isinstance(key, int) for key in stored) else [stored]
    here = getattr(optimizer, "chained_optimizers", [optimizer])
    advice = "Do the same, or set weights_only=True, or use a checkpoint of moe_ckpt, which opens on any layout"
    if len(here) != len(stored_optimizers):
        raise ConfigError(
            f"{path} holds {len(stored_optimizers)} optimizers, and this run has {len(here)}: Megatron keeps one for "
            f"experts and one for the rest with expert parallelism above 1, and cannot load one from the other. "
            f"{advice}"
        )
    saved = any(SHARDING in entry for entry in stored_optimizers)
    used = any(type(member) is megatron_core().distributed_optimizer for member in here)
    if saved != used:
        raise ConfigError(
            f"{path} was saved with{'' if saved else 'out'} the distributed optimizer, and this run is with"
            f"{'' if used else 'out'} it: Megatron cannot load one from the other. {advice}"
        )


def _cells() -> list[Any]:
    """Returns empty ``ShardedObject`` s, each a cell of a grid for the random numbers of this rank.

    The first is ours, the second Megatron's, the third that of its newer versions under expert parallelism.
    """
    cell = look_up("megatron.core.dist_checkpointing.mapping", "ShardedObject")
    state = megatron_core().parallel_state
    data = state.get_data_parallel_group(with_context_parallel=True)
    groups = state.get_pipeline_model_parallel_group(), state.get_tensor_model_parallel_group(), data
    offset, shape = tuple(group.rank() for group in groups), tuple(group.size() for group in groups)
    return [
        cell(_OWN_RNG, None, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0),
        cell("rng_state", None, shape[:2], offset[:2], replica_id=offset[2]),
        cell("rng_state", None, shape, offset, replica_id=0),
    ]


def _filled_cells() -> tuple[Any, Any]:
    """Returns our cell and Megatron's, with the states of the random number generators."""
    ours, *others = _cells()
    megatrons = others[megatron_core().parallel_state.get_expert_model_parallel_world_size() > 1]
    ours.data = capture_generators()
    states = ours.data | {"cuda": torch.cuda.get_rng_state()}  # Megatron wants one on a CPU, too
    megatrons.data = [{theirs: states[name] for name, theirs in _MEGATRONS_NAMES.items()}]
    return ours, megatrons


def _restore(key: str, stored: Any) -> None:
    if key != _OWN_RNG:
        state = stored[megatron_core().parallel_state.get_data_parallel_rank() if len(stored) > 1 else 0]
        stored = {name: state[theirs] for name, theirs in _MEGATRONS_NAMES.items()}
    restore_generators(stored)


SHARDING = "param_state_sharding_type"
"""Megatron's key for the form of a saved distributed optimizer; other optimizers lack it."""
_LOADERS = {
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
    "dp_reshardable": "load_parameter_state_from_dp_reshardable",
}


@contextmanager
def buckets_in_place(optimizer: Any) -> Iterator[None]:
    """Corrects offsets of parameters while Megatron describes the state as ``fully_reshardable``.

    Megatron gathers a buffer without the padding at the ends of buckets (``get_parameter_state_dp_zero``), but slices
    it at offsets with padding (``sharded_param_state_fully_reshardable``). After a padded bucket, such as that of a
    shared embedding, it would save shifted values, and notice only for the last parameter. So the padding is added in
    between.
    """
    distributed: list[Any] = [leaf for leaf in leaves(optimizer) if type(leaf) is megatron_core().distributed_optimizer]
    for leaf in distributed:
        leaf.get_parameter_state_dp_zero = partial(_gathered_with_padding, leaf, leaf.get_parameter_state_dp_zero)
    try:
        yield
    finally:
        for leaf in distributed:
            del leaf.get_parameter_state_dp_zero  # the method of the class is seen again


def _gathered_with_padding(leaf: Any, gather: Callable[..., Any], *args: Any, **options: Any) -> Any:
    gathered = gather(*args, **options)
    if gathered is not None:
        for number, buffer in enumerate(leaf.buffers):
            for tensors in gathered[number].values():
                flat = {key: value for key, value in tensors.items() if isinstance(value, torch.Tensor)}
                tensors.update({key: _with_padding(value, buffer) for key, value in flat.items()})
    return gathered


def _with_padding(flat: torch.Tensor, buffer: Any) -> torch.Tensor:
    padded = flat.new_zeros(buffer.numel)
    at = 0
    for bucket in buffer.buckets:
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[at : at + bucket.numel_unpadded]
        at += bucket.numel_unpadded
    return padded


def make_loadable(optimizer: Any) -> None:
    """Makes the state that a distributed optimizer needs to be loaded (``state_dict``, :642), if it never stepped.

    Raises:
        UnsupportedError: It is not Adam, the only one whose state Megatron's format has.
    """
    distributed = megatron_core().distributed_optimizer
    for slot in slots(optimizer).values():
        inner = slot.leaf.optimizer
        if type(slot.leaf) is not distributed or slot.updated is None:
            continue
        if isinstance(inner, torch.optim.SGD):
            raise UnsupportedError("Megatron's format has no state of SGD under the distributed optimizer. Use Adam.")
        if isinstance(inner, TORCH_ADAM) and not slot.state:
            make_state(slot, dict.fromkeys(("exp_avg", "exp_avg_sq"), "F32"))


def load_optimizer(optimizer: Any, loaded: Any) -> None:
    """Loads the state of Megatron's optimizers, and gives each parameter a step count of its own."""
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [loaded] if len(optimizers) == 1 else [state for _, state in sorted(loaded.items())]
    steps = {step for state in states if (step := _step_in(state)) is not None}
    if len(steps) > 1:
        raise ConfigError(f"the optimizers in the checkpoint have made {sorted(steps)} steps; Megatron counts one")
    for leaf, state in zip(optimizers, states, strict=True):
        if getattr(leaf, "is_stub_optimizer", False):
            continue
        if type(leaf) is megatron_core().distributed_optimizer:
            _load_distributed(leaf, dict(state))
        else:
            leaf.load_state_dict(state)
    for leaf in leaves(optimizer):
        if isinstance(leaf.optimizer, TORCH_ADAM):
            for group in leaf.optimizer.param_groups:
                group.pop(STEP, None)  # nothing advances this count
    write_step(optimizer, next(iter(steps), None))


def _step_in(state: Mapping[str, Any]) -> int | None:
    """Returns the step count in Megatron's state of one optimizer: FP32, with masters, or distributed."""
    inner = state.get("optimizer", state)
    count = inner.get("state", {}).get("common_step")
    if count is None:
        count = next((group[STEP] for group in inner["param_groups"] if STEP in group), None)
    return None if count is None else int(count)


def _load_distributed(leaf: Any, state: dict[str, Any]) -> None:
    """Loads hyperparameters, then tensors, without step counts: :936-940 would expect them among the tensors."""
    tensors, kind = state.pop("param_state", None), state.pop(SHARDING, None)
    if kind not in _LOADERS:
        raise UnsupportedError(
            f"the checkpoint has the distributed optimizer's state in the form {kind!r}, which is not supported. "
            f"Supported are {', '.join(_LOADERS)}: save it again with Megatron, or import with weights_only=True."
        )
    leaf.load_state_dict(state)
    # Now all parameters share one step count (:785-789), which each would advance. ``write_step`` gives each its own.
    inner = leaf.optimizer.state
    steps = {parameter: state.pop(STEP) for parameter, state in inner.items() if STEP in state}
    getattr(leaf, _LOADERS[kind])(tensors)
    for parameter, step in steps.items():
        inner[parameter][STEP] = step
