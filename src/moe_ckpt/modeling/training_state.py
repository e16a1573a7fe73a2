"""The training state of a torch model and its optimizers, as live tensors and plain data.

Optimizer state is discovered, not assumed. Tensors become ``StateTensor`` s, everything else goes through
``plain()``. Matching is by parameter name, so the order of parameters in an optimizer does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.format.dtypes import dtype_name
from moe_ckpt.modeling import module_state, param_groups, pretrained, unsliced_state
from moe_ckpt.modeling.blocks import block_in, block_of, fsdp_modules, is_dtensor, is_sharded, layout_of, reshard
from moe_ckpt.modeling.optimizer_class import ELEMENTWISE, class_name, require_same_class
from moe_ckpt.modeling.optimizer_view import OptimizerView, advance_counts, scalars_of
from moe_ckpt.modeling.trainable import Frozen, freeze
from moe_ckpt.modeling.unsliced_state import is_unsliced
from moe_ckpt.modeling.walk import Walk
from moe_ckpt.modeling.watching import TensorAddresses, places_among
from moe_ckpt.ports import Reading, StateTensor, TensorMeta, TensorSpec
from moe_ckpt.recovery.index import split_key

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
        self._listing: _StateListing | None = None
        self._prepared = True
        self._specs: tuple[TensorSpec, ...] = ()
        self._specs_of: tuple[StateTensor, ...] = ()
        self._updated: frozenset[str] = frozenset()
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
        listing = self._listing
        if listing is None or not listing.is_of(walk, views, of):
            listing = self._listing = self._list(walk, views, listing)
        self._prepared = False
        return listing.tensors

    def parameters(self, *, described: bool = False) -> Mapping[str, torch.nn.Parameter]:
        """Returns the model's parameters by name, each once; the very same object for as long as they are the same.

        Args:
            described: Those that were found last.
        """
        return self._known_walk(described).parameters

    def specs(self) -> tuple[TensorSpec, ...]:
        """Returns specs that are alike on every rank, since all hold every tensor, or a part of it."""
        tensors = self.tensors() if self._listing is None or self._prepared else self._listing.tensors
        if tensors is not self._specs_of:
            updated = frozenset(chain.from_iterable(view.parameters for view in self._optimizer_views))
            same = updated == self._updated
            earlier = dict(zip(map(id, self._specs_of), self._specs, strict=True)) if same else {}
            specs = tuple(earlier.get(id(tensor)) or _spec_of(tensor, updated) for tensor in tensors)
            self._updated = updated
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
            groups = param_groups.read(index, optimizer, view.groups)
            entry = {"class": class_name(optimizer), "param_groups": groups, "scalars": scalars}
            unsliced = unsliced_state.read(index, view.unsliced)
            optimizers.append(entry | {"unsliced": unsliced} if unsliced else entry)
        pretrained_models = {"pretrained": self._pretrained} if self._pretrained else {}
        frozen = {"frozen": self._frozen.names(walk.parameters)}
        module = module_state.read(self._model, self._varying, walk)
        empty = unsliced_state.read_parameters(walk.unsliced)
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
                param_groups.take_added(optimizer, at_first, walk.names, walk.parameters, entry["param_groups"])

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
            param_groups.write(optimizer, entry["param_groups"])
            for name, parameter in view.parameters.items():
                _write_scalars(optimizer, parameter, entry["scalars"].get(name, {}))
                unsliced_state.write(optimizer, parameter, entry.get("unsliced", {}).get(name, {}))

    def advance_counts(self, missed: Mapping[str, int]) -> None:
        """See ``optimizer_view.advance_counts``."""
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
                "return the same ones from configure_optimizers()"
            )
        module_state.check(self._model, self._varying, plain)
        for index, (optimizer, entry) in enumerate(zip(self._optimizers, stored, strict=True)):
            require_same_class(f"optimizer {index}", optimizer, entry["class"])
            param_groups.check(index, optimizer, views[index].groups, entry["param_groups"])

    def _refresh(self) -> tuple[Walk, tuple[OptimizerView, ...]]:
        """What model and optimizers consist of now; the very same objects, as long as that is what it was.

        After a forward pass without a backward pass (validation, a peer that died), FSDP2 leaves whole tensors in the
        place of some sharded parameters. Those are not what the optimizers hold, so the sharded ones are put
        back first; the next forward pass gathers again.
        """
        walk = self._walked()
        same = walk is self._walk and len(self._optimizer_views) == len(self._optimizers)
        if not same or not all(view.is_current() for view in self._optimizer_views):
            self._optimizer_views = tuple(
                OptimizerView(at, optimizer, walk.names) for at, optimizer in enumerate(self._optimizers)
            )
            self._walk = walk
        return walk, self._optimizer_views

    def _known_walk(self, described: bool) -> Walk:
        return self._walk if described and self._walk is not None else self._walked()

    def _walked(self) -> Walk:
        walk = self._walk
        if walk is not None and walk.is_current():
            return walk
        for module in self._sharded_modules:
            reshard(module)
        if walk is not None and self._sharded_modules and walk.is_current():
            return walk
        return Walk(self._model)

    def _list(self, walk: Walk, states: tuple[OptimizerView, ...], before: _StateListing | None) -> _StateListing:
        """before: the listing until now, whose tensors are used again where they are the same."""
        earlier, views = _StateViews() if before is None else before.views, _StateViews()
        # What has no elements makes no slice, so that its optimizer state would belong to nothing: see unsliced_state.
        for name, parameter in walk.parameters.items():
            if parameter.numel():
                self._view(views, earlier, f"model/{name}", name, parameter, parameter)
        for index, view in enumerate(states):
            for name, of, state in view.states:
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and not is_unsliced(of, value):
                        self._view(views, earlier, f"optim/{index}/{name}/{key}", name, of, value)
            view.unsliced = unsliced_state.find(view.states)
        return _StateListing(walk, states, views, before)

    def _view(
        self,
        views: _StateViews,
        earlier: _StateViews,
        key: str,
        name: str,
        parameter: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Add the view of one tensor to ``views``; the one in ``known``, if that is of the same memory."""
        views.add(key, value, earlier.of(key, parameter, value) or self._describe(key, name, parameter, value))

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
            unsliced_state.make(optimizer, parameter, key, meta)
        if not state:
            # Optimizers take an empty entry for "never used" only if nothing is there; none is the safest.
            optimizer.state.pop(parameter, None)


