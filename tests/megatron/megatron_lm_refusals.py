"""What ``megatron.install`` refuses; bodies of ``run_ranks``, one rank each."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

from torch import nn

from tests.megatron.bad_input import DELETED, Said, changed, said
from tests.support.megatron_run import heard


def moved_names(rank: int, world_size: int, root: str) -> dict[str, Said]:
    """Megatron-LM in other versions: a function gone, no longer called by its name, or with other parameters."""
    import megatron.training.training as training

    from moe_ckpt import Memory, megatron
    from moe_ckpt.megatron.megatron_lm import REPLACED_WITH_LOG

    found: dict[str, Said] = {}
    install = functools.partial(megatron.install, dirpath=root, memory=Memory(upstream_bytes="1MB"))
    for name, (caller, parameters) in REPLACED_WITH_LOG.items():
        with changed(training, name, DELETED):
            found[f"{name} gone"] = said(install)
        with changed(training, caller, lambda: None):
            found[f"{name} not called"] = said(install)
        for parameter in parameters:
            with changed(training, name, lambda *args, **kwargs: None):
                found[f"{name}({parameter})"] = said(install)
    replaced = [name for name in REPLACED_WITH_LOG if "moe_ckpt" in getattr(training, name).__module__]
    found["untouched"] = (str(replaced), "")
    return found


def calls(rank: int, world_size: int, root: str) -> dict[str, Said]:
    """Settings that cannot be, and runs in which nothing could be checkpointed."""
    import megatron.training.training as training

    from moe_ckpt import megatron
    from moe_ckpt.megatron import script

    found = {
        "policy": said(lambda: megatron.install(policy="MoC", dirpath=root)),
        "option": said(lambda: megatron.install(dirpath=root, retntion=3)),
    }
    before = training.train
    installed = megatron.install(dirpath=f"{root}/one")
    found["twice"] = said(lambda: megatron.install(dirpath=f"{root}/two"))
    for mode in ("skip_train", "perform_rl_step", "ckpt_convert_format"):
        settings = SimpleNamespace(**dict.fromkeys(script.ARGUMENTS), **{mode: True})
        found[mode] = said(lambda settings=settings: script.require_trainable(settings))
    found["arguments"] = said(lambda: script.require_trainable(SimpleNamespace()))
    replaced = training.train is not before
    installed.remove()
    found["removed"] = (str((replaced, training.train is before)), "")
    return found


def without_megatron_lm(rank: int, world_size: int, root: str) -> dict[str, Any]:
    from moe_ckpt import megatron

    return {"absent": said(lambda: megatron.install(dirpath=root))}


def unused(rank: int, world_size: int, root: str) -> dict[str, Said]:
    """What is said at the process's end after an ``install`` that no model followed, one that was taken away, and one
    whose model could not be checkpointed."""
    from moe_ckpt import megatron
    from moe_ckpt.megatron import megatron_lm, script

    told: list[str] = []
    megatron_lm.announce = lambda message, *values, **_: told.append(message % values)
    installed = megatron.install(dirpath=root)
    megatron_lm._warn_unused(installed)
    installed.remove()
    megatron_lm._warn_unused(installed)
    installed = megatron.install(dirpath=root)
    installed._original["setup_model_and_optimizer"] = lambda: (nn.Linear(2, 2), None, None)
    settings = SimpleNamespace(**dict.fromkeys(script.ARGUMENTS))
    importlib.import_module("megatron.training.global_vars").get_args = lambda: settings
    refused = said(installed._setup_model_and_optimizer)
    megatron_lm._warn_unused(installed)
    installed.remove()
    return {"told": ("", told[0]), "refused": refused, "then": (str(len(told)), told[-1])}


def loaders(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """What is said of a data loader whose position is not saved."""
    from moe_ckpt.megatron import script

    with heard() as told:
        for kind, stateful in (("single", ()), ("external", ("loader",)), ("external", ())):
            script.warn_of_loader(SimpleNamespace(dataloader_type=kind), stateful, "install", "--external", "position")
        script.warn_of_loader(SimpleNamespace(), (), "install", "--external", "position")
    return {"told": told}
