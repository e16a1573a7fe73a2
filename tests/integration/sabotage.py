"""What a run of ``crash_run`` can do wrong on purpose: one thing that exact recovery needs is left out.

Everything here replaces parts of the library in the process that calls ``apply``, and in no other. That process ends
with its run, so nothing is put back.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_ckpt.boost.life import Boosting
from moe_ckpt.callbacks import host
from moe_ckpt.commit.persisting import MemorySealer
from moe_ckpt.driver import torch_model
from moe_ckpt.gradient_log import densify, optimizers, returning
from moe_ckpt.gradient_log import replaying as log_replaying
from moe_ckpt.gradient_log.recording import RunLog
from moe_ckpt.gradient_log.replaying import LoggedSteps
from moe_ckpt.gradient_log.returning import StoredLog
from moe_ckpt.memory.slot import Slot
from moe_ckpt.modeling import module_state, training_state
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.reading.index import TensorIndex
from moe_ckpt.recovery import replay
from moe_ckpt.run import planning
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.slices.snapshot import Snapshot
from moe_ckpt.testing import kill_process
from moe_ckpt.windows.replay import WindowReplay
from tests.support.standstill import never_returns
from tests.support.tiny_moe import Router, TinyMoE


def apply(names: str) -> None:
    """Do all of these wrong from now on; names in ``SABOTAGES`` with commas between, or ""."""
    for name in filter(None, names.split(",")):
        SABOTAGES[name]()


def _hyperparameters_not_loaded() -> None:
    """Learning rate, weight decay, betas stay those of a fresh optimizer."""
    training_state.write_groups = lambda optimizer, groups: None


def _schedulers_not_loaded() -> None:
    _change_what_lightning_gets(lambda stored: {**stored, "lr_schedulers": []})


def _position_not_loaded() -> None:
    """The loader begins its epoch anew, while the loops go on in the middle of it."""

    def without_loader(stored: Mapping[str, Any]) -> Mapping[str, Any]:
        fit = stored["loops"]["fit_loop"]
        assert fit["state_dict"].get("combined_loader"), "the loader's state is kept elsewhere now"
        return {**stored, "loops": {**stored["loops"], "fit_loop": {**fit, "state_dict": {}}}}

    _change_what_lightning_gets(without_loader)


def _change_what_lightning_gets(change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    restore = host.restore_checkpoint
    host.restore_checkpoint = lambda trainer, stored, path: restore(trainer, change(stored), path)


def _rng_not_restored() -> None:
    torch_model.restore_rng = lambda state: None


def _router_state_not_loaded() -> None:
    """Buffers of routers keep the values that the module was built with; all others are loaded."""
    write = module_state.write

    def partly(model: Any, varying: Any, stored: Mapping[str, Any]) -> None:
        own = {name: value for name, value in module_state.buffers(model).items() if ".gate." in name}
        assert own, "the model has no router with buffers"
        write(model, varying, {**stored, "buffers": {**stored["buffers"], **own}})

    module_state.write = partly


def _unchecked() -> None:
    """Replay does not look whether it repeats what was recorded."""
    replay.require_repeated = lambda *_: None


def _steps_not_loaded() -> None:
    """The step count of a stack of experts comes with its home operator only, not with every slice."""
    _change_windows(lambda index, step, key: key.startswith("optim/"))


def _slices_not_replaced() -> None:
    """In a stack of which some experts are anchored, the others keep what the optimizer made of them."""
    _change_windows(
        lambda index, step, key: key.startswith("model/") and any(s.file.step <= step for s in index.tensors[key])
    )


def _change_windows(leave_out: Callable[[TensorIndex, int, str], bool]) -> None:
    """Replay does not see what ``leave_out`` names of what only replay needs, by step and key."""
    begin = WindowReplay.__init__

    def changed(self: WindowReplay, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        index = self._index
        left = {
            step: {key: group for key, group in groups.items() if not leave_out(index, step, key)}
            for step, groups in index.replay.items()
        }
        assert left != index.replay, "the window has nothing of this kind"
        self._index = replace(index, replay=left)

    WindowReplay.__init__ = changed


def _frozen_in_bf16() -> None:
    """All frozen weights are saved in bfloat16, also those that kernels read as they are."""
    set_types = CheckpointSession.set_compute_types
    CheckpointSession.set_compute_types = lambda self, types: set_types(
        self, dict.fromkeys(self.catalog.parameters, "BF16")
    )


def _no_step_0() -> None:
    """Nothing is saved before training, and the first window is as sparse as any."""
    begin = MoEvement._begin
    CheckpointSession.begin_run = lambda self, capture, step, *, wait: None
    MoEvement._begin = lambda self, context: begin(self, replace(context, run=replace(context.run, last_step=0)))


def _other_weights() -> None:
    """The model begins with other weights and other random numbers, as a program does that seeds nothing."""
    configure = TinyMoE.configure_optimizers

    def changed(self: TinyMoE) -> Any:
        generator = torch.Generator().manual_seed(98765)
        for parameter in self.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        torch.manual_seed(98765)
        return configure(self)

    TinyMoE.configure_optimizers = changed


def _boost_not_loaded() -> None:
    """What stale experts have still to make up is forgotten by a restart."""
    begin = Boosting.begin
    Boosting.begin = lambda self, plain, *args, **kwargs: begin(self, {}, *args, **kwargs)


def _fractions_not_loaded() -> None:
    """What rounding left of a boosted expert's portion is."""

    def without(state: Mapping[str, Any]) -> Mapping[str, Any]:
        carried = {layer: torch.zeros_like(rows) for layer, rows in state.get("carried", {}).items()}
        return {**state, "carried": carried}

    begin = Boosting.begin
    Boosting.begin = lambda self, plain, *args, **kwargs: begin(
        self, {**plain, "boost": without(plain.get("boost", {}))}, *args, **kwargs
    )


