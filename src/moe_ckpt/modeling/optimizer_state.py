"""The state of a torch optimizer: its param groups and the state of each parameter, read and written.

State tensors with elements are sliced, like the parameters. A checkpoint also has:

- The param groups, as plain data. Hyperparameters (lr, betas, weight_decay, initial_lr, ...) are restored. Flags that
  choose an implementation and not a result (fused, foreach, capturable, differentiable) stay as the new run set them:
  a checkpoint of a GPU run must open on a CPU.
- State that no slice can hold: all state of parameters without elements, and state tensors without elements. An
  optimizer expects to find whatever it once put into a parameter's state, so descriptions of these are restored too
  (``format.contents``).
- The optimizer's class, so that an optimizer of another class does not continue with this state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from moe_ckpt.errors import ConfigError, UnsupportedError, optimizer_changed
from moe_ckpt.format.contents import describe_tensor
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.format.shard import TORCH_DTYPES
from moe_ckpt.modeling.blocks import block_in, is_dtensor
from moe_ckpt.modeling.names import require_same_names
from moe_ckpt.modeling.watching import Entries
from moe_ckpt.ports import TensorMeta

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam),
        *(optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
"""Optimizers that update each element by its own gradient and state alone. Adafactor and Muon do not: they scale steps
by a norm over the whole parameter. Unknown optimizers are taken to do the same."""
_TORCH = "torch.optim."


def class_name(of: Optimizer | type[Optimizer]) -> str:
    """Returns the qualified name of an optimizer's class; torch's own as ``torch.optim.<name>`` wherever they live."""
    kind = of if isinstance(of, type) else type(of)
    module = _TORCH if getattr(torch.optim, kind.__qualname__, None) is kind else f"{kind.__module__}."
    return module + kind.__qualname__


def require_same_class(which: str, optimizer: Optimizer, stored: str) -> None:
    """Raises unless stored state is of the class of ``optimizer``. Changes nothing.

    A class that only moved to another module (a script that runs as ``__main__``) is the same class.

    Args:
        which: Names the optimizer in the message.
        optimizer: The running one.
        stored: Its class name in the checkpoint.

    Raises:
        ConfigError: It is of another class.
    """
    here = class_name(optimizer)
    moved = stored.rpartition(".")[2] == here.rpartition(".")[2] and not f"{stored} {here}".count(_TORCH)
    if stored != here and not moved:
        raise optimizer_changed(which, stored, here)


IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
STEP = "step"
"""What torch's optimizers call the count of a parameter's updates."""


def check_groups(
    index: int, optimizer: Optimizer, names: Sequence[Collection[str]], stored: Sequence[Mapping[str, Any]]
) -> None:
    """Raises ``ConfigError`` unless the groups hold the same parameters, group by group.

    Args:
        names: Of each group's parameters.
    """
    groups = optimizer.param_groups
    if len(groups) != len(stored):
        raise ConfigError(
            f"optimizer {index}: the checkpoint has {len(stored)} param groups, this run has {len(groups)}; "
            "build the optimizer with the same groups"
        )
    for number, entry in enumerate(stored):
        require_same_names(f"parameters of optimizer {index}, param group {number},", names[number], entry["params"])
        for name, current in groups[number].items():
            if name != "params" and isinstance(current, (tuple, list)) and name in entry:
                value = entry[name]
                if not isinstance(value, (tuple, list)) or len(value) != len(current):
                    raise ConfigError(
                        f"optimizer {index}, param group {number}: the checkpoint has {name}={value!r}, this run "
                        f"{name}={current!r}, which is of another form; build the optimizer as it was"
                    )


def add_groups(
    optimizer: Optimizer,
    began: int,
    names: Mapping[int, str],
    parameters: Mapping[str, torch.nn.Parameter],
    stored: Sequence[Mapping[str, Any]],
) -> None:
    """Adds the param groups that training had added (``Optimizer.add_param_group``) when a checkpoint was taken.

    Nothing is added if the script's own groups differ from the checkpoint's, or if parameters are not the model's:
    ``check_groups`` then says what differs.

    Args:
        began: How many groups the script makes. Groups added since belong to another checkpoint, and are removed.
        names: Name of each parameter by its id.
        parameters: The model's, by name.
        stored: Groups of the checkpoint.
    """
    for group in optimizer.param_groups[began:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[began:]
    present = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(set(here) != set(entry["params"]) for here, entry in zip(present, stored, strict=False)):
        return
    named = {name for group in present for name in group}
    added = [name for group in stored[began:] for name in group["params"]]
    if named.isdisjoint(added) and len({*added}) == len(added) and parameters.keys() >= {*added}:
        for entry in stored[began:]:
            optimizer.add_param_group({"params": [parameters[name] for name in entry["params"]]})


def write_groups(optimizer: Optimizer, stored: Sequence[Mapping[str, Any]]) -> None:
    """Writes the stored hyperparameters into the groups. ``check_groups`` has passed."""
    for group, entry in zip(optimizer.param_groups, stored, strict=True):
        for key, value in entry.items():
            if key != "params" and key not in IMPLEMENTATION_FLAGS:
                group[key] = fit_stored_value(group.get(key), value)


def fit_stored_value(current: Any, stored: Any) -> Any:
    """Returns the stored value in the form that this run uses: a tensor stays the same tensor (CUDA graphs hold it)."""
    if isinstance(current, torch.Tensor):
        with torch.no_grad():
            current.copy_(torch.as_tensor(stored))
        return current
    if isinstance(stored, torch.Tensor):
        return stored.item() if isinstance(current, (int, float)) else stored.clone()
    return stored


Unsliced = tuple[str, torch.Tensor, str, torch.Tensor]
"""(name of the parameter, itself, name of its state, live state)."""


def is_sliced(parameter: torch.Tensor, value: object) -> bool:
    """Returns whether a value of a parameter's state is a tensor that slices can hold."""
    return isinstance(value, torch.Tensor) and bool(value.numel() and parameter.numel())


