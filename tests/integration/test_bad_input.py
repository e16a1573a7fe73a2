"""Input that cannot work: refused before training, naming both culprits, with nothing lost or half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.errors import (
    ConfigError,
    DamagedError,
    FormatVersionError,
    MissingPackageError,
    NoCheckpointError,
    SaveFailedError,
    StoreError,
    StoreUnwritableError,
    UnsupportedError,
)
from moe_ckpt.format.sealed import seal, unseal
from moe_ckpt.memory.options import Memory
from moe_ckpt.policies import Dense, GradientLog, MoC, MoEtion
from moe_ckpt.storage import open_storage
from tests.integration.crash_run import Run, build, loaders
from tests.integration.lives import (
    assert_store_sound,
    place,  # noqa: F401 - a fixture
    placed,
)
from tests.support.tiny_moe import TinyMoE, loader

RUN = Run(None, samples=16, epochs=1)


def _fit(run: Run, **options) -> tuple[pl.Trainer, list]:
    trainer, module, recorder = build(run)
    trainer.fit(module, *loaders(run), **options)
    return trainer, recorder.lines


def _contents(root: str | Path) -> dict[str, bytes]:
    """Every file of a store but its lock, which says who held it last."""
    files = (path for path in Path(root).rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def store(place):  # noqa: F811
    """A run that has ended, and what its store holds."""
    run = placed(RUN, place)
    _fit(run)
    before = _contents(run.store)
    yield run
    assert _contents(run.store) == before, "the store was changed"
    assert_store_sound(run, ended=True)


# --- policies and options ---


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MoC(k=0), r"MoC\(k=0\)"),
        (lambda: MoC(k=-3), r"MoC\(k=-3\)"),
        (lambda: MoC(k=1.5), r"MoC\(k=1.5\)"),
        (lambda: MoC(selector="best"), r"selector='best'.*sequential"),
        (lambda: Dense(every_n_steps=0), r"Dense\(every_n_steps=0\)"),
        (lambda: MoECheckpoint(policy="moc"), r"policy='moc' is text.*MoC\(\)"),
        (lambda: MoECheckpoint(policy=MoC), r"policy=MoC is the class.*MoC\(\)"),
        (lambda: MoECheckpoint(resume="always"), r"resume='always'.*auto.*never"),
        (lambda: MoECheckpoint(when_busy="panic"), r"when_busy='panic'.*skip.*wait"),
        (lambda: MoECheckpoint(timeout_secs=0), r"timeout_secs=0"),
        (lambda: MoECheckpoint(host_memory_bytes=-1), r"host_memory_bytes=-1"),
        (
            lambda: MoECheckpoint(MoEtion(recompute=True), memory=Memory(storage_every=10)),
            r"MoECheckpoint: policy=MoEtion\(.*recompute=True\).*copies on 0: .*Memory\(replicas=1\), or a policy that",
        ),
        (
            lambda: MoECheckpoint(MoEtion(recompute=True), memory=Memory(replicas=1)),
            r"MoEtion\(.*recompute=True\) sends gradients.*each step goes there.*storage_every=100",
        ),
        (lambda: open_storage(MoECheckpoint(dirpath="nonsense://x").dirpath), r"nonsense"),
    ],
)
def test_options_that_cannot_be(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_more_experts_per_layer_than_there_are(place):  # noqa: F811
    run = placed(replace(RUN, policy=("moc", 5)), place)
    with pytest.raises(ConfigError, match=r"MoC\(k=5\): layer '.*moe.*' has only 4 experts"):
        _fit(run)
    assert not os.path.exists(run.store), "nothing was begun"


class NoExperts(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 4)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer(*callbacks, **options) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, "devices": 1, "max_steps": 2, **options})


class OddTypes(TinyMoE):
    """A tensor of a type that no store can hold: a parameter, a buffer, or one in the optimizer's state."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        if where == "parameter":
            self.odd = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex128), requires_grad=False)
        elif where == "buffer":
            self.register_buffer("odd", torch.zeros(2, dtype=torch.uint16))

    def training_step(self, batch, batch_idx):
        if self.where == "extra" and batch_idx:
            self.register_buffer("odd", torch.zeros(2, dtype=torch.uint16))
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer):
        if self.where == "state":
            for state in optimizer.state.values():
                state["seen"] = torch.zeros(2, dtype=torch.uint64)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("parameter", "parameter 'odd': tensors of torch.complex128 cannot be stored.*in one of these"),
        ("buffer", "buffer 'odd': tensors of torch.uint16 cannot be stored.*persistent=False"),
        ("state", "optim/0/embed.*/seen: tensors of torch.uint64 cannot be stored"),
        ("extra", "plain/buffers/odd: tensors of torch.uint16 cannot be stored"),
    ],
)
def test_types_that_cannot_be_stored_are_refused_by_name(where, says, place):  # noqa: F811
    # What comes after the first checkpoint fails the later ones, and the end says so.
    with pytest.raises(SaveFailedError if where == "extra" else UnsupportedError, match=says):
        _trainer(MoECheckpoint(Dense(), place / "store"), max_steps=3).fit(OddTypes(where), loader(32))
    if where in ("parameter", "buffer"):
        assert not (place / "store").exists(), "refused before anything is begun"


