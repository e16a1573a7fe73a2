"""Nothing on the training thread waits for the device: real Lightning steps on a GPU that is acted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from moe_ckpt import threads
from moe_ckpt.callbacks import MoECheckpoint, lightning_state
from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.driver import torch_model
from moe_ckpt.gradient_log import capture
from moe_ckpt.gradient_log.edits import EditWatch
from moe_ckpt.interop.whole import lightning_dict, open_lightning
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.memory.options import Memory
from moe_ckpt.modeling import routing
from moe_ckpt.policies import Dense, GradientLog, MoC, MoEvement
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.run.agreement import Deferred
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.slices import copying, snapshot
from moe_ckpt.slices.copying import Copy, slice_view
from moe_ckpt.storage import LocalStorage
from tests.support.acted_gpu import CUDA, ActedGPU
from tests.support.tiny_moe import TinyMoE, loader, state_of
from tests.unit.test_engine_late_agreement import LateCommunicator

STEPS = 8
BEFORE_AND_AFTER = ("on_fit_start", "on_train_start", "on_train_end")
"""Hooks of the callback that may wait: nothing is computed then."""


class Accelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """Takes the acted one."""


class Stops(pl.Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")


def fit(
    root: Path,
    policy: Any,
    gpu: ActedGPU | None = None,
    stop: int | None = None,
    memory: Memory | None = None,
    optimizer: str = "fused",
    **trainer: Any,
) -> TinyMoE:
    pl.seed_everything(5)
    module = TinyMoE(optimizer=optimizer)
    if gpu is not None:
        trainer |= {"accelerator": Accelerator(), "strategy": SingleDeviceStrategy(CUDA)}
    ckpt = MoECheckpoint(policy, root, when_busy="wait", retention=RetentionPolicy(keep_last=100), memory=memory)
    made = pl.Trainer(
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ckpt, Stops(stop)],
        **{"max_steps": STEPS, "accelerator": "cpu", "gradient_clip_val": 0.5, **trainer},
    )
    made.fit(module, loader())
    return module


def on_gpu(root: Path, policy: Any, **more: Any) -> tuple[ActedGPU, TinyMoE]:
    with ActedGPU() as gpu:
        module = fit(root, policy, gpu, **more)
    return gpu, module


def waits(gpu: ActedGPU) -> list[tuple[str, tuple[str, ...]]]:
    """Those between the first batch and the end of the last one."""
    return [wait for wait in gpu.waits if not any(f".{hook}" in led for hook in BEFORE_AND_AFTER for led in wait[1])]


def contents(root: Path) -> dict[str, Any]:
    reader = StoreReader(LocalStorage(root))
    found = {}
    for name in reversed(reader.directories()):
        manifest = reader.manifest(name)
        check_checkpoint(reader, manifest)
        held = lightning_dict(open_lightning(reader, manifest))
        del held["callbacks"]  # our own books are among them, which are of a step earlier where counts come late
        found[name] = {"tokens": manifest.tokens["applied"], **held}
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


def test_what_leaves_by_events_is_what_a_run_on_the_cpu_saves(tmp_path):
    """Token counts, buffers, step counts and all else, at every step."""
    fit(tmp_path / "cpu", Dense(every_n_steps=1))
    gpu, _ = on_gpu(tmp_path / "gpu", Dense(every_n_steps=1))
    assert waits(gpu) == []
    assert gpu.departures > 2 * STEPS, "nothing left the device, so this shows nothing"
    expected, found = contents(tmp_path / "cpu"), contents(tmp_path / "gpu")
    assert list(found) == list(expected)
    for name in expected:
        different = [key for key in expected[name] if not same(found[name][key], expected[name][key])]
        assert not different, name


def test_no_step_of_moc_waits(tmp_path):
    gpu, module = on_gpu(tmp_path / "gpu", MoC(k=1, selector="load_aware"))
    assert waits(gpu) == []
    assert gpu.departures > 2 * STEPS
    assert same(state_of(module), state_of(fit(tmp_path / "cpu", MoC(k=1, selector="load_aware"))))


def test_no_step_of_a_window_waits_and_its_clip_norms_bring_it_back(tmp_path):
    policy = MoEvement(window=3, order="soft_count")
    undisturbed = fit(tmp_path / "cpu", policy)
    with ActedGPU() as gpu, pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path / "gpu", policy, gpu, stop=STEPS - 1)
    assert waits(gpu) == []
    assert gpu.departures > 2 * STEPS
    resumed = fit(tmp_path / "gpu", policy)
    assert min(resumed.losses) < STEPS - 2, "no step was computed again"
    assert same(state_of(resumed), state_of(undisturbed))


def logged(place: Path, scaled: bool = False, **more: Any) -> dict[str, Any]:
    """What ``fit`` is given for a gradient log in memory, which a run that is stopped leaves there."""
    (place / "memory").mkdir(parents=True, exist_ok=True)
    memory = Memory(place / "memory", storage_every=1000)
    return {"policy": GradientLog(window=3), "memory": memory, **(scaler() if scaled else {}), **more}


@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"policy": GradientLog(window=3, grad_dtype="bf16")},
        {"optimizer": "adamw", "scaled": True},
    ],
    ids=["fused", "rounded", "loss scale"],
)
@pytest.mark.quick("fused", "loss scale")
def test_no_step_of_a_gradient_log_waits_and_it_brings_the_run_back(tmp_path, setup):
    """Not even where gradients are zeroed: the training stream waits for the copy there, not its thread."""
    undisturbed = fit(tmp_path / "cpu", **logged(tmp_path / "cpu", **setup))
    with ActedGPU() as gpu, pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path / "gpu", gpu=gpu, stop=STEPS - 1, **logged(tmp_path / "gpu", **setup))
    assert waits(gpu) == []
    assert gpu.joins >= STEPS - 2, "nothing was copied from the device"
    resumed = fit(tmp_path / "gpu", **logged(tmp_path / "gpu", **setup))
    assert min(resumed.losses) >= STEPS - 2, "computed again"
    assert same(state_of(resumed), state_of(undisturbed))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_other_precisions_have_no_loss_scale(tmp_path, precision):
    gpu, _ = on_gpu(tmp_path, Dense(every_n_steps=1), precision=precision, gradient_clip_val=None)
    assert waits(gpu) == []
    assert len(contents(tmp_path)) == STEPS


class AnswersBeforeUpdates(pl.Callback):
    """The ranks agree on a step no earlier than just before the next update, or the end."""

    def __init__(self, comm: LateCommunicator) -> None:
        self.open = comm.open

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.open.set()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step < 6:
            self.open.clear()


@pytest.mark.parametrize(
    ("policy", "precision"), [(Dense(every_n_steps=1), "32-true"), (MoEvement(window=2), "bf16-mixed")]
)
def test_epochs_end_and_validations_begin_before_the_ranks_agree(tmp_path, monkeypatch, policy, precision):
    """Only the join before an update waits for them, also for the types that kernels read under mixed precision."""
    comm = LateCommunicator(patience_secs=120.0)
    monkeypatch.setattr(torch_model, "make_communicator", lambda *_, **__: comm)
    told = []
    monkeypatch.setattr(CheckpointSession, "set_compute_types", lambda _, types: told.append(types))
    ckpt = MoECheckpoint(policy, tmp_path, when_busy="wait")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "precision": precision}
    trainer = pl.Trainer(
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=1,
        accelerator="cpu",
        callbacks=[AnswersBeforeUpdates(comm), ckpt],
        **quiet,
    )
    trainer.fit(TinyMoE(), loader(), loader())
    assert ckpt.last.committed_step == 6
    assert [set(types.values()) for types in told] == [{"BF16"}] * isinstance(policy, MoEvement)


def scaler() -> dict[str, Any]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    return {"gradient_clip_val": None, "plugins": [plugin]}


def test_a_loss_scale_leaves_as_numbers_do(tmp_path):
    fit(tmp_path / "cpu", Dense(every_n_steps=1), **scaler())
    gpu, _ = on_gpu(tmp_path / "gpu", Dense(every_n_steps=1), **scaler())
    assert waits(gpu) == []
    found = [held["MixedPrecision"] for held in contents(tmp_path / "gpu").values()]
    assert found == [held["MixedPrecision"] for held in contents(tmp_path / "cpu").values()]
    assert found[0]["scale"] == 64.0


# --- CUDA graphs are captured meanwhile ---


def captured(place: Path, monkeypatch: pytest.MonkeyPatch) -> ActedGPU:
    """A run in which each forward pass is a capture, during which the copy of the step before ends."""
    (place / "memory").mkdir(parents=True)
    with ActedGPU() as gpu:
        step, carry_out = TinyMoE.training_step, copying.run_copy_steps

        def carry_out_late(moves: Any) -> None:
            time.sleep(0.02)
            carry_out(moves)

        def capture(*args: Any) -> Any:
            with gpu.capturing():
                time.sleep(0.05)
                return step(*args)

        monkeypatch.setattr(TinyMoE, "training_step", capture)
        monkeypatch.setattr(copying, "run_copy_steps", carry_out_late)
        memory = Memory(place / "memory", storage_every=2)
        fit(place / "store", Dense(every_n_steps=1), gpu, memory=memory)
    return gpu


def test_no_thread_disturbs_a_capture(tmp_path, monkeypatch):
    gpu = captured(tmp_path, monkeypatch)
    assert gpu.disturbances == []
    assert gpu.meanwhile, "nobody used the device, so this shows nothing"


# --- the same with something broken on purpose ---


def take_as_before(tables: dict[int, torch.Tensor], shape: tuple[int, int]) -> Deferred[np.ndarray]:
    joined = torch.cat([table[:-1] for table in tables.values()]).cpu().numpy()
    return Deferred(lambda: joined.reshape(shape).copy())


def copy_as_before(sources: Any, memory: torch.Tensor) -> bool:
    for entry, source in sources:
        slice_view(entry, memory).copy_(source)
    return True


@pytest.mark.parametrize(
    ("owner", "name", "broken", "what", "led"),
    [
        (routing, "counts_on_host", take_as_before, "cpu", "modeling.routing.take"),
        (snapshot, "copy_here", copy_as_before, "copy_", "slices.snapshot.copy_at_once"),
        (lightning_state, "_scaler_state", lambda precision: precision.state_dict(), "item", "lightning_state"),
        (torch_model, "make_communicator", lambda *_, **__: SoloCommunicator(), "Event.synchronize", "after_update"),
    ],
    ids=["counts", "buffers", "loss scale", "agreement"],
)
@pytest.mark.quick("counts", "agreement")
def test_whoever_waits_is_named(tmp_path, monkeypatch, owner, name, broken, what, led):
    monkeypatch.setattr(owner, name, broken)
    gpu, _ = on_gpu(tmp_path, MoEvement(window=2), **(scaler() if name == "_scaler_state" else {}))
    found = waits(gpu)
    assert what in {wait for wait, _ in found}
    assert all(any(led in each for each in by) for _, by in found), found


def test_who_disturbs_a_capture_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "_disturb_no_capture", lambda: None)
    names = {name.removesuffix("_0") for name, _ in captured(tmp_path, monkeypatch).disturbances}
    assert "moe_ckpt-seal" in names


def read_at_once(edits: EditWatch) -> Any:
    for counts in COUNTS(edits):
        yield {**counts, "values": counts["values"].tolist()}


def rounded_by_value(gradients: Any, to: torch.dtype) -> None:
    for gradient in gradients:
        if gradient.abs().max().item():
            gradient.copy_(gradient.to(to))


def joined_by_its_thread(copy: Copy) -> None:
    JOIN(copy)
    copy._issued.result()[0].synchronize()


COUNTS, JOIN = EditWatch.counts, Copy.join


@pytest.mark.parametrize(
    ("owner", "name", "broken", "what", "led"),
    [
        (EditWatch, "counts", read_at_once, "tolist", "gradient_log.recording.step"),
        (capture, "_round", rounded_by_value, "item", "gradient_log.capture._consume"),
        (Copy, "join", joined_by_its_thread, "Event.synchronize", "commit.pipeline.join"),
    ],
    ids=["step counts", "rounding", "join"],
)
@pytest.mark.quick("rounding")
def test_whoever_waits_in_a_gradient_log_is_named(tmp_path, monkeypatch, owner, name, broken, what, led):
    monkeypatch.setattr(owner, name, broken)
    gpu, _ = on_gpu(tmp_path, **logged(tmp_path, policy=GradientLog(window=3, grad_dtype="bf16")))
    found = waits(gpu)
    assert what in {wait for wait, _ in found}
    assert all(any(led in each for each in by) for _, by in found), found