def is_unsliced(parameter: torch.Tensor, value: object) -> bool:
    """Returns whether a value of a parameter's state is a tensor that no slice can hold."""
    return isinstance(value, torch.Tensor) and not (value.numel() and parameter.numel())


def find_unsliced(states: Iterable[tuple[str, torch.Tensor, Mapping[str, Any]]]) -> list[Unsliced]:
    """Returns the unsliced tensors in these (name, parameter, live state)."""
    return [
        (name, parameter, key, value)
        for name, parameter, state in states
        for key, value in state.items()
        if is_unsliced(parameter, value)
    ]


def read_unsliced(index: int, entries: Iterable[Unsliced]) -> dict[str, dict[str, Any]]:
    """Returns {parameter: {state name: description}} of what ``find_unsliced`` returned, if it is unsliced still."""
    descriptions: dict[str, dict[str, Any]] = {}
    for name, parameter, key, held in entries:
        if is_unsliced(parameter, held):  # it may have got memory since
            value = block_in(held) if held.numel() else held
            same = value.device == parameter.device
            entry = describe_tensor(value, f"state {key!r} of {name} in optimizer {index}", on_param_device=same)
            descriptions.setdefault(name, {})[key] = entry
    return descriptions


@contextmanager
def replaced_state(
    optimizer: Optimizer, parameter: torch.Tensor, keys: Collection[Any], belongs: Callable[[Any], bool]
) -> Iterator[dict[Any, Any]]:
    """Yields the state of one parameter, of which the block sets the values under ``keys``.

    Values of other keys are removed if they belong to the same part of the state. A state that ends up empty is
    removed, too, since an optimizer may take an empty one for a state that it has made.

    Args:
        optimizer: Whose state it is.
        parameter: One that it updates.
        keys: Those that there are to be.
        belongs: Returns whether a value belongs to the part of the state that is replaced.
    """
    state = optimizer.state.setdefault(parameter, {})
    for key in [key for key, value in state.items() if belongs(value) and key not in keys]:
        del state[key]
    yield state
    if not state:
        del optimizer.state[parameter]


