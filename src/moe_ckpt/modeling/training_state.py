"""The training state of a torch model and its optimizers, as live tensors and plain data.

Optimizer state is discovered, not assumed. Tensors become ``StateTensor`` s, everything else goes through
``plain()``. Matching is by parameter name, so the order of parameters in an optimizer does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.format import contents
from moe_ckpt.format.shard import dtype_name
from moe_ckpt.modeling import module_state, pretrained
from moe_ckpt.modeling.blocks import block_of, fsdp_modules, is_dtensor, is_sharded, reshard
from moe_ckpt.modeling.module_state import Frozen, freeze
from moe_ckpt.modeling.optimizer_state import (
    ELEMENTWISE,
    OptimizerView,
    add_groups,
    advance_counts,
    check_groups,
    class_name,
    find_unsliced,
    is_unsliced,
    make_tensor,
    read_groups,
    read_unsliced,
    require_same_class,
    scalars_of,
    write_groups,
    write_unsliced,
)
from moe_ckpt.modeling.watching import TensorAddresses, Walk, places_among
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

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._groups_at_first = [len(optimizer.param_groups) for optimizer in self._optimizers]
        self._frozen = Frozen()
        self._mixed: set[str] = set()
        self._varying = module_state.Varying(model)
        self._pretrained = pretrained.read(model)
        self._sharded_modules = tuple(fsdp_modules(model))
        self._walk: Walk | None = None
        self._optimizer_views: tuple[OptimizerView, ...] = ()
        self._tensors: tuple[StateTensor, ...] = ()
        self._listed_of: tuple[Walk, tuple[OptimizerView, ...]] | None = None
        self._memory: TensorAddresses | None = None
        self._prepared = True
        self._specs: tuple[TensorSpec, ...] = ()
        self._specs_of: tuple[StateTensor, ...] = ()
        walk, views = self._refresh()
        for kind, tensors in (("parameter", walk.parameters), ("buffer", module_state.buffers(model))):
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
        current = self._walk if listed else None
        walk, views = self._refresh() if current is None else (current, self._optimizer_views)
        same = self._listed_of is not None and self._listed_of[0] is walk and self._listed_of[1] is views
        if not same or self._memory is None or not self._memory.same(places_among(self._tensors, of)):
            self._list(walk, views)
        self._prepared = False
        return self._tensors

    def parameters(self, *, described: bool = False) -> Mapping[str, torch.nn.Parameter]:
        """Returns the model's parameters by name, each once; the very same object for as long as they are the same.

        Args:
            described: Those that were found last.
        """
        return (self._walk if described and self._walk is not None else self._walked()).parameters

    def specs(self) -> tuple[TensorSpec, ...]:
        """Returns specs that are alike on every rank, since all hold every tensor, or a part of it."""
        tensors = self.tensors() if self._prepared else self._tensors
        if tensors is not self._specs_of:
            updated = frozenset(chain.from_iterable(view.parameters for view in self._optimizer_views))
            specs = tuple(_spec_of(tensor, updated) for tensor in tensors)
            self._specs = self._specs if specs == self._specs else specs
            self._specs_of = tensors
        return self._specs

    def plain(self, *, described: bool = False) -> dict[str, Any]:
        """Returns buffers, hyperparameters, scalar optimizer state, extra state. Its tensors are live: copy at once."""
        current = self._walk if described else None
        walk, states = self._refresh() if current is None else (current, self._optimizer_views)
        optimizers = []
        for index, (optimizer, view) in enumerate(zip(self._optimizers, states, strict=True)):
            scalars = {name: scalars_of(state) for name, state in view.scalars}
            groups = read_groups(index, optimizer, view.groups)
            entry = {"class": class_name(optimizer), "param_groups": groups, "scalars": scalars}
            unsliced = read_unsliced(index, view.unsliced)
            optimizers.append(entry | {"unsliced": unsliced} if unsliced else entry)
        pretrained_models = {"pretrained": self._pretrained} if self._pretrained else {}
        frozen = {"frozen": self._frozen.names(walk.parameters)}
        module = module_state.read(self._model, self._varying, walk)
        empty = {name: contents.described(p, f"parameter {name!r}") for name, p in walk.unsliced if not p.numel()}
        unsliced = {"unsliced": empty} if empty else {}
        return {**module, "optimizers": optimizers, **frozen, **pretrained_models, **unsliced}

    def take_added_groups(self, plain: Mapping[str, Any], began: Sequence[int]) -> None:
        """Give the optimizers the param groups that training had added when ``plain`` was taken. Before a restore.

        Args:
            plain: What ``plain()`` gave.
            began: How many groups each optimizer of that run had at first. Where the script has another number now,
                what differs is not what training has added.
        """
        walk = self._walked()
        for index, entry in enumerate(plain.get("optimizers", ())):
            if index < len(self._optimizers) and began[index : index + 1] == self._groups_at_first[index : index + 1]:
                optimizer, at_first = self._optimizers[index], self._groups_at_first[index]
                add_groups(optimizer, at_first, walk.names, walk.parameters, entry["param_groups"])

    def prepare(self, stored: Mapping[str, TensorMeta]) -> None:
        """Make the optimizers hold exactly the tensors that ``stored`` names; new ones are zero.

        Keys that do not start with ``optim/`` are ignored. State that stays keeps its memory. What is in no slice
        stays: ``load_plain`` brings that, and a step of a window that is computed again has it already.

        Raises:
            ConfigError: a key names an optimizer or parameter that this run does not have.
            UnsupportedError: state of a sharded parameter in another shape than the parameter's.
        """
        _, views = self._refresh()
        self._prepared = True
        missing = self._check_stored(stored, views)
        for index, optimizer in enumerate(self._optimizers):
            for name, parameter in views[index].parameters.items():
                metas = missing.get((index, name), {})
                self._prepare_one(optimizer, parameter, metas)

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Put back what ``plain()`` gave. Everything is checked before anything is changed.

        Raises:
            ConfigError: as ``require_loadable``.
        """
        self.require_loadable(plain)
        module_state.write(self._model, self._varying, plain)
        _, states = self._refresh()
        self.freeze(plain["frozen"])
        for optimizer, view, entry in zip(self._optimizers, states, plain["optimizers"], strict=True):
            write_groups(optimizer, entry["param_groups"])
            for name, parameter in view.parameters.items():
                _write_scalars(optimizer, parameter, entry["scalars"].get(name, {}))
                write_unsliced(optimizer, parameter, entry.get("unsliced", {}).get(name, {}))

    def advance_counts(self, missed: Mapping[str, int]) -> None:
        """See ``optimizer_state.advance_counts``."""
        for optimizer, view in zip(self._optimizers, self._refresh()[1], strict=True):
            advance_counts(optimizer, view.parameters, missed)

    def freeze(self, names: Collection[str]) -> None:
        """Make the parameters of these names, "frozen" in the result of ``plain()``, require no gradient, all others
        one."""
        freeze(self._walked().parameters, names)

    def require_loadable(self, plain: Mapping[str, Any]) -> None:
        """See ``ports.TrainingState``.

        Raises:
            ConfigError: an optimizer is of another class.
            ConfigError: buffers, optimizers, groups or their parameters are not the stored ones.
        """
        _, views = self._refresh()
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
        module_state.check(self._model, self._varying, plain)
        for index, (optimizer, entry) in enumerate(zip(self._optimizers, stored, strict=True)):
            require_same_class(f"optimizer {index}", optimizer, entry["class"])
            check_groups(index, optimizer, views[index].groups, entry["param_groups"])

    def _refresh(self) -> tuple[Walk, tuple[OptimizerView, ...]]:
        """What model and optimizers consist of now; the very same objects, as long as that is what it was.

        After a forward pass without a backward pass (validation, a peer that died), FSDP2 leaves whole tensors in the
        place of some sharded parameters. Those are not what the optimizers hold, so the sharded ones are put
        back first; the next forward pass gathers again.
        """
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

    def _list(self, walk: Walk, states: tuple[OptimizerView, ...]) -> None:
        """Describes the tensors that there are now."""
        # What has no elements makes no slice, so that its optimizer state would belong to nothing: see optimizer_state.
        parts: list[tuple[str, str, torch.Tensor, torch.Tensor]] = [
            (f"model/{name}", name, p, p) for name, p in walk.parameters.items() if p.numel()
        ]
        for index, view in enumerate(states):
            parts += [
                (f"optim/{index}/{name}/{key}", name, parameter, value)
                for name, parameter, state in view.states
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and not is_unsliced(parameter, value)
            ]
            view.unsliced = find_unsliced(view.states)
        self._tensors = tuple(self._describe(*part) for part in parts)
        named = (*walk.parameters.items(), *chain.from_iterable(view.tensors for view in states))
        self._memory = TensorAddresses(named, self._tensors)
        self._listed_of = walk, states

    def _describe(self, key: str, name: str, parameter: torch.Tensor, value: torch.Tensor) -> StateTensor:
        block = block_of(value, key)
        if is_sharded(parameter) and block.global_shape and block.global_shape != tuple(parameter.shape):
            raise UnsupportedError(_factored(key, block.global_shape, parameter))
        if is_sharded(parameter) and block.global_shape and not is_dtensor(value):
            raise UnsupportedError(
                f"{key} is not a DTensor, but its parameter is, so it is not known which part of it this is"
            )
        return StateTensor(
            key=key,
            parameter=name,
            local=block.local,
            offsets=block.offsets,
            global_shape=block.global_shape,
            replicated=block.replicated,
            on_param_device=block.local.device == parameter.device,
            duplicate=block.duplicate,
            writer=block.writer,
            mixes_rows=value is parameter and name in self._mixed,
        )

    def _check_stored(
        self, stored: Mapping[str, TensorMeta], states: Sequence[OptimizerView]
    ) -> dict[tuple[int, str], dict[str, TensorMeta]]:
        """The stored optimizer tensors by (optimizer, parameter), refused where this run has no place for them."""
        parameters = [view.parameters for view in states]
        by_parameter: dict[tuple[int, str], dict[str, TensorMeta]] = {}
        for key, meta in stored.items():
            if not key.startswith("optim/"):
                continue
            at = split_key(key)
            name, index, state = at.fqn, at.optimizer or 0, at.state or ""
            if index >= len(parameters) or name not in parameters[index]:
                lacking = f"no optimizer {index}" if index >= len(parameters) else "not given it that parameter"
                raise ConfigError(
                    f"the checkpoint holds state {state!r} of optimizer {index} for parameter {name!r}, but this run "
                    f"has {lacking}; return the same optimizers from configure_optimizers()"
                )
            parameter = parameters[index][name]
            if is_sharded(parameter) and meta.global_shape not in ((), tuple(parameter.shape)):
                raise UnsupportedError(_factored(key, meta.global_shape, parameter))
            by_parameter.setdefault((index, name), {})[state] = meta
        return by_parameter

    def _prepare_one(self, optimizer: Optimizer, parameter: torch.Tensor, metas: Mapping[str, TensorMeta]) -> None:
        """Bring the tensors in one parameter's state to ``metas``."""
        state = optimizer.state[parameter] if parameter in optimizer.state or metas else {}
        sliced = [k for k, v in state.items() if isinstance(v, torch.Tensor) and not is_unsliced(parameter, v)]
        for key in [key for key in sliced if str(key) not in metas]:
            del state[key]
        for key, meta in metas.items():
            make_tensor(optimizer, parameter, key, meta)
        if not state:
            # Optimizers take an empty entry for "never used" only if nothing is there; none is the safest.
            optimizer.state.pop(parameter, None)