class _StateViews:
    """What is handed out of live tensors, and where their memory was then. In lists: an object for each would be one
    more for the garbage collector to look at."""

    def __init__(self) -> None:
        self.tensors: list[StateTensor] = []
        self._places: dict[str, int] = {}
        self._values: list[torch.Tensor] = []
        self._blocks: list[torch.Tensor] = []
        self._layouts: list[object] = []

    def add(self, key: str, value: torch.Tensor, tensor: StateTensor) -> None:
        """tensor: the view of ``value``."""
        self._places[key] = len(self.tensors)
        self.tensors.append(tensor)
        self._values.append(value)
        self._blocks.append(block_in(value))
        self._layouts.append(layout_of(value))

    def of(self, key: str, parameter: torch.Tensor, value: torch.Tensor) -> StateTensor | None:
        """The view that was added by this key, if it still is that of ``value``. parameter: whose that is."""
        at = self._places.get(key)
        if at is None:
            return None
        tensor, block = self.tensors[at], self._blocks[at]
        same = (
            self._values[at] is value
            and block is block_in(value)
            and self._layouts[at] is layout_of(value)
            and tensor.local.data_ptr() == block.data_ptr()
            and tensor.on_param_device == (tensor.local.device == parameter.device)
        )
        return tensor if same else None


class _StateListing:
    """What ``tensors()`` gave, and what it was made of.

    before: the listing until now; it lends its sequence if nothing has changed.
    """

    def __init__(
        self, walk: Walk, states: tuple[OptimizerView, ...], views: _StateViews, before: _StateListing | None
    ) -> None:
        self.views = views
        self._walk = walk
        self._states = states
        named = (*walk.parameters.items(), *chain.from_iterable(view.tensors for view in states))
        self._memory = TensorAddresses(named, views.tensors)
        self.tensors: tuple[StateTensor, ...] = tuple(views.tensors)
        earlier = () if before is None else before.tensors
        if len(earlier) == len(self.tensors) and all(map(is_, earlier, self.tensors)):
            self.tensors = earlier

    def is_of(self, walk: Walk, states: tuple[OptimizerView, ...], of: Reading | None) -> bool:
        """of: see ``ports.TrainingState.tensors``."""
        return self._walk is walk and self._states is states and self._memory.same(places_among(self.tensors, of))


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
