"""A run that changes its parallel layout at every stop; body of ``run_ranks``.

What must not change is told in whole tensors, gathered from all ranks: the layout is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.support import megatron_gpt
from tests.support.constants import policy_of
from tests.support.megatron_gpt import Built, Setup
from tests.support.megatron_run import digest


@dataclass(frozen=True)
class Stop:
    """One life of the run. Each has other initial weights, so that what is right must come from the store.

    steps: to train with checkpoints. idle: to count without an update, as after an overflow of fp16: the checkpoint of
        such a step holds the state as it came. more: to train after that, without checkpoints.
    """

    setup: Setup
    steps: int = 0
    idle: int = 0
    more: int = 0
    policy: tuple[str, dict[str, Any]] = ("Dense", {"every_n_steps": 1})
    options: dict[str, Any] = field(default_factory=dict)
    resumes: bool = True
    """False to take note of the error that ``attach`` or ``resume`` raises."""
    store: str = "store"
    """Where, below the place that all stops share."""


def journey(rank: int, world_size: int, place: str, stops: list[Stop]) -> list[dict[str, Any]]:
    """What was true at each stop."""
    return [_visit(f"{place}/{stop.store}", stop, number) for number, stop in enumerate(stops)]


def _visit(store: str, stop: Stop, number: int) -> dict[str, Any]:
    built = megatron_gpt.build(stop.setup, seed=number + 1)
    _deal_by_sample(built)
    if not stop.resumes:
        return _refused(store, stop, built)
    ckpt = _attach(store, stop, built)
    with Reads() as reads:
        progress = ckpt.resume()
    built.consumed_samples = progress.consumed_samples
    found = {"progress": progress, "reads": reads.summary(), "came": describe(ckpt, built)}
    found["losses"], found["history"] = {}, {}
    done = progress.iteration
    for iteration in range(done, done + stop.steps + stop.idle):
        idle = iteration >= done + stop.steps
        if not idle:
            found["losses"][iteration + 1] = megatron_gpt.forward_backward(built, iteration)
        ckpt.before_step()
        if not idle:
            megatron_gpt.update(built)
        ckpt.after_step(iteration + 1, consumed_samples=built.consumed_samples, updated=not idle)
        found["history"][iteration + 1] = whole_tensors(ckpt._host.state)
    ckpt.finish()
    found["left"] = describe(ckpt, built)
    found["operators"] = _operators(ckpt.session.catalog, found["left"]["tensors"])
    ckpt.close()
    done += stop.steps + stop.idle
    for iteration in range(done, done + stop.more):
        found["losses"][iteration + 1] = megatron_gpt.train_step(built, iteration)[0]
    return found


def _attach(store: str, stop: Stop, built: Built) -> Any:
    from moe_ckpt import megatron

    name, arguments = stop.policy
    options = {"when_busy": "wait", "timeout_secs": 60.0, "save_last": False, **stop.options}
    policy = policy_of(name, arguments)
    return megatron.attach(built.chunks, built.optimizer, built.scheduler, policy=policy, dirpath=store, **options)


def _refused(store: str, stop: Stop, built: Built) -> dict[str, Any]:
    """(class and text of the error, whether memory is as it was)."""
    from moe_ckpt.errors import MoECheckpointError

    before = _memory(built)
    ckpt = None
    try:
        ckpt = _attach(store, stop, built)
        ckpt.resume()
    except MoECheckpointError as error:
        found = {"error": type(error).__name__, "said": str(error)}
    else:
        found = {"error": None, "said": ""}
    if ckpt is not None:
        ckpt.close(5.0)
    return found | {"untouched": _memory(built) == before}


def _memory(built: Built) -> Any:
    leaves = getattr(built.optimizer, "chained_optimizers", [built.optimizer])
    groups = [group for leaf in leaves for group in leaf.optimizer.param_groups]
    masters = [digest(each) for group in groups for each in group["params"]]
    rates = [(group["lr"], group["weight_decay"]) for group in groups]
    return megatron_gpt.fingerprint(built), masters, rates, built.scheduler.state_dict()


def describe(ckpt: Any, built: Built) -> dict[str, Any]:
    """What no layout changes."""
    plain = ckpt._host.state.plain()
    run_ledger = ckpt.session.run_ledger
    told = run_ledger.tokens.to_dict()
    return {
        "tensors": whole_tensors(ckpt._host.state),
        "buffers": _united({name: digest(buffer) for name, buffer in plain["buffers"].items()}),
        "steps": plain["optimizer"]["step"],
        "groups": sorted(
            {(group["lr"], group["weight_decay"], group["betas"]) for group in plain["optimizer"]["groups"]}
        ),
        "scheduler": built.scheduler.state_dict(),
        "consumed": built.consumed_samples,
        "tokens": {"applied": told["applied"], "stored": told["saved"]["storage"]},
        "lost": run_ledger.tokens.lost_tokens,
        "ages": run_ledger.ledger.expert_ages(run_ledger.last_step or 0).tolist(),
    }


def _operators(catalog: Any, keys: Any) -> dict[str, str]:
    """Tensor key -> operator that it belongs to: here each tensor is one operator's."""
    from moe_ckpt.reading.index import split_key

    of = {span.parameter: operator.id for operator in catalog.operators for span in operator.spans}
    return {key: of[split_key(key).fqn] for key in keys}


