"""Proof by mutation: state that a rank leaves out, doubles or misnames is refused with its name, and nothing is kept.

Two real ranks (EP2, dense state over both) in which one tells or writes something wrong.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import run_ranks
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Case, attached, digests

WARM = "tests.support.megatron_warm"
SETUP = Setup(ep=2, layers=2, num_microbatches=1)
MOE = "decoder.layers.1.mlp"


# --- what a rank says it holds ---


def _leave_out(holding: Any) -> Any:
    return replace(holding, tensors=tuple(t for t in holding.tensors if t.owner != (MOE, 3)))


def _also_claim(holding: Any, rank: int) -> Any:
    """Rank 1 says that it has a copy of rank 0's expert 1."""
    own = [t for t in holding.tensors if t.owner == (MOE, 3)]
    more = tuple(replace(t, name=t.name.replace("experts.3.", "experts.1."), owner=(MOE, 1)) for t in own)
    return replace(holding, tensors=(*holding.tensors, *more))


def _renamed(holding: Any, numbers: dict[int, int]) -> Any:
    tensors = []
    for tensor in holding.tensors:
        moe, expert = tensor.owner
        if moe == MOE and expert in numbers:
            name = tensor.name.replace(f"experts.{expert}.", f"experts.{numbers[expert]}.")
            tensor = replace(tensor, name=name, owner=(moe, numbers[expert]))
        tensors.append(tensor)
    return replace(holding, tensors=tuple(tensors))


def _clipped(holding: Any) -> Any:
    """One row of an expert's matrix is in no block."""
    tensors = []
    for tensor in holding.tensors:
        if tensor.owner == (MOE, 2) and "fc1" in tensor.name:
            (rows, columns) = tensor.shape
            tensor = replace(tensor, blocks=(((0, 0), (rows - 1, columns)),))
        tensors.append(tensor)
    return replace(holding, tensors=tuple(tensors))


TOLD: dict[str, Callable[[Any, int], Any]] = {
    "an expert is left out": lambda h, rank: _leave_out(h) if rank == 1 else h,
    "an expert is doubled": lambda h, rank: _also_claim(h, rank) if rank == 1 else h,
    "one rank swaps names": lambda h, rank: _renamed(h, {1: 3}) if rank == 0 else h,
    "both ranks swap names": lambda h, rank: _renamed(h, {1: 3} if rank == 0 else {3: 1}),
    "a row is left out": lambda h, rank: _clipped(h) if rank == 1 else h,
}


@contextmanager
def _told(name: str, rank: int) -> Iterator[None]:
    from moe_ckpt.megatron.training_state import MegatronTrainingState

    original = MegatronTrainingState.holding
    MegatronTrainingState.holding = lambda self, *args: TOLD[name](original(self, *args), rank)
    try:
        yield
    finally:
        MegatronTrainingState.holding = original


def attaching(rank: int, world_size: int, root: str) -> dict[str, tuple[str, str]]:
    from tests.support import megatron_gpt

    built = megatron_gpt.build(SETUP, 1)
    said = {}
    for number, name in enumerate(TOLD):
        case = Case(name, SETUP, ("MoC", {"k": 1}))
        with _told(name, rank):
            try:
                attached(built, case, f"{root}/{number}").close()
                said[name] = ("accepted", "")
            except Exception as error:
                said[name] = (type(error).__name__, str(error))
    return said


def test_what_ranks_say_is_proved_before_anything_is_opened(tmp_path: Path):
    for said in run_ranks(attaching, 2, str(tmp_path), preload=WARM):
        kind, text = said["an expert is left out"]
        assert kind == "CoverageError"
        assert text == f"what the ranks hold of the model: expert 3 of {MOE} is on no rank"
        kind, text = said["an expert is doubled"]
        assert kind == "CoverageError"
        assert text.endswith(f"expert 1 of {MOE} is on several expert-parallel ranks (global ranks 0, 1)")
        kind, text = said["one rank swaps names"]
        assert kind == "CoverageError"
        assert f"expert 1 of {MOE} is on no rank" in text
        assert f"expert 3 of {MOE} is on several expert-parallel ranks" in text
        kind, text = said["a row is left out"]
        assert kind == "CoverageError"
        assert f"{MOE}.experts.2.linear_fc1.weight: ranks hold 992 of 1024 elements" in text
        # Names are all that is known of an expert. Where all ranks misname consistently, each still gets its own back.
        assert said["both ranks swap names"] == ("accepted", "")
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {str(list(TOLD).index("both ranks swap names"))}, "what is refused opens no store"


# --- what a rank writes ---


def _without(tensors: list[Any], part: str) -> list[Any]:
    return [t for t in tensors if part not in t.key]


def _misnamed(tensors: list[Any]) -> list[Any]:
    return [
        replace(t, key=t.key.replace("experts.3.", "experts.1."), parameter=t.parameter.replace("rts.3.", "rts.1."))
        if f"{MOE}.experts.3." in t.key
        else t
        for t in tensors
    ]


