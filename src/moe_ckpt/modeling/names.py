"""Names of parameters and modules as they appear in checkpoints.

``torch.compile(module)`` and activation-checkpoint wrappers add a component to every name below them. It says how the
model runs, not what it is, so it is left out: a compiled and an eager model share a store. All other components are
those that ``named_parameters`` gives at run time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from moe_ckpt.errors import ConfigError

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """Returns the name without the components that run-time wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module inside ``torch.compile`` and activation-checkpoint wrappers."""
    while (inner := next((m for n, m in module._modules.items() if n in _WRAPPERS), None)) is not None:
        module = inner
    return module


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (clean name, parameter), each parameter once, under the first of its names."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter


def require_same_names(what: str, here: Collection[str], stored: Collection[str]) -> None:
    """Raises ``ConfigError``, which shows differences, unless ``what`` has the same names in run and checkpoint."""
    only_here, only_stored = sorted({*here} - {*stored})[:3], sorted({*stored} - {*here})[:3]
    if only_here or only_stored:
        raise ConfigError(
            f"{what} differ; only in the checkpoint: {only_stored or 'none'}, only in this run: {only_here or 'none'}. "
            "Build model and optimizers as they were when the checkpoint was written"
        )


def tied_aliases(model: nn.Module) -> dict[str, str]:
    """Returns second names of tied parameters -> the name that the catalog and the store use.

    ``state_dict()`` lists a tied tensor under all of its names, ``named_parameters()`` under the first.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = clean_name(raw)
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def is_compiled(model: nn.Module) -> bool:
    """Returns whether a module of ``model`` is compiled: wrapped, in place (``module.compile()``) or by its forward.

    A program that is compiled for other gradients may round differently.
    """
    return any(
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )
