"""``moe-ckpt densify``: from the log that a killed run left in memory, ordinary checkpoints, bit for bit."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt import newest_step
from moe_ckpt.cli.main import main
from moe_ckpt.errors import UnsupportedError
from moe_ckpt.gradient_log import densify as densifying
from moe_ckpt.gradient_log import replaying
from moe_ckpt.gradient_log.optimizers import class_named
from moe_ckpt.gradient_log.units import Device
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.storage import open_storage
from moe_ckpt.storage.lock import StoreLock
from tests.integration.crash_run import Run, build, loaders
from tests.integration.lives import (
    KILLED,
    PRELOAD,
    assert_same_run,
    differences,
    events,
    exit_code,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.integration.test_gradient_log import LOG, VARIATIONS, header_of, logged, spoil
from tests.integration.test_memory_kills import in_memory
from tests.integration.test_survivors import lose
from tests.support.processes import run_ranks

THESE = (
    *("clipped", "bf16", "bf16-mixed", "fused", "sgd", "adafactor", "experts-without-tokens", "fp16-overflowing"),
    *("manual", "two-optimizers", "accumulated", "averaged", "biased-routers", "the-policy", "the-policy-coupled"),
    *("the-policy-biased-experts", "the-policy-flat-experts"),
)


def densify(run: Run, *arguments: str, nodes: tuple[str, ...] = ("",)) -> int:
    memory = [word for node in nodes for word in ("--directory", str(Path(run.memory, node)))]
    return main(["densify", run.store, *memory, *arguments])


def truth(run: Run, directory: Path) -> StoreReader:
    """A store with a dense checkpoint of each step of the same run, which nobody killed."""
    dense = replace(placed(run, directory, "truth"), policy=("dense", 1), memory=None, replicas=0, to_storage=1)
    run_ranks(keep_all, run.ranks, dense.to_json(), timeout=300.0, preload=PRELOAD)
    return StoreReader(open_storage(dense.store))


def keep_all(rank: int, world_size: int, words: str) -> None:
    """A run of which every checkpoint on storage stays."""
    run = Run.from_json(words)
    trainer, module, _ = build(run, rank, retention=RetentionPolicy(keep_last=1000))
    trainer.fit(module, *loaders(run))


def require_same_step(one: StoreReader, other: StoreReader, step: int) -> None:
    """All tensors of all ranks, and their plain states, are those of the same step of another run."""
    [mine], [theirs] = (
        [each for each in map(reader.manifest, reader.directories()) if each.step == step] for reader in (one, other)
    )
    check_checkpoint(one, mine)
    assert all(record.step == step for record in mine.operators.values())
    keys = one.index(mine).tensors.keys()
    assert keys == other.index(theirs).tensors.keys()
    assert mine.operators.keys() == theirs.operators.keys()
    for key in keys:
        found = list(differences(one.tensor(mine, key), other.tensor(theirs, key), key))
        assert not found, f"step {step}: {found}"
    assert mine.world_size == theirs.world_size
    assert mine.tokens["applied"] == theirs.tokens["applied"]
    for rank in range(mine.world_size):
        ours, told = one.state(mine, rank), other.state(theirs, rank)
        assert "gradient_log" not in ours
        for part in ("plain", "rng", "configured"):
            assert list(differences(ours[part], told[part], part)) == []


def killed(run: Run, crash: int = 9) -> Run:
    if run.ranks == 1:
        assert live(replace(run, crash=("compute", crash))) == KILLED, output(run)
    else:
        assert KILLED in live_ranks(replace(run, crash=("compute", crash)))
    return run


def listed(run: Run, capsys, nodes: tuple[str, ...] = ("",)) -> list[int]:
    capsys.readouterr()
    assert densify(run, "--list", "--json", nodes=nodes) == 0
    return json.loads(capsys.readouterr().out)["steps"]


def test_every_step_of_a_log_becomes_a_checkpoint(place, capsys):  # noqa: F811
    run = killed(logged(LOG, place))
    steps = listed(run, capsys)
    assert steps[0] >= 7, "the step under way was the ninth"
    reference = truth(run, place)
    for step in steps:
        assert densify(run, "--step", str(step)) == 0
        require_same_step(StoreReader(open_storage(run.store)), reference, step)
    assert f"step_{steps[-1]:08d}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["clipped", pytest.param("rounded", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_what_was_made(name, place):  # noqa: F811
    run = killed(logged(VARIATIONS[name], place))
    assert densify(run) == 0
    shutil.rmtree(run.memory)
    Path(run.memory).mkdir()
    assert live(run) == 0, output(run)
    assert split_lives(events(run))[-1][0]["step"] >= 7
    assert_same_run(run)


def test_beside_the_log_a_run_goes_on_from_storage(place):  # noqa: F811
    """The very step lies in memory, too, as a step of a log."""
    run = killed(logged(LOG, place))
    assert densify(run) == 0
    assert live(run) == 0, output(run)
    assert "repeated, from the consumed gradients" not in output(run)
    assert_same_run(run)


@pytest.mark.slow
def test_beside_what_a_survivor_sealed_of_the_step_ranks_go_on_from_storage(place):  # noqa: F811
    """FSDP2: it has its own part of the step, and both have the log up to there."""
    run = in_memory(replace(LOG, ranks=2, sharded=True, epochs=4), place)
    assert lose(run, 1, 9) == [1, KILLED]
    assert densify(run) == 0
    assert live_ranks(run) == [0, 0], output(run)
    assert split_lives(events(run))[-1][0]["step"] == 8
    assert_same_run(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", THESE)
def test_however_a_run_is_set_up(name, place, capsys):  # noqa: F811
    run = killed(logged(VARIATIONS[name], place))
    reference = truth(run, place)
    for step in listed(run, capsys)[:2]:
        assert densify(run, "--step", str(step)) == 0
        require_same_step(StoreReader(open_storage(run.store)), reference, step)


RANKS = {
    "ddp": replace(LOG, ranks=2, trainer={"gradient_clip_val": 0.1}),
    "fsdp2": replace(LOG, ranks=2, sharded=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_several_ranks(name, place, capsys):  # noqa: F811
    run = killed(logged(RANKS[name], place), 4)
    reference = truth(run, place)
    steps = listed(run, capsys)
    assert steps
    for step in steps[:2]:
        assert densify(run, "--step", str(step)) == 0
        require_same_step(StoreReader(open_storage(run.store)), reference, step)


@pytest.mark.slow
def test_a_lost_node_is_replaced_by_its_peers_copy(place, capsys):  # noqa: F811
    run = killed(logged(replace(RANKS["ddp"], replicas=1), place), 4)
    shutil.rmtree(Path(run.memory, "node_1"))
    reference = truth(run, place)
    assert densify(run, nodes=("node_0",)) == 0
    [step] = [each.step for each in map(_manifest(run), _directories(run)) if each.step > 1][:1]
    require_same_step(StoreReader(open_storage(run.store)), reference, step)


def _directories(run: Run) -> list[str]:
    return StoreReader(open_storage(run.store)).directories()


def _manifest(run: Run):
    return StoreReader(open_storage(run.store)).manifest


@pytest.mark.slow
def test_without_the_other_nodes_memory_it_says_what_is_missing(place, capsys):  # noqa: F811
    run = killed(logged(replace(RANKS["ddp"], replicas=0), place), 4)
    for path in Path(run.memory).rglob("rank_00001"):
        shutil.rmtree(path)
    assert densify(run, "--step", "3") == 2
    said = capsys.readouterr().err
    assert "the share of rank 1" in said
    assert "no step can be made" in said


def test_a_step_that_is_not_there(place, capsys):  # noqa: F811
    run = killed(logged(LOG, place))
    steps = listed(run, capsys)
    before = _directories(run)
    assert densify(run, "--step", "99") == 2
    said = capsys.readouterr().err
    assert "step 99 cannot be made: no slot holds a part of it" in said
    assert f"steps that can be made: {steps[0]}" in said
    assert densify(run, "--step", str(steps[-1] - 1)) == 2
    assert _directories(run) == before


def test_a_damaged_gradient_is_said_and_an_older_step_can_be_made(place, capsys):  # noqa: F811
    run = killed(logged(LOG, place))
    complete = listed(run, capsys)[0]  # the kill may have come between two seals of a newer step
    headers = {path: header_of(path) for path in Path(run.memory).rglob("*.head")}
    gradients = {path: header for path, header in headers.items() if header.only and header.step <= complete}
    newest = max(gradients, key=lambda path: gradients[path].identity.number)
    step = gradients[newest].step
    spoil(newest, "gradient")
    before = _directories(run)
    assert densify(run) in (1, 2)
    said = capsys.readouterr().err
    assert str(newest.with_suffix("")) in said
    assert f"step {step}" in said
    assert "is damaged" in said
    assert _directories(run) == before
    older = [each for each in listed(run, capsys) if each < step]
    if not older:  # the newest was complete already when the kill came
        assert "no step can be made" in said
        return
    assert f"steps that can be made: {older[0]}" in said
    assert densify(run, "--step", str(older[0])) == 0
    require_same_step(StoreReader(open_storage(run.store)), truth(run, place), older[0])


def test_memory_of_another_run_is_told_by_its_store(place, capsys):  # noqa: F811
    run = killed(logged(LOG, place))
    other = placed(replace(LOG, epochs=1), place, "other")
    assert live(replace(other, policy=("dense", 1), memory=None)) == 0, output(other)
    assert densify(replace(run, store=other.store)) == 2
    said = capsys.readouterr().err
    assert "no slot in" in said
    assert run.store in said


@pytest.mark.parametrize("window", [1, 3])
def test_what_is_there_already_is_not_made_twice(window, place, capsys):  # noqa: F811
    run = killed(logged(replace(LOG, policy=("gradient-log", window)), place))
    assert densify(run) == 0
    assert densify(run) == 2
    assert "is there already" in capsys.readouterr().err
    assert live(run) == 0
    assert "damaged" not in output(run), "slots of a step that storage has in other files are intact"


def test_whoever_may_read_the_runs_files_may_read_what_is_made(place):  # noqa: F811
    run = killed(replace(logged(LOG, place), callback={"access": "group"}))
    written = {path.name for path in Path(run.store).glob("step_*")}
    assert densify(run) == 0
    [made] = [path for path in Path(run.store).glob("step_*") if path.name not in written]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()} == {0o640}
    assert stat.S_IMODE(made.stat().st_mode) & 0o777 == 0o750


def test_a_full_store_is_left_as_it_was(place, capsys, monkeypatch):  # noqa: F811
    run = killed(logged(LOG, place))
    before = sorted(path.name for path in Path(run.store).iterdir())
    write = densifying.write_made_share

    def full(storage, *arguments):
        write(storage, *arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(densifying, "write_made_share", full)
    assert densify(run) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in Path(run.store).iterdir()) == before
    monkeypatch.undo()
    assert densify(run) == 0


@pytest.mark.parametrize("here", [Device("cuda", "NVIDIA H200", 1), Device("cpu", "x86_64 AVX2", 1)])
def test_another_device_than_the_one_that_trained_is_said(here, place, capsys, monkeypatch):  # noqa: F811
    run = killed(logged(LOG, place))
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: here))
    assert densify(run) == 0
    said = capsys.readouterr().err
    assert "last bits may differ from the run's: the run made its updates on cpu (" in said
    assert f"and this is {here}" in said


def test_what_it_needs(place, monkeypatch):  # noqa: F811
    """Without one update, another state comes out."""
    run = killed(logged(LOG, place))
    made = replaying._updates
    monkeypatch.setattr(replaying, "_updates", lambda log, step: iter(()) if step == log.steps[-1] else made(log, step))
    monkeypatch.setattr(replaying.LoggedSteps, "check", lambda *_: None)
    monkeypatch.setattr(replaying, "_set_counts", lambda *args: None)
    assert densify(run) == 0
    reader = StoreReader(open_storage(run.store))
    with pytest.raises(AssertionError):
        require_same_step(reader, truth(run, place), reader.manifest(reader.directories()[0]).step)


SCRIPT = """
import os, signal, torch, moe_ckpt
from moe_ckpt.gradient_log.optimizers import Coupling, register
from moe_ckpt.policies import GradientLog