def whole_tensors(state: Any) -> dict[str, str]:
    """Key -> digest of the whole tensor. Every element is somewhere, and has the same bits wherever it is."""
    held = [(t.key, t.offsets, t.global_shape, t.local.detach().clone().contiguous()) for t in state.tensors()]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, held)
    wholes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, offsets, shape, local in (row for rows in everyones for row in rows):
        bits = local.view(_WORDS[local.element_size()])
        known = wholes.setdefault(key, (torch.zeros(shape, dtype=bits.dtype), torch.zeros(shape, dtype=torch.bool)))
        at = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
        values, there = known
        differing = there[at] & (values[at] != bits)
        assert not differing.any(), f"{key}: {int(differing.sum())} elements at {offsets} differ between ranks"
        values[at], there[at] = bits, True
    absent = [key for key, (_, there) in wholes.items() if not there.all()]
    assert not absent, f"no rank holds all of {absent[:5]}"
    return {key: f"{tuple(values.shape)} {digest(values)}" for key, (values, _) in wholes.items()}


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _united(own: dict[str, str]) -> dict[str, str]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    united: dict[str, str] = {}
    for found in everyones:
        for name, value in found.items():
            assert united.setdefault(name, value) == value, f"buffer {name} differs between ranks"
    return united


def _deal_by_sample(built: Built) -> None:
    """The batches of an iteration are the same ones however many data-parallel ranks share them."""
    own = megatron_gpt._batches if not hasattr(megatron_gpt, "_dealt_by_rank") else megatron_gpt._dealt_by_rank
    megatron_gpt._dealt_by_rank = own  # type: ignore[attr-defined]

    def batches(setup: Setup, iteration: int, data_rank: int) -> Any:
        from megatron.core import parallel_state

        ranks = parallel_state.get_data_parallel_world_size()
        everything = Setup(**{**_plain(setup), "num_microbatches": setup.num_microbatches * ranks})
        yield from list(own(everything, iteration, 0))[data_rank::ranks]

    megatron_gpt._batches = batches


def _plain(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in ("micro_batch", "seq", "vocab")}


class Reads:
    """Which slices a resume verified before it touched anything, and which it then read."""

    def __init__(self) -> None:
        self.verified: set[str] = set()
        self.read: set[str] = set()
        self.verified_nbytes = 0

    def __enter__(self) -> Reads:
        from moe_ckpt.reading import reader as reading
        from moe_ckpt.reading.reader import StoreReader

        self._find_damage = reading.find_damage
        self._read_many, self._use_many = StoreReader.read_many, StoreReader.use_many

        def find_damage(storage: Any, wanted: Any) -> Any:
            rows = list(wanted)
            assert not self.read, "something was read before all of it was verified"
            fresh = {_named(row): row.nbytes for row in rows}
            self.verified |= fresh.keys()
            self.verified_nbytes += sum(fresh.values())
            return self._find_damage(storage, rows)

        def read_many(reader: Any, wanted: Any, **how: Any) -> Any:
            rows = list(wanted)
            self.read |= {_named(row) for row in rows if not row.entry.key.startswith("side/")}
            return self._read_many(reader, rows, **how)

        def use_many(reader: Any, wanted: Any, use: Any) -> None:
            rows = list(wanted)
            self.read |= {_named(row) for row in rows if not row.entry.key.startswith("side/")}
            self._use_many(reader, rows, use)

        reading.find_damage = find_damage
        StoreReader.read_many, StoreReader.use_many = read_many, use_many  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        from moe_ckpt.reading import reader as reading
        from moe_ckpt.reading.reader import StoreReader

        reading.find_damage = self._find_damage
        StoreReader.read_many, StoreReader.use_many = self._read_many, self._use_many  # type: ignore[method-assign]

    def summary(self) -> dict[str, Any]:
        return {
            "unverified": sorted(self.read - self.verified)[:5],
            "unread": sorted(self.verified - self.read)[:5],
            "nbytes": self.verified_nbytes,
        }


def _named(stored: Any) -> str:
    return f"{stored.path}:{stored.offset}:{stored.entry.name}"