def write_state(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    scalars: Mapping[str, Any],
    descriptions: Mapping[str, Mapping[str, Any]],
) -> None:
    """Makes one parameter's state, besides sliced tensors, exactly this.

    Args:
        optimizer, parameter: Whose state it is.
        scalars: Values that are no tensors.
        descriptions: Unsliced tensors as ``read_unsliced`` described them.
    """
    keys = scalars.keys() | descriptions.keys()
    with replaced_state(optimizer, parameter, keys, lambda value: not is_sliced(parameter, value)) as state:
        state.update(scalars)
        for key, entry in descriptions.items():
            meta = TensorMeta(entry["dtype"], tuple(entry["shape"]), not entry.get("cpu", False))
            make_tensor(optimizer, parameter, key, meta)
            if "value" in entry:
                state[key].copy_(entry["value"])


def make_tensor(optimizer: Optimizer, parameter: torch.Tensor, key: str, meta: TensorMeta) -> None:
    """Makes one tensor of a parameter's state as ``meta`` says. A new one is zero; one that fits keeps its memory.

    It lives on the device that it was saved from, but for step counts: torch's Adam family has them on the CPU, unless
    fused or capturable kernels read them on the device (``torch.optim.Optimizer.load_state_dict`` does the same).
    """
    on_device, shape, dtype = meta.on_param_device, meta.global_shape, TORCH_DTYPES[meta.dtype]
    if key == STEP and not shape:
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        if "capturable" in group or "fused" in group:
            on_device = bool(group.get("capturable") or group.get("fused"))
    device = parameter.device if on_device else torch.device("cpu")
    state = optimizer.state[parameter]
    old = state.get(key)
    alike = isinstance(old, torch.Tensor) and (tuple(old.shape), old.dtype, old.device) == (shape, dtype, device)
    if alike and (not shape or is_dtensor(old) == is_dtensor(parameter)):
        return
    if shape and tuple(parameter.shape) == shape and device == parameter.device:
        state[key] = torch.zeros_like(parameter.detach(), dtype=dtype)  # sharded and laid out like the parameter
    else:
        state[key] = torch.zeros(shape, dtype=dtype, device=device)


_PARAMS = itemgetter("params")
_UPDATES = "_moe_ckpt_updates"
"""Attribute of a gradient: how many updates have used the very same tensor."""
_LOOKED_AT = 64
"""Parameters of which one has a gradient."""