def _spec_of(tensor: StateTensor, updated: Collection[str] = ()) -> TensorSpec:
    """updated: parameters that optimizers have. Their gradients are as wide as they are."""
    dtype = dtype_name(tensor.local.dtype, tensor.key)
    gradient = dtype if tensor.parameter in updated and tensor.key.startswith("model/") else None
    return TensorSpec(tensor.key, tensor.parameter, dtype, tensor.global_shape, tensor.mixes_rows, gradient)


def specs_of(tensors: Iterable[StateTensor]) -> tuple[TensorSpec, ...]:
    """``TrainingState.specs`` where every rank holds ``tensors``, or a part of each. Tells nothing of gradients."""
    return tuple(map(_spec_of, tensors))


def _write_scalars(optimizer: Optimizer, parameter: torch.Tensor, scalars: Mapping[Any, Any]) -> None:
    """Make the state of one parameter that is no tensor exactly ``scalars``."""
    if parameter not in optimizer.state and not scalars:
        return
    state = optimizer.state[parameter]
    for key in [k for k, v in state.items() if not isinstance(v, torch.Tensor) and k not in scalars]:
        del state[key]
    state.update(scalars)
    if not state:
        del optimizer.state[parameter]


def _factored(key: str, shape: tuple[int, ...], parameter: torch.Tensor) -> str:
    return (
        f"{key} has shape {shape}, but its parameter is a sharded {tuple(parameter.shape)}: state in another shape "
        "(factored, as Adafactor's) cannot be stored for sharded parameters. Use an optimizer whose state has the "
        "parameter's shape, or train under DDP."
    )