def _chooses_by_sorting() -> None:
    """The model's routers choose in a way that nobody can take part in."""

    def forward(self: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, experts = F.softmax(F.linear(x, self.weight).float(), dim=-1).sort(dim=-1, descending=True)
        return scores[:, : self.top_k].to(x.dtype), experts[:, : self.top_k]

    Router.forward = forward


def _updates_with_own_hyperparameters() -> None:
    """A gradient log's updates are made with what the new optimizer was built with."""
    optimizers._set = lambda optimizer, update: None


def _gradients_before_clipping() -> None:
    """A gradient log has what backward gave, not what the optimizer consumed."""
    clip, step, before = pl.LightningModule.clip_gradients, RunLog.step, {}

    def clipped(self: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        before.update({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})
        clip(self, *args, **kwargs)

    def unclipped(self: RunLog, tensors: Any) -> Any:
        found = step(self, tensors)
        return replace(found, tensors=[replace(each, local=before[each.parameter]) for each in found.tensors])

    pl.LightningModule.clip_gradients, RunLog.step = clipped, unclipped


def _anchors_too_early() -> None:
    """Anchors are loaded before the update of their own step."""
    gradients, load = StoredLog.gradients, StoredLog.load

    def loaded_first(self: StoredLog, step: int) -> Any:
        load(self, step)
        return gradients(self, step)

    StoredLog.gradients = loaded_first
    StoredLog.load = lambda self, step: load(self, step) if step == self.steps[0] else None


def _counts_not_set() -> None:
    """A parameter of which some rows are anchored has the step count that its home operator's anchor says."""
    log_replaying._set_counts = lambda *args: None


def _newest_update_left_out() -> None:
    made = log_replaying._updates
    log_replaying._updates = lambda log, step: made(log, step) if step != log.steps[-1] else iter(())
    LoggedSteps.check = lambda *_: None
    log_replaying._set_counts = lambda *args: None


def _killed_in_a_replay() -> None:
    """After the first anchors and one update."""
    load, calls = StoredLog.load, []

    def deadly(self: StoredLog, step: int) -> None:
        load(self, step)
        calls.append(step)
        if len(calls) == 2:
            kill_process()

    StoredLog.load = deadly


def _rounded_in_the_log_only() -> None:
    """Gradients are saved in fewer bits than the optimizer consumed."""
    made = RunLog.__init__

    def narrow(self: RunLog, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self._stored = "BF16"

    RunLog.__init__ = narrow


def _killed_while_a_log_is_made_dense() -> None:
    """After the first share is on storage."""
    write = densify.write_made_share

    def deadly(*args: Any) -> None:
        write(*args)
        kill_process()

    densify.write_made_share = deadly


def _update_fails() -> None:
    """The user's program fails when an update was made, before anybody has seen its end."""
    updates = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(updates) == 9:
            raise RuntimeError("after the 9th update")

    register_optimizer_step_post_hook(fail)


def _loss_becomes_nan() -> None:
    """Seven steps are well, and then the loss is not finite."""
    step = TinyMoE.training_step

    def training_step(self: TinyMoE, batch: Any, batch_idx: int) -> torch.Tensor:
        return step(self, batch, batch_idx) * (float("nan") if self.trainer.global_step == 7 else 1.0)

    TinyMoE.training_step = training_step  # type: ignore[method-assign]


def _one_shard_becomes_nan() -> None:
    """The eighth update writes NaN into a moment of what rank 1 alone holds."""
    updates = itertools.count(1)

    def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if next(updates) == 8 and os.environ["RANK"] == "1":
            moment = next(s["exp_avg"] for s in optimizer.state.values() if isinstance(s["exp_avg"], DTensor))
            moment.to_local().view(-1)[0] = float("nan")

    register_optimizer_step_post_hook(spoil)


def _tells_at_once() -> None:
    returning.TELL_SECS = 0.0


def _seals_slowly() -> None:
    """It takes longer than an iteration."""
    seal = Slot.seal

    def sealed(*args: Any) -> None:
        time.sleep(0.3)
        seal(*args)

    Slot.seal = sealed  # type: ignore[method-assign]


def _seals_survivors_late() -> None:
    """Of what survivors keep, headers are written some seconds after the copy."""
    seal = MemorySealer._seal_own

    def late(sealer: MemorySealer, snapshot: Snapshot, *more: Any) -> bytes:
        if snapshot.identity.parting:
            time.sleep(3.0)
        return seal(sealer, snapshot, *more)

    MemorySealer._seal_own = late  # type: ignore[method-assign]


def _stands_still() -> None:
    """In torchrun's first start rank 1 dies in its seventh batch, and rank 0 is in it for ever, as NCCL would be."""
    step = TinyMoE.training_step

    def stands(self: TinyMoE, batch: Any, number: int) -> Any:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and self.global_step == 6:
            kill_process() if os.environ["RANK"] == "1" else never_returns()
        return step(self, batch, number)

    TinyMoE.training_step = stands  # type: ignore[method-assign]


def _gates_apart() -> None:
    """The home of what is no expert's of a stack is not anchored with the experts."""
    now = planning.coupled_operators
    planning.coupled_operators = lambda catalog, specs: tuple(
        frozenset(op for op in group if op.startswith("expert/")) for group in now(catalog, specs)
    )


SABOTAGES: dict[str, Callable[[], None]] = {
    "stands still": _stands_still,
    "hyperparameters not loaded": _hyperparameters_not_loaded,
    "schedulers not loaded": _schedulers_not_loaded,
    "steps not loaded": _steps_not_loaded,
    "position not loaded": _position_not_loaded,
    "rng not restored": _rng_not_restored,
    "router state not loaded": _router_state_not_loaded,
    "frozen in bf16": _frozen_in_bf16,
    "slices not replaced": _slices_not_replaced,
    "no step 0": _no_step_0,
    "other weights": _other_weights,
    "unchecked": _unchecked,
    "boost not loaded": _boost_not_loaded,
    "fractions not loaded": _fractions_not_loaded,
    "chooses by sorting": _chooses_by_sorting,
    "gates apart": _gates_apart,
    "updates with own hyperparameters": _updates_with_own_hyperparameters,
    "gradients before clipping": _gradients_before_clipping,
    "anchors too early": _anchors_too_early,
    "counts not set": _counts_not_set,
    "killed in a replay": _killed_in_a_replay,
    "rounded in the log only": _rounded_in_the_log_only,
    "killed while a log is made dense": _killed_while_a_log_is_made_dense,
    "newest update left out": _newest_update_left_out,
    "update fails": _update_fails,
    "loss becomes nan": _loss_becomes_nan,
    "one shard becomes nan": _one_shard_becomes_nan,
    "tells at once": _tells_at_once,
    "seals slowly": _seals_slowly,
    "seals survivors' late": _seals_survivors_late,
}
