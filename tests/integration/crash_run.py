"""The program that is killed: a small MoE under real Lightning, told what to do by one JSON object.

    python -m tests.integration.crash_run '{"store": "ckpt", "log": "run.jsonl", "out": "final.pt"}'

Started again with the same words it goes on by itself, as a user's program would. What happens is
appended to ``log``, one synced line of JSON each, so that a reader can tell after any kill what had been
done; the final state goes to ``out``. Nothing here asks the library what it did, except where its own
claims are logged to be compared with a recount.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.optim.adam as adam_module
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.tokens_at_risk import InTurn
from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.core import cadence
from moe_ckpt.data import RecoverableDistributedSampler
from moe_ckpt.driver import run as driver_run
from moe_ckpt.driver import torch_model
from moe_ckpt.format.manifest import MANIFEST_NAME
from moe_ckpt.format.slot import GRADIENTS, decode_slot
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies import Dense, GradientLog, MoC, MoEtion
from moe_ckpt.run.agreement import StepAgreement
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import KillSchedule, crash_at, kill_process, watch_phases
from tests.integration import memory_phases, sabotage
from tests.integration.kinds import KINDS, FamilyMoE, text_loader
from tests.integration.pauses import stands_still
from tests.support.bad_disks import spoil_disk
from tests.support.constants import policy_of
from tests.support.networks import enter
from tests.support.opened import note_shards
from tests.support.plain_store import read_body
from tests.support.resources import taken
from tests.support.round_robin import RoundRobin
from tests.support.streams import Stream
from tests.support.tiny_moe import Router, TinyMoE, Tokens, loader

POLICIES = {
    "dense": Dense,
    "moc": MoC,
    "moetion": MoEtion,
    "moetion in turn": InTurn,
    "moevement": lambda window, **options: policy_of("MoEvement", {"window": window, **options}),
    "log": RoundRobin,
    "gradient-log": GradientLog,
    "gemini": lambda interval, **options: policy_of("Gemini", {"every_n_steps": interval, **options}),
    "checkfreq": lambda steps, **options: policy_of("CheckFreq", {"profile_steps": steps, **options}),
}
SAMPLERS = {
    "stateful": StatefulDistributedSampler,
    "plain": DistributedSampler,
    "recoverable": RecoverableDistributedSampler,  # for lives of other numbers of ranks
}


@dataclass(frozen=True)
class Run:
    """Everything that decides the run. ``store``: None trains without MoECheckpoint.

    policy: its name, and Dense's, Gemini's or MoEtion's interval, MoC's K, MoEvement's W, or the steps that CheckFreq
    measures before its first checkpoint. options: its other arguments.
    crash: (phase, n) kills this process the n-th time that the phase, one of ``memory_phases`` too, is reached;
    ("read", n) at the n-th read of the store; ("raise", n) and ("sigterm", n) stop it at the n-th backward pass;
    ("stop", n) stops it by SIGSTOP before that, when the ranks have agreed on the step before, ("stop updated", n) when
    it has written the n-th update, both with none of its copies on its way to a peer;
    ("compute, sealed", n) kills it there once the step before is sealed, ("compute, stored", n) once storage has a
    checkpoint besides the first, ("forward", n) before that, ("reduced", n)
    after it, when all gradients are reduced, ("updating", n) in the optimizer, ("failing", n) makes the optimizer
    raise, ("updated", n) kills when it has written the n-th update, ("hook", n) in the last callback's hook after that,
    ("ended", n) when its step is final, and its peers do not know its tokens; ("callback raises", n) in its hook after
    the n-th update, ("module raises", n) and ("schedule raises", n) alike; ("train end", 1) when training ended;
    ("validating", n) raises in the n-th batch of validations and ("epoch end", n) at the n-th end of an epoch,
    ("killed validating", n) and ("killed at epoch end", n) kill there.
    kills: a schedule of ``KillSchedule.to_json``, for runs that restart by themselves; each kill happens once, and with
    ``memory`` before the backward pass, once the step before is sealed.
    memory: directory for slots, which survive the process; None: private memory.
    to_storage: every so many steps a checkpoint goes on from there to storage. prior_mtbf_secs: as if the run had
    failed once in so long before it began, instead of ``cadence.PRIOR_MTBF_SECS``.
    replicas: copies on peers; each rank is a node of its own then, whose memory is a directory in ``memory``.
    memory_options: other arguments of ``Memory``.
    sampler: "none": the data are a stream, whose length nobody knows.
    sharded: several ranks divide all tensors by FSDP2; else DDP.
    fixed_buckets: DDP does not rearrange its buckets after a process's first step.
    watched: each shard of the store that a process opens to read is noted (``lives.shards_read``); and in the log what
    the process takes of the system when training begins.
    sabotage: names in ``sabotage.SABOTAGES``, with commas between: what this process does wrong.
    networks: of each rank the network that its copies go over (``tests.support.networks``); training's own stays.
    logged: what the trainer's logger gets of the library at each step is in the log, too, as "metrics"; "at" is
    when, and "measured" what the ranks had agreed on.
    bad_disk: (how, step): see ``tests.support.bad_disks.spoil_disk``.
    """

    store: str | None
    log: str | None = None
    out: str | None = None
    policy: tuple[str, int | str] = ("dense", 1)
    options: Mapping[str, Any] = field(default_factory=dict)
    crash: tuple[str, int] | None = None
    kills: str | None = None
    memory: str | None = None
    to_storage: int | str = 1
    replicas: int = 0
    memory_options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "plain"
    samples: int = 40
    epochs: int = 2
    workers: int = 0
    validate: bool = False
    beside: tuple[str, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callback: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    sampler: str = "stateful"
    hashes: bool = False
    slow_copy_secs: float = 0.0
    sharded: bool = False
    fixed_buckets: bool = False
    watched: bool = False
    sabotage: str = ""
    networks: tuple[str, ...] = ()
    logged: bool = False
    bad_disk: tuple[str, int] | None = None
    prior_mtbf_secs: float | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        return cls(**json.loads(text))


class StopHere(RuntimeError):
    """Raised by a test in the middle of training."""


class Recorder(pl.Callback):
    """Writes down what happened, step by step, before any checkpoint of that step can begin."""

    def __init__(self, run: Run, on_compute: Callable[[int], None]) -> None:
        self.run = run
        self.on_compute = on_compute
        self.lines: list[dict[str, Any]] = []
        self.layers: list[torch.Tensor] = []
        self.scored: list[torch.Tensor] = []
        self.ours: MoECheckpoint | None = None
        self._hooks: list[Any] = []

    def measured(self) -> dict[str, float | None]:
        """What the policy knew at the newest step."""
        return {} if self.ours is None else asdict(self.ours._fit.session._booking.consensus.measured)

    def note(self, rank: int, **what: Any) -> None:
        self.lines.append(what)
        if self.run.log is None:
            return
        path = self.run.log + (f".{rank}" if rank else "")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, (json.dumps(what) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ours = _ours(trainer)
        routers = [m for m in pl_module.modules() if isinstance(m, Router)]
        experts = pl_module.hparams.get("experts", 4)
        self.layers = [torch.zeros(experts, dtype=torch.int64) for _ in routers]
        self.scored = [torch.zeros(experts, dtype=torch.int64) for _ in routers]
        for at, router in enumerate(routers):
            self._hooks.append(router.register_forward_hook(lambda m, x, out, at=at: self._routed(at, m, x[0], out)))

    def _routed(self, at: int, module: torch.nn.Module, x: torch.Tensor, out: Any) -> None:
        """What the router returned; and the best experts by its scores, which nothing has changed."""
        if module.training:
            for chosen in out[1].flatten().tolist():
                self.layers[at][chosen] += 1
            with torch.no_grad():
                order = torch.nn.functional.linear(x, module.weight).float().sort(dim=-1, descending=True).indices
            for chosen in order[:, : module.top_k].flatten().tolist():
                self.scored[at][chosen] += 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All is restored by now, save the RNG: MoECheckpoint's turn comes after this callback's."""
        if self.run.ranks > 1:
            torch.manual_seed(100 + trainer.global_rank)  # Lightning gives all ranks the same random numbers
        callback = _ours(trainer)
        step = None if callback is None else callback.restored_step
        what: dict[str, Any] = {"event": "start", "step": step, "job": os.environ.get("MASTER_PORT")}
        if self.run.watched:
            what["resources"] = taken()
        if step is not None and self.run.store is not None and callback.last_model_path:  # no window under way
            directory = os.path.basename(callback.last_model_path)
            manifest = read_body(Path(self.run.store) / directory / "MANIFEST.json")
            what |= {"directory": directory, "manifest": manifest, **_books(callback)}
        if self.run.hashes and step is not None and callback._fit.driver.replaying is None:
            what |= {"hashes": hashes(pl_module, trainer.optimizers[0]), "counts": counts(pl_module, trainer)}
        self.note(trainer.global_rank, **what)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        index = trainer.fit_loop.epoch_loop.total_batch_idx
        callback = _ours(trainer)
        acked = None if callback is None or callback.last is None else callback.last.committed_step
        what = {
            "event": "batch",
            "index": index,
            "step": trainer.global_step,
            "loss": float(pl_module.losses[index]).hex(),
            "acked": acked,
            "k": None if callback is None or callback.last is None else callback.last.k,
            "routed": [layer.tolist() for layer in self.layers],
            "scored": [layer.tolist() for layer in self.scored],
            "owed": None if callback is None or callback.last is None else callback.last.owed_tokens,
        }
        for layer in (*self.layers, *self.scored):
            layer.zero_()
        if self.run.hashes:
            what |= {"hashes": hashes(pl_module, trainer.optimizers[0]), "counts": counts(pl_module, trainer)}
        self.note(trainer.global_rank, **what)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callback = _ours(trainer)
        self.note(trainer.global_rank, event="end", **({} if callback is None else _books(callback)))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()


