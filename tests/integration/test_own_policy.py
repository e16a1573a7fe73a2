"""docs/own_policy.md: its policy trains, fails in the middle, comes back, and what it lost is counted."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import lightning.pytorch as pl
import pytest
import torch

from moe_ckpt import Memory, attach, release_host_memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.policies import AnyOf, Dense, MoC, MoEvement, Needs, Policy, PolicyContext, needs_of
from moe_ckpt.reading.reader import open_step
from tests.support.tiny_moe import TinyMoE, loader
from tests.unit.builders import context
from tests.unit.engine_parts import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "own_policy.md"


class Failure(RuntimeError):
    pass


class FailAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Failure


def documented_policy():
    return documented().OneLayer


def documented():
    """The code of the page, all of it in one module."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    module = ModuleType("own_policy")
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    exec(compile("from __future__ import annotations\n" + code, str(PAGE), "exec"), module.__dict__)
    return module


def fit(store, *callbacks):
    checkpoint = MoECheckpoint(documented_policy()(), store, save_last=False, when_busy="wait")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=8,
        callbacks=[*callbacks, checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=True,
    )
    pl.seed_everything(11, verbose=False)
    trainer.fit(TinyMoE(layers=2, experts=4), loader(64))
    return checkpoint


def test_the_documented_policy_trains_fails_and_comes_back(tmp_path):
    assert isinstance(documented_policy()(), Policy)
    with pytest.raises(Failure):
        fit(tmp_path / "run", FailAt(5))
    release_host_memory(tmp_path / "run")
    _, manifest = open_step(tmp_path / "run")
    versions = {layer: {manifest.operators[f"expert/{layer}/{e}"].step for e in range(4)} for layer in range(2)}
    assert manifest.policy == {"name": "one_layer", "every_n_steps": 1}
    assert manifest.step == 5
    assert versions == {0: {5}, 1: {4}}, "one layer at each step, in turn"
    checkpoint = fit(tmp_path / "run")
    assert checkpoint.restored_step == 5
    assert checkpoint.last is not None
    assert checkpoint.last.lost_tokens == 2 * 4, "a batch of 4 with top-2, one layer, one step"


def test_the_documented_needs_and_wrapper():
    page = documented()
    assert needs_of(page.OneLayer()) == Needs()
    assert needs_of(page.OneLayerBySize(every_n_steps=4)) == Needs(sizes=True, partial=True, period_steps=4)
    assert needs_of(page.OneLayerByGateWeights()) == Needs(popularity="gate_weights", partial=True)
    later = page.From(MoEvement(order="soft_count"), first_step=20)
    assert needs_of(later) == replace(needs_of(later.policy), next_due=None)
    facts = [context(MODEL, step, last_step=step - 1) for step in (3, 19, 20)]
    assert [bool(page.From(Dense(), first_step=20).plan(known)) for known in facts] == [False, False, True]
    assert page.policy == AnyOf([MoC(k=1), Dense(every_n_steps=1000)])


def test_the_page_names_what_there_is():
    text = PAGE.read_text()
    rows = re.findall(r"^\| (`.*?) \|", text.partition("| Need |")[2].partition("\n\n")[0], re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {field.name for field in fields(Needs)}
    groups = get_type_hints(PolicyContext)
    for group, name in re.findall(r"context\.(\w+)(?:\.(\w+))?", text):
        assert not name or hasattr(groups[group], name) or name in {field.name for field in fields(groups[group])}
    table = text.partition("| Group |")[2].partition("\n\n")[0]
    for group, row in re.findall(r"^\| `context\.(\w+)` \|(.*)$", table, re.M):
        names = {field.name for field in fields(groups.pop(group))}
        assert group == "measured" or names <= set(re.findall(r"`(\w+)`", row))
    assert not groups


@dataclass(frozen=True)
class Gradients:
    """Saves everything at each fourth step, and only gradients between."""

    needs = Needs(gradients="as_consumed", alone=True)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        run, everything = context.run, context.model.catalog.everything
        if run.last_step is None or run.step % 4 == 0:
            return SnapshotPlan(run.step, everything)
        return SnapshotPlan(run.step, gradients=everything)

    def check(self, catalog: Catalog) -> None:
        """Takes every model."""

    def describe(self) -> dict[str, str]:
        return {"name": "gradients"}


def test_a_log_of_steps_that_save_nothing_in_full(tmp_path):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    memory = Memory(directory=tmp_path, storage_every=100)
    with attach(model, optimizer, policy=Gradients(), dirpath=tmp_path / "store", memory=memory) as ckpt:
        ckpt.resume()
        for step in range(1, 7):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            ckpt.after_step(step)
        assert ckpt.last.skips == 0
        assert ckpt.last.gradient_factor > 1
