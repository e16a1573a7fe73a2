"""Optimizer state is given back to its own class of optimizer only."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.optimizer_state import class_name
from moe_ckpt.modeling.training_state import TorchTrainingState

NAMES = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)


def trained(name: str, **options) -> tuple[torch.optim.Optimizer, TorchTrainingState]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return optimizer, TorchTrainingState(model, [optimizer])


def stored(name: str, **options) -> dict:
    _, state = trained(name, **options)
    return copy.deepcopy(state.plain())


def fresh(name: str, **options) -> TorchTrainingState:
    model = nn.Linear(3, 2, bias=False)
    return TorchTrainingState(model, [getattr(torch.optim, name)(model.parameters(), **options)])


def test_every_other_class_of_torch_is_refused_by_name_and_its_own_is_taken():
    for there, here in itertools.product(NAMES, NAMES):
        plain = stored(there)
        if there == here:
            fresh(here).require_loadable(plain)
            continue
        with pytest.raises(ConfigError, match=rf"optimizer 0: .*torch\.optim\.{here}") as caught:
            fresh(here).require_loadable(plain)
        assert f"was written with torch.optim.{there}, but" in str(caught.value)


def test_a_refusal_changes_nothing_and_says_what_to_do():
    optimizer, state = trained("SGD", momentum=0.9)
    before = copy.deepcopy(optimizer.state_dict())
    plain = stored("AdamW")
    for ask in (lambda: state.require_loadable(plain), lambda: state.load_plain(plain)):
        with pytest.raises(ConfigError, match=r"torch\.optim\.AdamW.*torch\.optim\.SGD.*weights_from="):
            ask()
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])


def test_settings_of_one_class_are_no_other_class():
    plain = stored("AdamW", foreach=False, amsgrad=True)
    group = plain["optimizers"][0]["param_groups"][0]
    for added in ("maximize", "capturable", "decoupled_weight_decay"):
        del group[added]  # as an older torch wrote it
    group["initial_lr"] = group["max_lr"] = 0.1  # a scheduler's
    state = fresh("AdamW", fused=True)
    state.require_loadable(plain)
    state.load_plain(plain)
    [kept] = state._optimizers[0].param_groups
    assert kept["fused"] is True
    assert kept["amsgrad"] is True
    assert kept["decoupled_weight_decay"] is True
    assert kept["maximize"] is False
    never_stepped = fresh("AdamW")
    fresh("AdamW").require_loadable(never_stepped.plain())
    fresh("SGD", momentum=0.9).require_loadable(stored("SGD"))


def _own(module: str, name: str = "Lion") -> type[torch.optim.Optimizer]:
    return type(name, (torch.optim.SGD,), {"__module__": module, "__qualname__": name})


def test_a_class_that_only_moved_is_the_same_class():
    model = nn.Linear(3, 2, bias=False)
    plain = TorchTrainingState(model, [_own("__main__")(model.parameters())]).plain()
    assert plain["optimizers"][0]["class"] == "__main__.Lion"
    TorchTrainingState(model, [_own("pkg.train")(model.parameters())]).require_loadable(plain)
    with pytest.raises(ConfigError, match=r"__main__\.Lion, but.*pkg\.train\.Tiger"):
        TorchTrainingState(model, [_own("pkg.train", "Tiger")(model.parameters())]).require_loadable(plain)
    optimizer = _own("other", "AdamW")(model.parameters())
    assert class_name(optimizer) == "other.AdamW"
    with pytest.raises(ConfigError, match=r"torch\.optim\.AdamW.*other\.AdamW"):
        TorchTrainingState(model, [optimizer]).require_loadable(stored("AdamW"))
