"""The program that ``faults`` breaks: a life of one rank of a small MoE under Lightning, which writes down what it is.

It asks the library nothing but what that claims (acknowledged steps, lost tokens), to compare it with its own record.
Of each step it notes the loss, the tokens that its routers gave each expert, and a sum over the bits of every operator:
sums of shards add up, so that those of runs with other numbers of ranks can be compared.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.data import RecoverableDistributedSampler
from moe_ckpt.policies import CheckFreq, Dense, Gemini, GradientLog, MoC, MoEtion
from moe_ckpt.policies.base import Policy
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.testing import crash_at, kill_process, watch_phases

LAYERS, EXPERTS, WIDTH, BATCH = 2, 4, 8, 4
REST, COUNTS = "non_expert", "counts of listed experts"

POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "Dense": lambda n: Dense(every_n_steps=n),
    "CheckFreq": lambda n: type("Hasty", (CheckFreq,), {"profile_steps": 2, "max_interval": n + 1})(),
    "Gemini": lambda n: Gemini(every_n_steps=n),
    "MoC": lambda n: MoC(k=1, snapshot_k=n),
    "MoEtion": lambda n: MoEtion(experts=n, capacity_boost=None),
    "MoEvement": lambda n: MoEvement(window=n),
    "GradientLog": lambda n: GradientLog(window=n),
}
"""Each from a small number of its own: an interval, a window, or experts."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong within a rank's process.

    Attributes:
        kind: "phase" of a save, "raise" in a training step, "in update" and "updated" (both are killed), "update
            raises", "batch end" (a callback raises), or "io".
        at: At which of them in this life.
        what: The phase; or what fails of the store's files: "read", "write", "fsync", "rename".
        number: The error's, for "io".
        count: Calls that fail.
    """

    kind: str
    at: int = 1
    what: str = ""
    number: int = errno.EIO
    count: int = 1


@dataclass(frozen=True)
class Life:
    """One start of the program, on all ranks.

    Attributes:
        home: Directory of its store, its memory and its log.
        policy: Its name, and its number; None for the undisturbed run.
        world: Ranks.
        sharded: By FSDP2; else DDP.
        listed: Each expert has parameters of its own; else a layer's are stacks.
        optimizer: "adamw" or "sgd".
        memory: Checkpoints in memory outlive the process.
        replicas: Copies on other nodes; each rank is a node then.
        to_storage: Every so many steps a checkpoint in memory goes on to storage.
        steps: Of the whole run.
        fault: Of rank ``faulty``; None if it is broken from outside.
    """

    home: str
    policy: tuple[str, int] | None
    world: int = 1
    sharded: bool = False
    listed: bool = False
    optimizer: str = "adamw"
    memory: bool = False
    replicas: int = 0
    to_storage: int = 1
    steps: int = 120
    fault: Fault | None = None
    faulty: int = 0

    @property
    def store(self) -> str:
        return f"{self.home}/store"

    def log(self, rank: int) -> str:
        return f"{self.home}/log.{rank}"

    def node(self, rank: int) -> str:
        """Directory of a rank's memory."""
        return f"{self.home}/memory/{rank if self.replicas else 'all'}"


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.3), 2
        self.routed = torch.zeros(EXPERTS, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = F.softmax(F.linear(x, self.weight), dim=-1).topk(self.top_k, dim=-1)
        if self.training:
            self.routed += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        return weights, chosen


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            y = F.linear(F.gelu(F.linear(x, self.up_proj[expert])), self.down_proj[expert])
            out = out + y * (weights * (chosen == expert)).sum(-1, keepdim=True)
        return out


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.gelu(self.up(x)))
        return result


class _MoE(nn.Module):
    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.gate = _Router()
        self.experts: nn.Module = nn.ModuleList(_Expert() for _ in range(EXPERTS)) if listed else _Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x)
        if isinstance(self.experts, _Stack):
            result: torch.Tensor = self.experts(x, chosen, weights)
            return x + F.dropout(result, 0.1, self.training)
        out = torch.zeros_like(x)
        experts: list[nn.Module] = list(self.experts.children())
        for number, expert in enumerate(experts):
            token, slot = torch.where(chosen == number)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
            else:  # DDP waits for gradients of all parameters
                out = out + 0.0 * sum(parameter.sum() for parameter in expert.parameters())
        return x + F.dropout(out, 0.1, self.training)


def _nothing(*_: Any) -> None:
    """Nothing goes wrong."""