class Noted(Logger):
    """The trainer's logger: what it gets of the library goes to the recorder's log."""

    name, version = "noted", 0

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.rank = recorder, int(os.environ.get("RANK", "0"))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        ours = {name.removeprefix("moe_ckpt/"): value for name, value in metrics.items() if "moe_ckpt/" in name}
        if ours:
            more = {"at": time.monotonic(), "measured": self.recorder.measured()}
            self.recorder.note(self.rank, event="metrics", step=step, **more, **ours)


class DeadlyRecorder(Recorder):
    """Kills where the run says so."""

    @property
    def _between_updates(self) -> bool:
        if self.run.crash is None:
            return self.run.memory is not None
        return self.run.crash[0] in BEFORE_BACKWARD

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self._between_updates:
            self.on_compute(trainer.global_step)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._between_updates:
            self.on_compute(trainer.global_step)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._stop("validating", "killed validating")

    def on_train_epoch_end(self, *_: Any) -> None:
        self._stop("epoch end", "killed at epoch end")

    def _stop(self, raises: str, kills: str) -> None:
        if self.run.crash is None or self.run.crash[0] not in (raises, kills):
            return
        self.stops = getattr(self, "stops", 0) + 1
        if self.stops == self.run.crash[1]:
            time.sleep(0.5)  # the step is sealed by then
            if self.run.crash[0] == raises:
                raise StopHere(raises)
            kill_process()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.run.crash is not None and self.run.crash[0] == "train end":
            time.sleep(0.5)  # the last step is sealed by then
            kill_process()
        super().on_train_end(trainer, pl_module)


