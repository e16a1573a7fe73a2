"""The training state of a torch model and its optimizers, as live tensors and plain data.

Optimizer state is discovered, not assumed. Tensors become ``StateTensor`` s, everything else goes through
``plain()``. Matching is by parameter name, so the order of parameters in an optimizer does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import is_not
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.format.dtypes import TORCH_DTYPES, dtype_name
from moe_ckpt.modeling import module_state, param_groups, pretrained
from moe_ckpt.modeling.blocks import block_of, fsdp_modules, is_dtensor, is_sharded
from moe_ckpt.modeling.names import parameters_of
from moe_ckpt.modeling.optimizer_class import class_name, require_same_class
from moe_ckpt.ports import StateTensor, TensorMeta, TensorSpec
from moe_ckpt.recovery.index import split_key

_SHARDING_OPTIMIZERS = frozenset({"ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer", "FullyShardedDataParallel"})
_ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Optimizers that update each element by its own gradient and state alone. Adafactor and Muon do not (their steps are
scaled by a norm over the whole parameter), and of what is not known it must be assumed."""


class TorchTrainingState:
    """``ports.TrainingState`` for plain tensors and DTensors (FSDP2, tensor parallelism).

    model: names of tensors are those of this module's ``named_parameters()``.
    optimizers: torch optimizers, without wrappers; their position is part of every key.

    Raises:
        UnsupportedError: an optimizer holds a parameter that is not the model's, or shards its own state.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._parameters: dict[str, nn.Parameter] = {}
        self._kept: dict[str, tuple[torch.Tensor, StateTensor]] = {}
        self._mixed: set[str] = set()
        self._specs: tuple[TensorSpec, ...] = ()
        self._listed: list[StateTensor] | None = None
        self._pretrained = pretrained.read(model)
        self._sharded_modules = tuple(fsdp_modules(model))
        self._refresh()
        for index, optimizer in enumerate(self._optimizers):
            if type(optimizer).__name__ in _SHARDING_OPTIMIZERS:
                raise UnsupportedError(
                    f"optimizer {index} is a {type(optimizer).__name__}, which spreads its state over ranks behind "
                    "the parameters' back. Use FSDP2 (ModelParallelStrategy), or another optimizer under DDP."
                )
            names = self._names_in(index)
            if type(optimizer) not in _ELEMENTWISE:
                self._mixed.update(names)

    def tensors(self) -> list[StateTensor]:
        """All parameters, then the optimizer state that exists now. Views only; no waiting for the device."""
        names = self._refresh()
        found = [self._state_tensor(f"model/{name}", name, p, p) for name, p in self._parameters.items()]
        for index in range(len(self._optimizers)):
            for name, parameter, state in self._states(index, names):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        found.append(self._state_tensor(f"optim/{index}/{name}/{key}", name, parameter, value))
        self._listed = found
        return found

    def specs(self) -> tuple[TensorSpec, ...]:
        """Alike on every rank, since all hold every tensor, or a part of it."""
        found = specs_of(self.tensors() if self._listed is None else self._listed)
        if len(found) != len(self._specs) or any(map(is_not, found, self._specs)):
            self._specs = found
        return self._specs

    def plain(self) -> dict[str, Any]:
        """Buffers, hyperparameters, scalar optimizer state, extra state. Tensors in it are live: copy at once."""
        names = self._refresh()
        optimizers = []
        for index, optimizer in enumerate(self._optimizers):
            scalars: dict[str, dict[Any, Any]] = {}
            for name, _, state in self._states(index, names):
                rest = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
                if rest:
                    scalars[name] = rest
            groups = param_groups.read(index, optimizer, names)
            optimizers.append({"class": class_name(optimizer), "param_groups": groups, "scalars": scalars})
        described = {"pretrained": self._pretrained} if self._pretrained else {}
        return {**module_state.read(self._model), "optimizers": optimizers, **described}

    def prepare(self, wanted: Mapping[str, TensorMeta]) -> None:
        """Make the optimizers hold exactly the tensors that ``wanted`` names; new ones are zero.

        Keys that do not start with ``optim/`` are passed over. State that stays keeps its memory.

        Raises:
            ConfigError: a key names an optimizer or parameter that this run does not have.
            UnsupportedError: state of a sharded parameter in another shape than the parameter's.
        """
        self._refresh()
        self._listed = None
        missing = self._check_wanted(wanted)
        for index, optimizer in enumerate(self._optimizers):
            for name, parameter in self._names_in(index).items():
                metas = missing.get((index, name), {})
                self._prepare_one(optimizer, name, parameter, metas)

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Put back what ``plain()`` gave. Everything is checked before anything is changed.

        Raises:
            ConfigError: as ``require_loadable``.
        """
        self.require_loadable(plain, ())
        module_state.write(self._model, plain)
        for index, (optimizer, entry) in enumerate(zip(self._optimizers, plain["optimizers"], strict=True)):
            param_groups.write(optimizer, entry["param_groups"])
            for name, parameter in self._names_in(index).items():
                _write_scalars(optimizer, parameter, entry["scalars"].get(name, {}))

    def require_loadable(self, plain: Mapping[str, Any], keys: Collection[str]) -> None:
        """See ``ports.TrainingState``.

        Raises:
            OptimizerChangedError: an optimizer is of another class.
            ConfigError: buffers, optimizers, groups or their parameters are not the stored ones.
        """
        names = self._refresh()
        stored = plain.get("optimizers")
        if stored is None:
            raise ConfigError(
                "the checkpoint was not written by this kind of trainer: its optimizer state cannot go on here. Give "
                "another dirpath, and weights_from= the checkpoint to train on from its weights"
            )
        if len(stored) != len(self._optimizers):
            raise ConfigError(
                f"the checkpoint holds {len(stored)} optimizers, this run has {len(self._optimizers)}; "
                "return the same ones from configure_optimizers()"
            )
        module_state.check(self._model, plain)
        found = [{str(name) for of_one in entry["scalars"].values() for name in of_one} for entry in stored]
        for key in keys:
            parts = split_key(key)
            if parts.optimizer is not None and parts.state is not None and parts.optimizer < len(found):
                found[parts.optimizer].add(parts.state)
        for index, (optimizer, entry) in enumerate(zip(self._optimizers, stored, strict=True)):
            groups = entry["param_groups"]
            require_same_class(f"optimizer {index}", optimizer, entry.get("class"), groups, found[index])
            param_groups.check(index, optimizer, names, groups)

    def _refresh(self) -> dict[int, str]:
        """Parameter id -> name of the parameters that the model has now.

        After a forward pass without a backward pass (validation), FSDP2 leaves whole tensors in the place
        of some sharded parameters. Those are not what the optimizers hold, so the sharded ones are put
        back first; the next forward pass gathers again.
        """
        for module in self._sharded_modules:
            module.reshard()
        self._parameters = dict(parameters_of(self._model))
        return {id(parameter): name for name, parameter in self._parameters.items()}

    def _states(self, index: int, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor, dict[Any, Any]]]:
        """(name, parameter, state) in the order of the param groups: the order of ``state`` is that of first use."""
        optimizer = self._optimizers[index]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    yield self._name(names, parameter, index), parameter, optimizer.state[parameter]

    def _names_in(self, index: int) -> dict[str, torch.Tensor]:
        """Name -> parameter for all parameters of one optimizer."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        optimizer = self._optimizers[index]
        return {self._name(names, p, index): p for group in optimizer.param_groups for p in group["params"]}

    def _name(self, names: Mapping[int, str], parameter: torch.Tensor, index: int) -> str:
        name = names.get(id(parameter))
        if name is None:
            raise UnsupportedError(
                f"optimizer {index} ({type(self._optimizers[index]).__name__}) holds a parameter of shape "
                f"{tuple(parameter.shape)} that is not among the model's named_parameters(). Assign what it belongs to "
                "as an attribute of the module, and build optimizers after sharding or replacing parameters."
            )
        return name

    def _state_tensor(self, key: str, name: str, parameter: torch.Tensor, value: torch.Tensor) -> StateTensor:
        """The view of one tensor; that of a plain one is kept as long as it is of the same memory."""
        if is_dtensor(parameter) or is_dtensor(value):
            return self._describe(key, name, parameter, value)
        kept = self._kept.get(key)
        if kept is None or kept[0] is not value or kept[1].local.data_ptr() != value.data_ptr():
            kept = self._kept[key] = (value, self._describe(key, name, parameter, value))
        return kept[1]

    def _describe(self, key: str, name: str, parameter: torch.Tensor, value: torch.Tensor) -> StateTensor:
        block = block_of(value, key)
        if is_sharded(parameter) and block.global_shape and block.global_shape != tuple(parameter.shape):
            raise UnsupportedError(_factored(key, block.global_shape, parameter))
        if is_sharded(parameter) and block.global_shape and not is_dtensor(value):
            raise UnsupportedError(f"{key} is no DTensor, but its parameter is: which part of it this is is unknown")
        return StateTensor(
            key=key,
            parameter=name,
            local=block.local,
            offsets=block.offsets,
            global_shape=block.global_shape,
            replicated=block.replicated,
            on_param_device=block.local.device == parameter.device,
            duplicate=block.duplicate,
            mixes_rows=value is parameter and name in self._mixed,
        )

    def _check_wanted(self, wanted: Mapping[str, TensorMeta]) -> dict[tuple[int, str], dict[str, TensorMeta]]:
        """The wanted optimizer tensors by (optimizer, parameter), refused where this run has no place for them."""
        parameters = [self._names_in(index) for index in range(len(self._optimizers))]
        by_parameter: dict[tuple[int, str], dict[str, TensorMeta]] = {}
        for key, meta in wanted.items():
            if not key.startswith("optim/"):
                continue
            _, number, name, state = key.split("/", 3)
            index = int(number)
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

    def _prepare_one(
        self, optimizer: Optimizer, name: str, parameter: torch.Tensor, metas: Mapping[str, TensorMeta]
    ) -> None:
        """Bring the tensors in one parameter's state to ``metas``."""
        state = optimizer.state[parameter] if parameter in optimizer.state or metas else {}
        for key in [k for k, v in state.items() if isinstance(v, torch.Tensor) and str(k) not in metas]:
            del state[key]
        for key, meta in metas.items():
            device = _state_device(optimizer, parameter, key, meta)
            dtype = TORCH_DTYPES[meta.dtype]
            old = state.get(key)
            if not _fits(old, parameter, meta.global_shape, dtype, device):
                state[key] = _new_state(parameter, meta.global_shape, dtype, device)
        if not state:
            # Optimizers take an empty entry for "never used" only if nothing is there; none is the safest.
            optimizer.state.pop(parameter, None)