def test_a_model_without_experts(place):  # noqa: F811
    with pytest.raises(ConfigError, match=r"(?s)MoC.*no MoE layer.*register_moe"):
        _trainer(MoECheckpoint(MoC(k=1), place / "store")).fit(NoExperts(), [0, 1, 2])
    assert not (place / "store").exists()


class Shampoo(torch.optim.SGD):
    """By its name."""


def test_gradients_of_an_optimizer_that_couples_parameters(tmp_path, monkeypatch):
    monkeypatch.setattr(TinyMoE, "configure_optimizers", lambda self: Shampoo(self.parameters(), lr=0.1))
    memory = Memory(directory=tmp_path, storage_every=100)
    checkpoint = MoECheckpoint(GradientLog(), tmp_path / "store", memory=memory)
    with pytest.raises(UnsupportedError, match=r"Shampoo cannot .*MoEtion\(recompute=True\).*blocks of several param"):
        _trainer(checkpoint).fit(TinyMoE(), loader())
    assert not list(tmp_path.glob("store/step_*"))


# --- stores ---


def test_the_store_of_another_model(store):
    with pytest.raises(StoreError, match="model") as caught:
        _fit(replace(store, model={"experts": 6}))
    assert store.store in str(caught.value)


def test_a_store_whose_name_was_lost(store):
    """Every manifest repeats what store.json says, so nothing is refused and nothing is lost."""
    name = Path(store.store) / "store.json"
    raw = name.read_bytes()
    name.unlink()
    try:
        trainer, _ = _fit(store)
        assert trainer.callbacks[-1].restored_step
        assert unseal(name.read_bytes(), "store.json")["run_id"] == unseal(raw, "store.json")["run_id"]
    finally:
        name.write_bytes(raw)


def test_a_store_of_another_format_version(store):
    name = Path(store.store) / "store.json"
    raw = name.read_bytes()
    name.write_bytes(seal({**unseal(raw, "store.json"), "format_version": 99}))
    try:
        with pytest.raises(FormatVersionError, match=r"store.json.*version 99.*reads version 1 only"):
            _fit(store)
    finally:
        name.write_bytes(raw)


def test_a_checkpoint_of_another_format_version(store):
    """A newer release wrote into the store: going on would be going back behind its steps."""
    name = sorted(Path(store.store).glob("step_*/MANIFEST.json"))[-1]
    raw = name.read_bytes()
    name.write_bytes(seal({**unseal(raw, "m"), "format_version": 99}))
    try:
        with pytest.raises(FormatVersionError, match=r"MANIFEST.json.*version 99.*reads version 1 only"):
            _fit(replace(store, epochs=2))
    finally:
        name.write_bytes(raw)


def test_a_file_in_the_way(place):  # noqa: F811
    run = placed(RUN, place)
    Path(run.store).write_text("mine")
    with pytest.raises(StoreUnwritableError, match=r"cannot be written.*dirpath") as caught:
        _fit(run)
    assert run.store in str(caught.value)
    assert Path(run.store).read_text() == "mine"


def test_a_directory_that_cannot_be_written(tmp_path):
    if os.geteuid() == 0:
        where = tmp_path / "disk"
        where.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(where)], capture_output=True).returncode:
            pytest.skip("no mounts here, and root may write anywhere else")
    else:
        where = tmp_path / "closed"
        where.mkdir(mode=0o500)
    try:
        run = placed(RUN, where)
        with pytest.raises(StoreUnwritableError, match="cannot be written") as caught:
            _fit(replace(run, log=None, out=None))
        assert run.store in str(caught.value)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "-l", str(where)], check=True)


# --- strategies and packages ---


@pytest.mark.parametrize(("kind", "says"), [(FSDPStrategy, "FSDP1"), (DeepSpeedStrategy, "DeepSpeed")])
def test_strategies_that_hide_the_experts(kind, says, place):  # noqa: F811
    trainer = SimpleNamespace(strategy=kind.__new__(kind))  # their constructors want a GPU, or a package
    with pytest.raises(UnsupportedError, match=rf"MoECheckpoint with {kind.__name__}.*{says}.*ddp"):
        MoECheckpoint(Dense(), place / "store").setup(trainer, NoExperts(), "fit")
    assert not (place / "store").exists()


class MegatronStrategy(DDPStrategy):
    """As in NeMo 2: a DDPStrategy by class, whose ranks hold different experts."""


class Wrapped(MegatronStrategy):
    pass


class Unknown(DDPStrategy):
    pass


class ToldWrong(DDPStrategy):
    moe_ckpt_sharding = "flat"


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        (MegatronStrategy, UnsupportedError, r"with MegatronStrategy.*moe_ckpt\.megatron\.attach"),
        (Wrapped, UnsupportedError, r"with Wrapped.*moe_ckpt\.megatron\.attach"),
        (Unknown, UnsupportedError, r"with Unknown \(a subclass of DDPStrategy\).*moe_ckpt_sharding: 'replicated' if"),
        (ToldWrong, ConfigError, r"ToldWrong\.moe_ckpt_sharding is 'flat': choose 'replicated' if.*'dtensor' if"),
    ],
)
def test_a_strategy_that_is_not_known_must_say_how_it_shards(kind, error, says, place):  # noqa: F811
    trainer = SimpleNamespace(strategy=kind(process_group_backend="gloo"))
    with pytest.raises(error, match=says):
        MoECheckpoint(Dense(), place / "store").setup(trainer, NoExperts(), "fit")
    assert not (place / "store").exists()


class OneDevice(SingleDeviceStrategy):
    moe_ckpt_sharding = "replicated"


def test_a_strategy_that_says_how_it_shards_is_taken(place):  # noqa: F811
    checkpoint = MoECheckpoint(Dense(1), place / "store")
    _trainer(checkpoint, strategy=OneDevice(torch.device("cpu"))).fit(TinyMoE(), loader(16))
    assert checkpoint.last_model_path.endswith("step_00000002")


def test_lightning_is_not_installed():
    """In an interpreter of its own, where the import fails as it would without the package."""
    code = (
        "import sys; sys.modules['lightning'] = None\n"
        "from moe_ckpt.errors import MissingPackageError\n"
        "import moe_ckpt.policies, moe_ckpt.reading.reader\n"
        "try:\n    import moe_ckpt.callbacks\n"
        "except MissingPackageError as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True).stdout
    assert "moe_ckpt.callbacks" in said
    assert "'lightning'" in said
    assert "pip install 'moe_ckpt[lightning]'" in said


def test_a_store_behind_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingPackageError, match="s3"):
        _fit(replace(RUN, store="s3://bucket/checkpoints"))


# --- ckpt_path ---


def test_a_resume_path_that_does_not_exist(store):
    path = f"{store.store}/step_00000099"
    with pytest.raises(NoCheckpointError, match=r"does not exist.*committed there: step_0000") as caught:
        _fit(store, ckpt_path=path)
    assert path in str(caught.value)


def test_a_resume_path_of_no_store_at_all(place):  # noqa: F811
    path = place / "nowhere" / "step_00000099"
    with pytest.raises(NoCheckpointError, match="does not exist"):
        _fit(placed(RUN, place), ckpt_path=str(path))
    assert not path.parent.exists()


def test_a_resume_path_that_was_not_committed(store):
    root = Path(store.store)
    (root / "step_00000098").mkdir()
    (root / "step_00000098" / "rank_00000_state.json").write_text(json.dumps({}))
    try:
        with pytest.raises(NoCheckpointError, match=r"step_00000098 was not committed.*committed there: step_0000"):
            _fit(store, ckpt_path=str(root / "step_00000098"))
    finally:
        for path in root.glob("step_00000098/*"):
            path.unlink()
        if (root / "step_00000098").exists():
            (root / "step_00000098").rmdir()


def test_a_damaged_step_named_by_hand_is_not_replaced_by_another(store):
    """Who names a step wants that one; falling back is for automatic resumes."""
    root = Path(store.store)
    shard = sorted(root.glob("step_*/rank_00000_expert.safetensors"))[-1]
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    step = int(shard.parent.name.split("_")[1])
    try:
        with pytest.raises(DamagedError, match=rf"{shard.parent.name}/{shard.name}, step {step}, rank 0: .*checksum"):
            _fit(replace(store, epochs=2), ckpt_path=str(shard.parent))
    finally:
        shard.write_bytes(raw)


def test_another_precision_than_the_checkpoints(store):
    with pytest.raises(ConfigError, match=r"bfloat16 in the model, but .* in checkpoint step_0000\d+.*precision"):
        _fit(replace(store, epochs=2, trainer={"precision": "bf16-true"}))


def test_another_optimizer_than_the_checkpoints(store):
    with pytest.raises((ConfigError, StoreError), match="optimizer"):
        _fit(replace(store, epochs=2, kind="manual"))
