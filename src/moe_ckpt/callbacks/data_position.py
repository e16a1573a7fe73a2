"""The data's order after a resume in the middle of an epoch.

Lightning (2.6) makes the loader's iterator, which goes to the stored position, before it tells the sampler
which epoch it is. So a sampler that shuffles by epoch (``DistributedSampler``) would go on with the order
of the first epoch: some samples twice, others not at all.
"""

from __future__ import annotations

from typing import Any


def take_position_again(trainer: Any) -> None:
    """Make the training loader's iterator anew, with samplers that know their epoch.

    Called at ``on_train_start`` of a resumed run. Leaves loaders alone whose samplers know no epochs, or
    keep their position themselves (those look at the epoch later, and must not be asked in between).
    """
    loop = trainer.fit_loop
    loader, epoch = loop._combined_loader, loop.epoch_progress.current.processed
    if loader is None or not epoch:
        return
    setters = [setter for each in loader.flattened for setter in _epoch_setters(each)]
    if not setters:
        return
    position = loader._state_dicts()
    for set_epoch in setters:
        set_epoch(epoch)
    loader._load_state_dicts(position)
    iter(loop._data_fetcher)


def _epoch_setters(loader: object) -> list[Any]:
    """``set_epoch`` of the loader's sampler and of its batch sampler's, unless they are stateful."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    stateless = [sampler for sampler in samplers if not hasattr(sampler, "load_state_dict")]
    found = {id(sampler): getattr(sampler, "set_epoch", None) for sampler in stateless}
    return [set_epoch for set_epoch in found.values() if callable(set_epoch)]
