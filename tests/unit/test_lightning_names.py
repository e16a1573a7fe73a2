"""The private names of Lightning that ``callbacks.compat`` lists are in the installed Lightning."""

from __future__ import annotations

import lightning
import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle

from moe_ckpt.callbacks import compat

LISTED = [(owner, name) for owner, names in compat.ATTRIBUTES.items() for name in names]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Objects of a fit that has validated once, and of classes that it does not make."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    where = tmp_path_factory.mktemp("fit")
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, limit_val_batches=1, default_root_dir=where, **quiet)
    trainer.fit(BoringModel())
    loop = trainer.fit_loop
    epoch, loaders = loop.epoch_loop, loop._combined_loader
    others = BackboneFinetuning(), StochasticWeightAveraging(1.0), _MaxSizeCycle([[1]])
    return trainer, loop, epoch, epoch.val_loop, loaders, *others


@pytest.mark.parametrize(("owner", "name"), LISTED, ids=lambda part: getattr(part, "__name__", part))
def test_lightning_has_it(owner, name, objects):
    [instance] = [thing for thing in objects if isinstance(thing, owner)] or [owner()]
    assert hasattr(instance, name), (
        f"Lightning {lightning.__version__} has no {owner.__name__}.{name}, which moe_ckpt.callbacks needs: find what "
        "replaces it, and name that in moe_ckpt/callbacks/compat.py"
    )


def test_objects_are_read_and_written_by_names_without_the_underscore():
    cycle = _MaxSizeCycle([[1]])
    compat.Private(cycle).consumed = [True]
    assert cycle._consumed == compat.Private(cycle).consumed == [True]
    with pytest.raises(KeyError, match="iterables"):
        print(compat.Private(cycle).iterables)
