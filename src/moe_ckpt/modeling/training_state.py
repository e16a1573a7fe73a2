"""The training state of a torch model and its optimizers, as live tensors and plain data.

Optimizer state is discovered, not assumed. ``tensors()`` returns the tensors, ``plain()`` everything else. Both go by
names of parameters, so the order of parameters in an optimizer does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.format import contents
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.format.shard import dtype_name
from moe_ckpt.modeling import module_state
from moe_ckpt.modeling.blocks import block_of, is_dtensor, is_sharded, reshard
from moe_ckpt.modeling.module_state import Frozen, freeze
from moe_ckpt.modeling.optimizer_state import (
    ELEMENTWISE,
    OptimizerView,
    add_groups,
    advance_counts,
    check_groups,
    class_name,
    find_unsliced,
    is_sliced,
    make_tensor,
    read_unsliced,
    replaced_state,
    require_same_class,
    write_groups,
    write_state,
    write_zeros,
)
from moe_ckpt.modeling.watching import TensorAddresses, Walk
from moe_ckpt.ports import Reading, StateTensor, TensorMeta, TensorSpec
from moe_ckpt.reading.index import split_key

_SHARDING_OPTIMIZERS = frozenset({"ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer", "FullyShardedDataParallel"})


class TorchTrainingState:
    """``ports.TrainingState`` for plain tensors and DTensors (FSDP2, tensor parallelism).

    Args:
        model: Names of tensors are those of this module's ``named_parameters()``.
        optimizers: Torch optimizers, without wrappers; their position is part of every key.

    Raises:
        UnsupportedError: an optimizer holds a parameter that is not the model's, or shards its own state; or a tensor
            has a type that cannot be stored.
    """

    buffers = ()  # all ranks hold the same

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._groups_at_first = [len(optimizer.param_groups) for optimizer in self._optimizers]
        self._frozen = Frozen()
        self._mixed: set[str] = set()
        self._pretrained = module_state.pretrained_models(model)
        self._sharded_modules = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
        self._walk: Walk | None = None
        self._optimizer_views: tuple[OptimizerView, ...] = ()
        self._tensors: tuple[StateTensor, ...] = ()
        self._listed_of: tuple[Walk, tuple[OptimizerView, ...]] | None = None
        self._memory: TensorAddresses | None = None
        self._prepared = True
        self._specs: tuple[TensorSpec, ...] = ()
        self._specs_of: tuple[StateTensor, ...] = ()
        walk, views = self._refresh()
        buffers = module_state.buffers(model)
        self._varying = module_state.Varying(buffers)
        for kind, tensors in (("parameter", walk.parameters), ("buffer", buffers)):
            for name, tensor in tensors.items():
                dtype_name(tensor.dtype, f"{kind} {name!r}")
        for index, optimizer in enumerate(self._optimizers):
            if type(optimizer).__name__ in _SHARDING_OPTIMIZERS:
                raise UnsupportedError(
                    f"optimizer {index} is a {type(optimizer).__name__}, which shards its state over ranks "
                    "independently of the parameters. Use FSDP2 (ModelParallelStrategy), or another optimizer under "
                    "DDP."
                )
            if type(optimizer) not in ELEMENTWISE:
                self._mixed.update(views[index].parameters)

    def tensors(self, of: Reading | None = None, *, listed: bool = False) -> tuple[StateTensor, ...]:
        """Returns all parameters, then the optimizer state that exists now. Views only; no waiting for the device."""
        walk, views = self._refresh(unchanged=listed)
        memory = self._memory if self._listed_of == (walk, views) else None  # both go by identity
        if memory is None or not memory.same(of):
            self._list(walk, views)
        self._prepared = False
        return self._tensors

    def frozen(self) -> FixedStrings:
        """Returns the names of the parameters that require no gradient now, of those at the last call of any method.

        The very same object for as long as the names are the same.
        """
        return self._frozen.names((self._walk or self._walked()).parameters)

    def specs(self) -> tuple[TensorSpec, ...]:
        """See ``ports.TrainingState``. They are equal on all ranks, since each holds all or a part of every tensor."""
        tensors = self.tensors() if self._prepared else self._tensors
        if tensors is not self._specs_of:
            updated = frozenset(chain.from_iterable(view.parameters for view in self._optimizer_views))
            specs = tuple(_spec_of(tensor, updated) for tensor in tensors)
            self._specs = self._specs if specs == self._specs else specs
            self._specs_of = tensors
        return self._specs

    def plain(self, *, described: bool = False) -> dict[str, Any]:
        """Returns buffers, hyperparameters, scalar optimizer state, extra state. Its tensors are live: copy at once."""
        walk, views = self._refresh(unchanged=described)
        optimizers = []
        for index, (optimizer, view) in enumerate(zip(self._optimizers, views, strict=True)):
            scalars = {
                name: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
                for name, state in view.scalars
            }
            groups = [
                {**group, "params": names} for group, names in zip(optimizer.param_groups, view.groups, strict=True)
            ]
            entry = {"class": class_name(optimizer), "param_groups": groups, "scalars": scalars}
            more = {"unsliced": read_unsliced(index, view.unsliced), "zeroed": view.zeroed()}
            optimizers.append(entry | {name: value for name, value in more.items() if value})
        pretrained_models = {"pretrained": self._pretrained} if self._pretrained else {}
        frozen = {"frozen": self._frozen.names(walk.parameters)}
        module = module_state.read(walk, self._varying)
        empty = {name: contents.describe_tensor(p, f"parameter {name!r}") for name, p in walk.unsliced if not p.numel()}
        unsliced = {"unsliced": empty} if empty else {}
        return {**module, "optimizers": optimizers, **frozen, **pretrained_models, **unsliced}

    def add_stored_groups(self, plain: Mapping[str, Any], began: Sequence[int]) -> None:
        """Adds to the optimizers the param groups that training had added when ``plain`` was taken. Before a restore.

        Args:
            plain: Result of ``plain()`` in the checkpoint.
            began: How many groups each optimizer of that run had at first. An optimizer that the script now gives
                another number of groups is left as it is.
        """
        walk = self._walked()
        for index, entry in enumerate(plain.get("optimizers", ())):
            if index < len(self._optimizers) and began[index : index + 1] == self._groups_at_first[index : index + 1]:
                optimizer, at_first = self._optimizers[index], self._groups_at_first[index]
                add_groups(optimizer, at_first, walk.names, walk.parameters, entry["param_groups"])

    def prepare(self, stored: Mapping[str, TensorMeta]) -> None:
        """Makes the optimizers hold exactly the state tensors that ``stored`` names; new ones are zero.

        Keys that do not start with ``optim/`` are ignored, and those of parameters that no optimizer here has:
        ``require_loadable`` refuses them. State that stays keeps its memory. Unsliced state stays: ``load_plain``
        restores it, and in a replay it is there already.

        Raises:
            UnsupportedError: State of a sharded parameter has another shape than the parameter.
        """
        _, views = self._refresh()
        self._prepared = True
        by_parameter = self._by_parameter(stored, views)
        for index, optimizer in enumerate(self._optimizers):
            for name, parameter in views[index].parameters.items():
                metas = by_parameter[index, name]
                with replaced_state(optimizer, parameter, metas, partial(is_sliced, parameter)):
                    for key, meta in metas.items():
                        make_tensor(optimizer, parameter, key, meta)

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Restores what ``plain()`` returned. Everything is checked before anything is changed.

        Raises:
            ConfigError: As ``require_loadable``.
        """
        self.require_loadable(plain)
        module_state.write(self._model, self._varying, plain)
        _, views = self._refresh()
        self.freeze(plain["frozen"])
        for optimizer, view, entry in zip(self._optimizers, views, plain["optimizers"], strict=True):
            write_groups(optimizer, entry["param_groups"])
            for name, parameter in view.parameters.items():
                unsliced = entry.get("unsliced", {}).get(name, {})
                write_state(optimizer, parameter, entry["scalars"].get(name, {}), unsliced)
            write_zeros(view.parameters[name] for name in entry.get("zeroed", ()) if name in view.parameters)

    def advance_counts(self, missed: Mapping[str, int]) -> None:
        """See ``optimizer_state.advance_counts``."""
        for optimizer, view in zip(self._optimizers, self._refresh()[1], strict=True):
            advance_counts(optimizer, view.parameters, missed)

    def freeze(self, names: Collection[str]) -> None:
        """Makes exactly the parameters of these names, "frozen" in the result of ``plain()``, require no gradient."""
        freeze(self._walked().parameters, names)

    def require_loadable(self, plain: Mapping[str, Any]) -> None:
        """See ``ports.TrainingState``.

        Raises:
            ConfigError: An optimizer is of another class; or buffers, optimizers, groups or their parameters are not
                the stored ones.
        """
        walk, views = self._refresh()
        stored = plain.get("optimizers")
        if stored is None:
            raise ConfigError(
                "the checkpoint was not written by this kind of trainer: its optimizer state cannot be used here. Set "
                "another dirpath, and weights_from= the checkpoint to train from its weights"
            )
        if len(stored) != len(self._optimizers):
            raise ConfigError(
                f"the checkpoint holds {len(stored)} optimizers, this run has {len(self._optimizers)}; "
                "train with the same ones (under Lightning, of configure_optimizers())"
            )
        module_state.check(walk, self._varying, plain)
        for index, (optimizer, entry) in enumerate(zip(self._optimizers, stored, strict=True)):
            require_same_class(f"optimizer {index}", optimizer, entry["class"])
            check_groups(index, optimizer, views[index].groups, entry["param_groups"])

    def _refresh(self, *, unchanged: bool = False) -> tuple[Walk, tuple[OptimizerView, ...]]:
        """Returns what model and optimizers consist of now; the very same objects as long as nothing has changed.

        After a forward pass without a backward pass (validation, a peer that died), FSDP2 leaves whole tensors in
        place of some sharded parameters. The optimizers do not hold these, so the sharded ones are put back first; the
        next forward pass gathers again.

        Args:
            unchanged: Do not look for changes since the last call.
        """
        if unchanged and self._walk is not None:
            return self._walk, self._optimizer_views
        walk = self._walked()
        if walk is not self._walk or not all(view.is_current() for view in self._optimizer_views):
            self._optimizer_views = tuple(
                OptimizerView(at, optimizer, walk.names) for at, optimizer in enumerate(self._optimizers)
            )
            self._walk = walk
        return walk, self._optimizer_views

    def _walked(self) -> Walk:
        walk = self._walk
        if walk is not None and walk.is_current():
            return walk
        for module in self._sharded_modules:
            reshard(module)
        if walk is not None and self._sharded_modules and walk.is_current():
            return walk
        return Walk(self._model)

    def _list(self, walk: Walk, views: tuple[OptimizerView, ...]) -> None:
        """Describes the tensors that there are now."""
        named: list[tuple[str, torch.Tensor]] = list(walk.parameters.items())
        tensors = [self._describe(f"model/{name}", name, p, p) for name, p in walk.parameters.items() if p.numel()]
        for index, view in enumerate(views):
            for name, parameter, state in view.states:
                held = [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]
                named += [(name, value) for _, value in held]
                tensors += [
                    self._describe(f"optim/{index}/{name}/{key}", name, parameter, value)
                    for key, value in held
                    if is_sliced(parameter, value)
                ]
            view.unsliced = find_unsliced(view.states)
        self._tensors = tuple(tensors)
        self._memory = TensorAddresses(named, self._tensors)
        self._listed_of = walk, views

    def _describe(self, key: str, name: str, parameter: torch.Tensor, value: torch.Tensor) -> StateTensor:
        block = block_of(value, key)
        if is_sharded(parameter) and block.global_shape and block.global_shape != tuple(parameter.shape):
            raise UnsupportedError(_factored(key, block.global_shape, parameter))
        if is_sharded(parameter) and block.global_shape and not is_dtensor(value):
            raise UnsupportedError(
                f"{key} is not a DTensor, but its parameter is, so it is not known which part of it this is"
            )
        return StateTensor(
            key,
            name,
            **vars(block),
            on_param_device=block.local.device == parameter.device,
            mixes_rows=value is parameter and name in self._mixed,
        )

    def _by_parameter(
        self, stored: Mapping[str, TensorMeta], views: Sequence[OptimizerView]
    ) -> dict[tuple[int, str], dict[str, TensorMeta]]:
        """Returns the stored tensors of optimizers by (optimizer, parameter). Raises as ``prepare``."""
        by_parameter: dict[tuple[int, str], dict[str, TensorMeta]] = {
            (index, name): {} for index, view in enumerate(views) for name in view.parameters
        }
        for key, meta in stored.items():
            if not key.startswith("optim/"):
                continue
            at = split_key(key)
            index, name = at.optimizer or 0, at.fqn
            if (index, name) not in by_parameter:
                continue
            parameter = views[index].parameters[name]
            if is_sharded(parameter) and meta.global_shape not in ((), tuple(parameter.shape)):
                raise UnsupportedError(_factored(key, meta.global_shape, parameter))
            by_parameter[index, name][at.state or ""] = meta
        return by_parameter


def _spec_of(tensor: StateTensor, updated: Collection[str] = ()) -> TensorSpec:
    """Returns the spec of a tensor. ``updated``: parameters that optimizers have; gradients are of the same type."""
    dtype = dtype_name(tensor.local.dtype, tensor.key)
    gradient = dtype if tensor.parameter in updated and tensor.key.startswith("model/") else None
    return TensorSpec(tensor.key, tensor.parameter, dtype, tensor.global_shape, tensor.mixes_rows, gradient)


def specs_of(tensors: Iterable[StateTensor]) -> tuple[TensorSpec, ...]:
    """Returns ``TrainingState.specs`` where every rank holds all or a part of each tensor. They name no gradients."""
    return tuple(map(_spec_of, tensors))


def _factored(key: str, shape: tuple[int, ...], parameter: torch.Tensor) -> str:
    return (
        f"{key} has shape {shape}, but its parameter is a sharded {tuple(parameter.shape)}: state in another shape "
        "(factored, as Adafactor's) cannot be stored for sharded parameters. Use an optimizer whose state has the "
        "parameter's shape, or train under DDP."
    )