@lru_cache(maxsize=1 << 16)
def _spec_of(key: str, parameter: str, dtype: torch.dtype, shape: tuple[int, ...], mixes_rows: bool) -> TensorSpec:
    return TensorSpec(key, parameter, dtype_name(dtype), shape, mixes_rows)


def specs_of(tensors: Iterable[StateTensor]) -> tuple[TensorSpec, ...]:
    """``TrainingState.specs`` where every rank holds ``tensors``, or a part of each. Same tensors, same specs."""
    return tuple(_spec_of(t.key, t.parameter, t.local.dtype, t.global_shape, t.mixes_rows) for t in tensors)


def _state_device(optimizer: Optimizer, parameter: torch.Tensor, key: str, meta: TensorMeta) -> torch.device:
    """Where state is to live: as it was saved, but a step count where this run's implementation needs it.

    torch's Adam family counts steps on the CPU, unless fused or capturable kernels read them on the device
    (torch.optim.Optimizer.load_state_dict makes the same exception).
    """
    on_device = meta.on_param_device
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    if key == "step" and not meta.global_shape and ("capturable" in group or "fused" in group):
        on_device = bool(group.get("capturable") or group.get("fused"))
    return parameter.device if on_device else torch.device("cpu")


def _fits(
    old: object, parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> bool:
    return (
        isinstance(old, torch.Tensor)
        and tuple(old.shape) == shape
        and old.dtype == dtype
        and old.device == device
        and (not shape or is_dtensor(old) == is_dtensor(parameter))
    )


def _new_state(
    parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A zeroed tensor, sharded and laid out like the parameter if it has its shape."""
    if shape and tuple(parameter.shape) == shape and device == parameter.device:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


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