def _shortened(tensors: list[Any]) -> list[Any]:
    """Of a moment that this rank alone holds, the last row is not written."""
    own = [t.key.endswith("/exp_avg") and not (t.duplicate or t.replicated) for t in tensors]
    at = own.index(True)
    short = replace(tensors[at], local=tensors[at].local[:-1])
    return [*tensors[:at], short, *tensors[at + 1 :]]


def _doubled(tensors: list[Any]) -> list[Any]:
    return [*tensors, next(t for t in tensors if f"{MOE}.experts.2.linear_fc2.weight" in t.key and not t.duplicate)]


WRITTEN: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "an expert is missed": (
        lambda tensors: _without(tensors, f"{MOE}.experts.3."),
        f"{MOE}.experts.3.linear_fc1.weight at [0, 0]: 1024 of 1024 elements are missing",
    ),
    "an expert is doubled": (_misnamed, f"{MOE}.experts.1.linear_fc1.weight is written twice, at [0, 0] and at [0, 0]"),
    "a range is missed": (_shortened, "elements are missing"),
    "a block is written twice": (
        _doubled,
        f"what rank 1 writes at step 5: model/{MOE}.experts.2.linear_fc2.weight@0,0 is written twice",
    ),
}


def saving(rank: int, world_size: int, root: str, setup: Setup) -> list[dict[str, Any]]:
    """A good checkpoint, then each mutation of rank 1 in a step of its own, then a good one again."""
    from tests.support import megatron_gpt

    built = megatron_gpt.build(setup, 1)
    case = Case("saving", setup, ("Dense", {"every_n_steps": 1}))
    ckpt = attached(built, case, f"{root}/store")
    ckpt.resume()
    found = []
    for iteration, name in enumerate([None, *WRITTEN, None, None], start=1):
        megatron_gpt.forward_backward(built, iteration - 1)
        ckpt.before_step()
        megatron_gpt.update(built)
        with _written(ckpt, name if rank == 1 else None):
            record = ckpt.after_step(iteration)
            assert ckpt.session._snapshots.pipeline.wait(60.0)
        [ended] = ckpt.session._snapshots.pipeline.persister.fates(iteration - 2)
        found.append(
            {"committed": ended.committed, "cause": ended.cause, "failed": record.failed_checkpoints}
            | {"store": _hashes(Path(root)) if rank == 0 else None, "digests": digests(built)}
        )
    ckpt.close()
    again = megatron_gpt.build(setup, 2)
    ckpt = attached(again, case, f"{root}/store")
    found.append({"back": ckpt.resume().iteration, "digests": digests(again)})
    ckpt.close()
    return found


@contextmanager
def _written(ckpt: Any, name: str | None) -> Iterator[None]:
    original = ckpt._host.state.tensors
    if name is not None:
        mutated = WRITTEN[name][0](list(original()))
        ckpt._host.state.tensors = lambda **_: mutated
    try:
        yield
    finally:
        if name is not None:
            del ckpt._host.state.tensors


def _hashes(root: Path) -> dict[str, str]:
    names = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


@pytest.mark.parametrize(
    "setup", [SETUP, replace(SETUP, dist_opt=True, precision="bf16", grouped=True)], ids=["replicated", "sharded"]
)
def test_what_ranks_write_is_proved_before_it_is_committed(tmp_path: Path, setup: Setup):
    ranks = run_ranks(saving, 2, str(tmp_path), setup, preload=WARM)
    first, *wrong, good, last, back = ranks[0]
    assert first["committed"]
    first_files = {name: digest for name, digest in first["store"].items() if "step_00000001" in name}
    assert any(name.endswith("MANIFEST.json") for name in first_files)
    for (name, (_, told)), mutated in zip(WRITTEN.items(), wrong, strict=True):
        assert not mutated["committed"], name
        assert told in mutated["cause"], name
        if name == "a range is missed":
            told = r"checkpoint of step 4: optim/0/\S+/exp_avg at \[[\d, ]+\]: \d+ of \d+ elements are missing"
            assert re.fullmatch("CoverageError: " + told, mutated["cause"]), "that one, and no other"
        manifests = {path for path in mutated["store"] if path.endswith("MANIFEST.json")}
        assert manifests == {"store/step_00000001/MANIFEST.json"}, name
        assert first_files.items() <= mutated["store"].items(), "the earlier checkpoint is untouched"
    assert good["committed"]
    assert last["committed"]
    assert last["failed"] == len(WRITTEN), "of a step's end the ranks hear at the next"
    assert back["back"] == 3 + len(WRITTEN)
    for of_rank in ranks:
        assert of_rank[-1]["digests"] == of_rank[-2]["digests"], "what is committed after failures is whole"