class _Model(pl.LightningModule):
    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life
        self.blocks, self.head = nn.Sequential(*(_MoE(life.listed) for _ in range(LAYERS))), nn.Linear(WIDTH, 4)
        self.loss, self.before_loss = 0.0, _nothing

    def configure_model(self) -> None:
        if self.life.sharded and not isinstance(self, FSDPModule):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.blocks(x))
        return result

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.before_loss()
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.loss = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        if self.life.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def _operator(name: str) -> tuple[str, bool]:
    """(operator, whether its rows are one expert each) of a parameter."""
    parts = name.split(".")
    if "experts" not in parts:
        return REST, False
    at = parts.index("experts") + 1
    return (f"{parts[1]}/{parts[at]}", False) if parts[at].isdigit() else (f"{parts[1]}/", True)


def _bits(name: str, tensor: torch.Tensor, first: int) -> torch.Tensor:
    """``[rows]``: a sum over the bits of each row, in which every element has a weight of its own."""
    local = tensor.detach().contiguous().view(torch.int32).to(torch.int64)
    rows = local.reshape(local.shape[0], -1) if local.dim() else local.reshape(1, 1)
    position = torch.arange(rows.numel(), dtype=torch.int64).reshape(rows.shape) + first * rows.shape[1]
    weight = (position + zlib.crc32(name.encode())) * 0x9E3779B97F4A7C1 | 1
    return ((rows + 0x1234567) * (weight ^ (weight >> 29))).sum(dim=1)