class Mine(torch.optim.AdamW):
    pass

register(Mine, Coupling.ELEMENTS)
if __name__ == "__main__":
    model = torch.nn.Linear(4, 4)
    optimizer = Mine(model.parameters())
    memory = moe_ckpt.Memory(directory=".", storage_every=100)
    ckpt = moe_ckpt.attach(model, optimizer, policy=GradientLog(window=2), dirpath="store", memory=memory)
    ckpt.resume()
    for step in range(1, 6):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.after_step(step)
        ckpt.session.drain(step)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_optimizer_of_the_users_script(tmp_path, monkeypatch, capsys):
    """The script called its class ``__main__.Mine``, and is where the command is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("script_of_a_user.py").write_text(SCRIPT)
    assert subprocess.run([sys.executable, "-W", "ignore", "script_of_a_user.py"]).returncode == KILLED
    command = ["densify", "store", "--directory", "."]
    assert main(command) == 2
    assert "optimizer class __main__.Mine is not registered" in capsys.readouterr().err
    assert main([*command, "--import", "script_of_a_user"]) == 0
    assert newest_step("store") == 5


def test_an_optimizer_of_a_script_is_not_torchs_of_the_same_name():
    with pytest.raises(UnsupportedError, match=r"__main__\.AdamW is not registered"):
        class_named("__main__.AdamW")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "apart"])
def test_another_number_of_ranks_goes_on_from_the_newest_step(name, place):  # noqa: F811
    """At the start, without a command. apart: each rank is a node with memory of its own."""
    options = {"fsdp2": {"sharded": True}, "apart": {"replicas": 1}, "ddp": {}}[name]
    run = killed(logged(replace(LOG, ranks=2, sampler="recoverable", **options), place), 4)
    alone = replace(run, ranks=1, out=None, sharded=False, replicas=0)
    if name == "apart":  # node 0 has copies of all
        alone = replace(alone, memory=str(Path(run.memory, "node_0")))
    assert exit_code(alone) == 0, output(run)
    assert "belongs to a gradient log that 2 ranks wrote in another layout" in output(run)
    resumed = split_lives(events(run))[-1][0]["step"]
    assert resumed >= 2, "the step under way was the fourth"


@pytest.mark.slow
def test_more_ranks_share_out_those_of_the_log(place):  # noqa: F811
    run = killed(logged(replace(LOG, sampler="recoverable"), place))
    assert densify(run, "--list") == 0
    more = replace(run, ranks=2, out=None)
    assert live_ranks(more) == [0, 0], output(run)
    assert split_lives(events(run))[-1][0]["step"] >= 7


@pytest.mark.slow
def test_another_implementation_of_the_optimizer_goes_on_from_the_newest_step(place):  # noqa: F811
    """It would round otherwise in the replay: the log's own steps it."""
    run = killed(logged(LOG, place))
    other = replace(run, model={"optimizer": "forloop"}, out=None)
    assert exit_code(other) == 0, output(run)
    assert split_lives(events(run))[-1][0]["step"] >= 7


@pytest.mark.slow
def test_killed_while_a_log_is_made_dense(place):  # noqa: F811
    run = killed(logged(replace(LOG, ranks=2, sampler="recoverable"), place), 4)
    alone = replace(run, ranks=1, out=None)
    for _ in range(2):
        assert live(replace(alone, sabotage="killed while a log is made dense")) == KILLED, output(run)
    assert exit_code(alone) == 0, output(run)
    assert split_lives(events(run))[-1][0]["step"] >= 2


def test_beside_a_run_it_says_what_to_wait_for(place, capsys):  # noqa: F811
    run = killed(logged(LOG, place))
    with StoreLock(open_storage(run.store), "a run"):
        assert densify(run) == 2
    said = capsys.readouterr().err
    assert "is in use by another run" in said
    assert "stop it first, or wait" in said
    assert "dirpath" not in said