def _ours(trainer: pl.Trainer) -> MoECheckpoint | None:
    return next((c for c in trainer.callbacks if isinstance(c, MoECheckpoint)), None)


def _books(callback: MoECheckpoint) -> dict[str, Any]:
    """The library's own claims, for a test to compare with its recount."""
    book = callback._fit.session.run_ledger.tokens
    return {
        "applied": book.applied.tolist(),
        "faults": [[f.restored_step, f.lost_tokens, f.stale_experts] for f in book.faults],
        "plt": book.plt,
        "lost": book.lost_tokens,
        "routed_total": book.routed_tokens,
    }


def hashes(module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of every expert's rows (parameters, exp_avg, exp_avg_sq) and of all that is no expert's.

    The shared ``step`` count of a stacked parameter belongs to no expert's rows.
    """
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        state = {k: v for k, v in sorted(optimizer.state.get(parameter, {}).items()) if torch.is_tensor(v)}
        if ".experts." not in name:
            _add(found, "non_expert", name, parameter, *state.values())
            continue
        layer = name.split(".")[1]
        rest = name.split(".experts.")[1]
        for expert in range(parameter.shape[0]) if not rest[0].isdigit() else [int(rest.split(".")[0])]:
            row = slice(expert, expert + 1) if not rest[0].isdigit() else slice(None)
            parts = [parameter[row], *(v[row] for k, v in state.items() if v.shape == parameter.shape)]
            _add(found, f"expert/{layer}/{expert}", name, *parts)
    for name, buffer in module.named_buffers():
        _add(found, "non_expert", name, buffer)
    return {key: value.hexdigest() for key, value in found.items()}


def counts(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, int]:
    """Updates that the optimizer has counted, of parameters that one expert has to itself."""
    state = trainer.optimizers[0].state
    listed = {name: p for name, p in module.named_parameters() if re.search(r"\.experts\.\d", name)}
    return {name: int(state[each]["step"]) for name, each in listed.items() if "step" in state.get(each, {})}


def _add(found: dict[str, Any], key: str, name: str, *tensors: torch.Tensor) -> None:
    digest = found.setdefault(key, hashlib.sha256())
    digest.update(name.encode())
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def final_state(trainer: pl.Trainer, module: TinyMoE) -> dict[str, Any]:
    """All that must be equal at the end, as one flat dict of tensors and plain values."""
    state: dict[str, Any] = {f"model/{k}": _own(v) for k, v in module.state_dict().items()}
    for i, optimizer in enumerate(trainer.optimizers):
        names = {id(p): name for name, p in module.named_parameters()}
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                copied = _own(value) if torch.is_tensor(value) else value
                state[f"optim/{i}/{names[id(parameter)]}/{key}"] = copied
        for j, group in enumerate(optimizer.param_groups):
            state |= {f"group/{i}/{j}/{k}": v for k, v in group.items() if k != "params"}
    for i, config in enumerate(trainer.lr_scheduler_configs):
        state[f"scheduler/{i}"] = config.scheduler.state_dict()
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        if average is not None:
            state |= {f"average/{k}": v.detach().clone() for k, v in average.state_dict().items()}
        if isinstance(callback, OwnAverage):
            state |= {f"own/{k}": v.clone() for k, v in callback.own_average.items()}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        state["scaler"] = scaler.state_dict()
    numpy_state = np.random.get_state()
    state["rng"] = [torch.get_rng_state(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]]
    state["progress"] = [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.total_batch_idx]
    return state


def _sharded(kind: type[TinyMoE]) -> type[TinyMoE]:
    class Sharded(kind):  # type: ignore[valid-type, misc]
        def configure_model(self) -> None:
            if not isinstance(self, FSDPModule):
                mesh = self.device_mesh["data_parallel"]
                for block in self.blocks:
                    moe = getattr(block, "moe", None)
                    fully_shard(block if moe is None else moe.experts, mesh=mesh)
                fully_shard(self, mesh=mesh)

    return Sharded


def _own(value: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part of a tensor."""
    value = value.detach()
    return (value.to_local() if isinstance(value, DTensor) else value).clone()


def _memory(run: Run, root: str, rank: int) -> Memory:
    directory = Path(root, f"node_{rank}") if run.replicas else Path(root)
    directory.mkdir(exist_ok=True)
    options = {"storage_every": run.to_storage, "replicas": run.replicas, **run.memory_options}
    return Memory(directory=directory, **options)


def build(run: Run, rank: int = 0, **more: Any) -> tuple[pl.Trainer, TinyMoE, Recorder]:
    """Trainer, module and recorder, as a fresh process makes them. ``more``: MoECheckpoint arguments."""
    on_phase, on_compute = _faults(run, rank)
    watch_phases(on_phase)
    recorder = (Recorder if run.crash is None and run.kills is None else DeadlyRecorder)(run, on_compute)
    callbacks: list[pl.Callback] = [recorder, *(_beside(name, run) for name in run.beside)]
    if run.store is not None:
        name, number = run.policy
        policy = POLICIES[name](number, **run.options)
        if run.memory is not None:
            more["memory"] = _memory(run, run.memory, rank)
        callbacks.append(MoECheckpoint(policy, run.store, **{**run.callback, **more}))
    options: dict[str, Any] = {"log_every_n_steps": 1} | dict(run.trainer) if run.logged else dict(run.trainer)
    if run.kind == "overflowing":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    if run.ranks > 1:
        options["use_distributed_sampler"] = False
        options["strategy"] = DDPStrategy(process_group_backend="gloo", find_unused_parameters=run.fixed_buckets)
    if run.sharded:
        options["strategy"] = ModelParallelStrategy(run.ranks, 1, process_group_backend="gloo")
    pl.seed_everything(11, verbose=False)
    kind = _sharded(KINDS[run.kind]) if run.sharded else KINDS[run.kind]
    module = kind(**{"layers": 2, "experts": 4, **run.model})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=run.ranks,
        max_epochs=run.epochs,
        callbacks=callbacks,
        logger=Noted(recorder) if run.logged else False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=run.store is not None or "modelcheckpoint" in run.beside,
        limit_val_batches=None if run.validate else 0,
        num_sanity_val_steps=0,
        **options,
    )
    return trainer, module, recorder


def _faults(run: Run, rank: int) -> tuple[Callable[[str], None] | None, Callable[[int], None]]:
    if run.crash is not None and run.crash[0] == "read":
        _kill_at_read(run.crash[1])
    elif run.crash is not None and run.crash[0] in memory_phases.PHASES:
        memory_phases.kill_in(*run.crash)
    elif run.crash is not None and run.crash[0] == "compute, sealed":
        return None, _kills_once_sealed(run.crash[1])
    elif run.crash is not None and run.crash[0] == "compute, stored":
        return None, _kills_once_stored(Path(str(run.store)), run.crash[1])
    elif run.crash is not None and run.crash[0] in ("stop", "stop updated"):
        return _slow_copies(run), stands_still(*run.crash)
    elif run.crash is not None and run.crash[0] in ("raise", "sigterm", "forward"):
        return _slow_copies(run), _stops(*run.crash)
    elif run.crash is not None and run.crash[0] in DEADLY_UPDATES:
        _kill_at_update(*run.crash)
        return None, lambda step: None
    elif run.crash is not None and run.crash[0] in BETWEEN_BATCHES:
        return None, lambda step: None
    elif run.crash is not None:
        phase = crash_at(*run.crash)
        return phase, lambda step: phase("compute")
    if run.kills is not None:
        hook = KillSchedule.from_json(run.kills).hook(rank, f"{run.log}.kills")
        if run.memory is None:
            return hook.on_phase, hook.on_step
        return hook.on_phase, lambda step: (time.sleep(0.1), hook.on_step(step))[1]  # as a longer iteration does
    return _slow_copies(run), lambda step: None


def _slow_copies(run: Run) -> Callable[[str], None] | None:
    """In the middle of each copy: who changes live tensors too early tears the snapshot."""
    if not run.slow_copy_secs:
        return None
    return lambda phase: time.sleep(run.slow_copy_secs) if phase == "copy" else None


def _stops(how: str, n: int) -> Callable[[int], None]:
    """An error of the user's, or a scheduler that wants the machine, in the middle of an iteration."""
    passes = itertools.count(1)

    def stop(step: int) -> None:
        if next(passes) == n:
            if how == "raise":
                raise StopHere(f"after step {step}")
            time.sleep(0.5 if how == "forward" else 0.0)  # as in an iteration that takes longer than to seal a step
            os.kill(os.getpid(), signal.SIGTERM if how == "sigterm" else signal.SIGKILL)

    return stop


def _kills_once_sealed(n: int) -> Callable[[int], None]:
    """In the n-th backward pass of a process that seals each step, when it has sealed the step before."""
    passes, sealed, real = itertools.count(1), threading.Semaphore(0), Slot.seal

    def seal(slot: Slot, header: bytes) -> None:
        real(slot, header)
        if decode_slot(header, str(slot.path)).only != GRADIENTS:  # of a step in several slots this is the last
            sealed.release()

    def kill(step: int) -> None:
        if next(passes) == n:
            if not all(sealed.acquire(timeout=60.0) for _ in range(n - 1)):
                raise StopHere(f"not sealed before step {step + 1}")
            kill_process()

    Slot.seal = seal  # type: ignore[method-assign]
    return kill


def _kills_once_stored(store: Path, n: int) -> Callable[[int], None]:
    """In the n-th backward pass of a process, when the store has a checkpoint besides the first."""
    passes = itertools.count(1)

    def kill(step: int) -> None:
        if next(passes) == n:
            until = time.monotonic() + 60.0
            while len(list(store.glob(f"*/{MANIFEST_NAME}"))) < 2:
                if time.monotonic() > until:
                    raise StopHere(f"not stored before step {step + 1}")
                time.sleep(0.01)
            kill_process()

    return kill


BEFORE_BACKWARD = ("forward", "stop")
BETWEEN_BATCHES = ("train end", "validating", "epoch end", "killed validating", "killed at epoch end")
BEHIND_UPDATES: dict[str, tuple[type, str]] = {
    "callback raises": (DeadlyRecorder, "on_train_batch_end"),
    "module raises": (TinyMoE, "on_train_batch_end"),
    "schedule raises": (torch.optim.lr_scheduler.StepLR, "step"),
}
DEADLY_UPDATES = ("reduced", "updating", "failing", "updated", "hook", "ended", *BEHIND_UPDATES)


def _kill_at_update(when: str, n: int) -> None:
    """In this process only, which is about to die."""
    updates = itertools.count(1)

    def count(*_: Any) -> None:
        if next(updates) == n:
            time.sleep(0.3)  # other threads have sealed by then, and the others have ended the update
            if when == "failing" or when in BEHIND_UPDATES:
                raise StopHere("in an update, or behind it")
            kill_process()

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count()
            return real(*args, **kwargs)

        return call

    if when == "ended":
        real = StepAgreement.send

        def send(*args: Any) -> Any:
            time.sleep(0.2)  # other threads have sealed by then
            count()
            return real(*args)

        StepAgreement.send = send  # type: ignore[method-assign]
    elif when == "reduced":
        pl.LightningModule.on_before_optimizer_step = counting(pl.LightningModule.on_before_optimizer_step)
    elif when == "hook":
        MoECheckpoint.on_train_batch_end = counting(MoECheckpoint.on_train_batch_end)
    elif when in BEHIND_UPDATES:
        owner, name = BEHIND_UPDATES[when]
        hook = getattr(owner, name)

        def ends(self: Any, *args: Any) -> None:
            hook(self, *args)
            if not isinstance(self, torch.optim.lr_scheduler.StepLR) or self.last_epoch > 0:  # else it is being made
                count()

        setattr(owner, name, ends)
    elif when in ("updating", "failing"):
        adam_module.adam = counting(adam_module.adam)
    else:
        register_optimizer_step_post_hook(count)


def _kill_at_read(n: int) -> None:
    """In this process only, which is about to die."""

    class Deadly(LocalStorage):
        reads = 0

        def read(self, *args: Any) -> bytearray:
            Deadly.reads += 1
            if Deadly.reads == n:
                kill_process()
            return super().read(*args)

    driver_run.open_storage = Deadly


class Rebinding(pl.Callback):
    """A buffer is another tensor after each batch, and the second layer's experts get optimizer state at step 5."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pl_module.register_buffer("seen", torch.zeros(()))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if name.startswith("layers.1.") and ".experts." in name:
                parameter.requires_grad_(trainer.global_step >= 5)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        pl_module.seen = pl_module.seen + 1


class OwnAverage(pl.Callback):
    """Averages weights as users write it themselves: Lightning's classes have no part in it."""

    def __init__(self) -> None:
        self.own_average: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            value = parameter.detach()
            self.own_average.setdefault(name, value.clone()).lerp_(value, 0.3)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.own_average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.own_average = {name: value.clone() for name, value in state_dict["average"].items()}


def _beside(name: str, run: Run) -> pl.Callback:
    if name == "rebinding":
        return Rebinding()
    if name == "own average":
        return OwnAverage()
    if name == "modelcheckpoint":
        return ModelCheckpoint(f"{run.store}_beside", save_last=True, every_n_train_steps=4)
    if name == "ema":
        return EMAWeightAveraging(decay=0.8)
    return StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1, annealing_epochs=1)


def loaders(run: Run) -> tuple[Any, Any]:
    if issubclass(KINDS[run.kind], FamilyMoE):
        train = text_loader(run.samples)
    elif run.sampler == "none":
        part = run.ranks, int(os.environ.get("RANK", "0"))
        train = StatefulDataLoader(Stream(Tokens(run.samples), part=part), batch_size=4, num_workers=run.workers)
    elif run.ranks > 1 or run.sampler == "recoverable":
        # Lightning's own sampler for several ranks would hide the order of a shuffling loader from its state.
        dataset = Tokens(run.samples)
        sampler = SAMPLERS[run.sampler](dataset, run.ranks, int(os.environ.get("RANK", "0")), seed=3)
        train = StatefulDataLoader(dataset, batch_size=4, sampler=sampler, num_workers=run.workers)
    else:
        train = loader(run.samples, num_workers=run.workers)
    return train, (loader(8, shuffle=False) if run.validate else None)


def main(run: Run) -> None:
    """One life of the program."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    sabotage.apply(run.sabotage)
    rank = int(os.environ.get("RANK", "0"))
    if run.networks:
        _enter_between(run.networks[rank])
    if run.prior_mtbf_secs is not None:
        cadence.PRIOR_MTBF_SECS = run.prior_mtbf_secs
    if run.bad_disk is not None:
        spoil_disk(*run.bad_disk)
    if run.watched:
        note_shards(str(run.store), f"{run.log}.opened", rank)
    trainer, module, _ = build(run, rank)
    train(run, rank, trainer, module)


def _enter_between(network: str) -> None:
    """Join a network when all groups are made, and before copies are."""
    plain = torch_model.make_communicator

    def entering(*args: Any, **kwargs: Any) -> Any:
        comm = plain(*args, **kwargs)
        enter(network)
        return comm

    torch_model.make_communicator = entering


def train(run: Run, rank: int, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Trains to the end, and saves what came out: all of it or, if the process is killed meanwhile, nothing."""
    trainer.fit(module, *loaders(run))
    if run.out is not None:
        out = run.out + (f".{rank}" if rank else "")
        torch.save(final_state(trainer, module), f"{out}.part")
        os.replace(f"{out}.part", out)


if __name__ == "__main__":
    main(Run.from_json(sys.argv[1]))