def sums(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Returns operator -> sum over this rank's part of its parameters and optimizer state."""
    results: dict[str, int] = {}

    def add(operator: str, value: torch.Tensor) -> None:
        results[operator] = (results.get(operator, 0) + int(value.sum())) & 0xFFFF_FFFF_FFFF_FFFF

    for name, parameter in module.named_parameters():
        operator, stacked = _operator(name)
        for key, value in {"": parameter, **optimizer.state.get(parameter, {})}.items():
            if not isinstance(value, torch.Tensor):
                continue
            first = 0
            if isinstance(value, DTensor):
                _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
                first, value = offsets[0], value.to_local()
            elif module.life.sharded and os.environ.get("RANK", "0") != "0":  # type: ignore[union-attr]
                continue  # a step count, which all ranks have
            if not value.numel():
                continue
            rows = _bits(f"{name}/{key}", value, first)
            if not value.dim() and operator != REST:
                add(REST if stacked else COUNTS, rows)
            elif stacked:
                for row, each in enumerate(rows):
                    add(f"{operator}{first + row}", each)
            else:
                add(operator, rows)
    return results


class _Log(pl.Callback):
    """One line per event, in the file before anything else happens: a kill takes nothing of it away."""

    def __init__(self, life: Life, rank: int, ours: MoECheckpoint | None, at_end: Callable[[], None]) -> None:
        self.life, self.rank, self.ours, self.at_end = life, rank, ours, at_end

    def note(self, event: str, **facts: Any) -> None:
        line = (json.dumps({"event": event, **facts}) + "\n").encode()
        descriptor = os.open(self.life.log(self.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, line)
        os.close(descriptor)

    def books(self) -> dict[str, Any]:
        if self.ours is None:
            return {}
        tokens = self.ours._fit.session.run_ledger.tokens  # type: ignore[union-attr]
        faults = [[fault.restored_step, fault.lost_tokens, fault.stale_experts] for fault in tokens.faults]
        return {"applied": tokens.applied.tolist(), "faults": faults}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = None if self.ours is None else self.ours.restored_step
        replays = step is not None and trainer.global_step < step
        state = {} if replays else {"sums": sums(pl_module, trainer.optimizers[0])}
        self.note("start", step=step or 0, replays=replays, world=self.life.world, **state, **self.books())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        routers = [module for module in pl_module.modules() if isinstance(module, _Router)]
        last = None if self.ours is None else self.ours.last
        fit = None if self.ours is None else self.ours._fit
        self.note(
            "step",
            step=trainer.global_step,
            loss=pl_module.loss.hex(),  # type: ignore[operator, union-attr]
            sums=sums(pl_module, trainer.optimizers[0]),
            routed=[router.routed.tolist() for router in routers],
            replayed=fit is not None and fit.driver.replaying is not None,
            stored=0 if last is None else last.committed_step or 0,
            sealed=0 if last is None else (last.memory_step or 0) - last.replica_lag_steps,
        )
        for router in routers:
            router.routed.zero_()
        self.at_end()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        random = sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        self.note(
            "end", step=trainer.global_step, sums=sums(pl_module, trainer.optimizers[0]), rng=random, **self.books()
        )


class _Disk:
    """Calls of the operating system that fail, for files of the store alone.

    Args:
        store: Its directory.
        fault: Which calls.
    """

    def __init__(self, store: str, fault: Fault) -> None:
        self._store, self._fault, self._calls = os.path.realpath(store), fault, itertools.count(1)
        real = {name: getattr(os, name) for name in ("write", "fsync", "rename", "link", "fdopen")}

        def of_descriptor(name: str) -> Callable[..., Any]:
            def call(descriptor: int, *args: Any) -> Any:
                self._may_fail(os.readlink(f"/proc/self/fd/{descriptor}"))
                return real[name](descriptor, *args)

            return call

        def of_path(name: str) -> Callable[..., Any]:
            def call(path: Any, *args: Any, **kwargs: Any) -> Any:
                self._may_fail(os.fspath(path))
                return real[name](path, *args, **kwargs)

            return call

        def opened(descriptor: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = real["fdopen"](descriptor, mode, *args, **kwargs)
            return _Reads(file, self._may_fail, self._fault.number) if mode == "rb" else file

        if fault.what == "read":
            os.fdopen = opened  # type: ignore[assignment]
        elif fault.what == "rename":
            os.rename, os.link = of_path("rename"), of_path("link")
        else:
            setattr(os, fault.what, of_descriptor(fault.what))

    def _may_fail(self, path: str) -> None:
        if os.path.realpath(path).startswith(f"{self._store}/step_"):
            number = next(self._calls)
            if self._fault.at <= number < self._fault.at + self._fault.count:
                raise OSError(self._fault.number, os.strerror(self._fault.number), path)


class _Reads:
    """A file of which reads may fail: as Python does, one that would block returns None."""

    def __init__(self, file: Any, may_fail: Callable[[str], None], number: int) -> None:
        self._file, self._may_fail, self._number = file, may_fail, number

    def readinto(self, view: Any) -> Any:
        try:
            self._may_fail(os.readlink(f"/proc/self/fd/{self._file.fileno()}"))
        except OSError:
            if self._number == errno.EAGAIN:
                return None
            raise
        return self._file.readinto(view)

    def __enter__(self) -> _Reads:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Broken(RuntimeError):
    """The error of a user's program."""


def _arm(fault: Fault, model: _Model, store: str) -> tuple[Callable[[str], None] | None, Callable[[], None]]:
    """Prepares a fault. Returns what is called at phases of saving, and at the end of each batch."""
    counter = itertools.count(1)

    def at_nth(act: Callable[[], None]) -> Callable[..., None]:
        def call(*_: Any) -> None:
            if next(counter) == fault.at:
                act()

        return call

    def fails() -> None:
        raise Broken(fault.kind)

    if fault.kind == "phase":
        return crash_at(fault.what, fault.at), lambda: None
    if fault.kind == "raise":
        model.before_loss = at_nth(fails)
    elif fault.kind == "in update":
        register_optimizer_step_pre_hook(at_nth(kill_process))
    elif fault.kind in ("updated", "update raises"):
        register_optimizer_step_post_hook(at_nth(kill_process if fault.kind == "updated" else fails))
    elif fault.kind == "batch end":
        return None, at_nth(fails)
    else:
        _Disk(store, fault)
    return None, lambda: None


def _end_with(parent: int) -> None:
    """Ends this process when the campaign has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    kill_process()


def live(life: Life, rank: int, port: int) -> None:
    """One life of one rank, in a process of its own."""
    output = os.open(f"{life.home}/said.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "faults", "GROUP_RANK": "0"}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": life.world, "LOCAL_WORLD_SIZE": life.world}
    if life.world > 1:
        os.environ.update(
            {**group, **{name: str(number) for name, number in numbers.items()}, "GLOO_SOCKET_IFNAME": "lo"}
        )
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pl.seed_everything(11, verbose=False)
    model = _Model(life)
    on_phase, at_end = None, lambda: None
    if life.fault is not None and rank == life.faulty:
        on_phase, at_end = _arm(life.fault, model, life.store)
    watch_phases(on_phase)
    ours = None
    if life.policy is not None:
        options: dict[str, Any] = {}
        if life.memory:
            os.makedirs(life.node(rank), exist_ok=True)
            memory = Memory(directory=life.node(rank), replicas=life.replicas, storage_every=life.to_storage)
            options["memory"] = memory
        policy = POLICIES[life.policy[0]](life.policy[1])
        ours = MoECheckpoint(policy, life.store, timeout_secs=20.0, when_busy="wait", **options)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(life.steps * BATCH, WIDTH, generator=generator)
    data = list(zip(x, (x @ torch.randn(WIDTH, 4, generator=generator)).argmax(-1), strict=True))
    sampler = RecoverableDistributedSampler(data, num_replicas=life.world, rank=rank, seed=3)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=BATCH // life.world, sampler=sampler)  # type: ignore[arg-type]
    strategy: Any = "auto"
    if life.world > 1:
        strategy = DDPStrategy(process_group_backend="gloo")
    if life.sharded:
        strategy = ModelParallelStrategy(life.world, 1, process_group_backend="gloo")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=life.world,
        strategy=strategy,
        max_steps=life.steps,
        callbacks=[_Log(life, rank, ours, at_end), *([] if ours is None else [ours])],
        logger=False,
        enable_checkpointing=ours is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=life.home,
    )
    trainer.fit(model, loader)