def _gradient(parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Returns a gradient that has memory of its own. DDP's buckets, of which others are views, outlive a None."""
    gradients = (p.grad for p in islice(parameters, _LOOKED_AT) if p.grad is not None)
    return next((gradient for gradient in gradients if not gradient._is_view()), None)


def note_gradients(optimizer: Optimizer) -> None:
    """Notes at an update which tensors have the gradients: the same as before, unless they were set to None since."""
    gradient = _gradient(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
    if gradient is not None:
        setattr(gradient, _UPDATES, getattr(gradient, _UPDATES, 0) + 1)


def write_zeros(parameters: Iterable[torch.Tensor]) -> None:
    """Gives parameters the gradients that they had, of zeros, as ``OptimizerView.zeroed`` found them."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter.detach())
        setattr(parameter.grad, _UPDATES, 2)


class OptimizerView:
    """The tensors of an optimizer by name, looked up once and valid as long as ``is_current()``.

    Attributes:
        groups: Names of the parameters of each group; encoded once, since there are thousands.
        parameters: By name, in the order of the groups.
        states: (name, parameter, live state) of the parameters with state. In the order of the groups, since
            ``optimizer.state`` is in the order of first use.
        scalars: (name, live state) of the parameters whose state has other values than tensors.
        unsliced: State tensors that no slice can hold.
    """

    def __init__(self, index: int, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._lists = list(map(_PARAMS, optimizer.param_groups))
        self._lengths = list(map(len, self._lists))
        self._listed: list[torch.Tensor] = list(chain.from_iterable(self._lists))
        self._state = optimizer.state
        self._present = Entries([self._state])
        labels = [_name(names, parameter, index, optimizer) for parameter in self._listed]
        ends = iter(labels)
        self.groups = [FixedStrings([next(ends) for _ in range(length)]) for length in self._lengths]
        self.parameters = dict(zip(labels, self._listed, strict=True))
        self.states = [
            (name, parameter, self._state[parameter])
            for name, parameter in zip(labels, self._listed, strict=True)
            if parameter in self._state
        ]
        self._require_names(index)
        self.unsliced = find_unsliced(self.states)
        self._entries = Entries([state for _, _, state in self.states], torch.Tensor)
        self.scalars = [
            (name, state)
            for name, _, state in self.states
            if not all(isinstance(value, torch.Tensor) for value in state.values())
        ]

    def zeroed(self) -> list[str]:
        """Returns the names of parameters whose gradients are set to zero after an update; [] if they are set to None.

        An optimizer updates a parameter with a gradient of zeros, such as an expert without tokens, by its momentum,
        and leaves alone one without a gradient, as all are in a new process.
        """
        gradient = _gradient(self._listed)
        if gradient is None or getattr(gradient, _UPDATES, 0) < 2:
            return []
        return [name for name, parameter in self.parameters.items() if parameter.grad is not None]

    def _require_names(self, index: int) -> None:
        """Raises ``UnsupportedError`` for a tensor under a name that no key of a checkpoint can hold."""
        for owner, _, state in self.states:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and not is_state_name(name):
                    raise unnameable_error(f"optimizer {index} ({type(self._optimizer).__name__})", owner, name)

    def is_current(self) -> bool:
        """Returns False once groups, the state of a parameter, or a tensor in it came, went or were replaced."""
        lists, state = list(map(_PARAMS, self._optimizer.param_groups)), self._optimizer.state
        return (
            state is self._state
            and list(map(len, lists)) == self._lengths
            and all(map(is_, chain.from_iterable(lists), self._listed))
            and self._present.same()
            and self._entries.same()
        )


def _name(names: Mapping[int, str], parameter: torch.Tensor, index: int, optimizer: Optimizer) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise UnsupportedError(
            f"optimizer {index} ({type(optimizer).__name__}) holds a parameter of shape "
            f"{tuple(parameter.shape)} that is not among the model's named_parameters(). Assign what it belongs to "
            "as an attribute of the module, and build optimizers after sharding or replacing parameters."
        )
    return name


def is_state_name(name: object) -> bool:
    """Returns whether a tensor key can end with the name of a state, and a reader finds that very name there."""
    return isinstance(name, str) and bool(name) and "/" not in name and f"{name}" == name


def unnameable_error(optimizer: str, parameter: str, name: object) -> UnsupportedError:
    """Returns the error for a tensor of optimizer state whose name is no ``is_state_name``."""
    return UnsupportedError(
        f"{optimizer} keeps a tensor for parameter {parameter!r} under the name {name!r}. A checkpoint names tensors "
        "of optimizer state by text that is not empty and has no '/', so a resume would not find this one. Rename it "
        "in the optimizer, to state[p]['momentum'] for instance."
    )


def advance_counts(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], missed: Mapping[str, int]) -> None:
    """Advances the step counts of parameters that were restored from older copies.

    An expert in a stack shares the stack's count, which goes on in any case; this does the same for experts with
    parameters of their own. A count that reaches the newest one belongs to a parameter that was updated as often, so
    other state without dimensions (NAdam's ``mu_product``) is copied from the newest, too.

    Args:
        optimizer: Its state is restored.
        parameters: Those that it updates, by name.
        missed: Name -> steps since the restored copy.
    """
    counts = {
        name: {
            key: value
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and not value.dim()
        }
        for name, parameter in parameters.items()
        if parameter.dim() and parameter.requires_grad
    }
    newest: Mapping[Any, torch.Tensor] = max(
        (state for name, state in counts.items() if STEP in state and name not in missed),
        key=lambda state: float(state[STEP]),
        default={},
    )
    with torch.no_grad():
        for name in counts.keys() & missed.keys():
            state = counts[name]
            if STEP not in state:
                continue
            state[STEP] += missed[name]
            if STEP in newest and state[STEP].item() >= newest[STEP].item():
                for key in state.keys() & newest.keys():
                    state[key].copy_(newest[key])
