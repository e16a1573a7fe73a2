"""Loops that call the adapter in other ways than four lines at a time; body of ``run_ranks``, one rank each."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from moe_ckpt.memory.options import Memory
from moe_ckpt.run.events import StepEnded
from tests.support import megatron_gpt
from tests.support.clocks import Clock
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import digests
from tests.support.megatron_run import heard

SETUP = Setup(layers=2, num_microbatches=1, dropout=0.2)


@dataclass(frozen=True)
class Plan:
    """How a loop runs.

    skipped: iterations without an update. timed: a counter that no two lives have alike. begin: how the generators are
    put back: by the "first forward" pass, or by a "call" before data that draw are read.
    """

    policy: tuple[str, dict[str, Any]] = ("Dense", {"every_n_steps": 1})
    skipped: frozenset[int] = frozenset()
    timed: bool = False
    begin: str = "first forward"


def attached(built: Any, root: str, plan: Plan, **options: Any) -> Any:
    import moe_ckpt.policies
    from moe_ckpt import megatron

    name, arguments = plan.policy
    return megatron.attach(
        built.chunks,
        built.optimizer,
        built.scheduler,
        policy=getattr(moe_ckpt.policies, name)(**arguments),
        dirpath=os.path.join(root, "store"),
        **{"when_busy": "wait", "timeout_secs": 60.0, **options},
    )


def life(root: str, plan: Plan, number: int, until: int) -> dict[str, Any]:
    """Train to iteration ``until``, and stop without a word as a failure would."""
    built = megatron_gpt.build(SETUP, 1 + number)
    random.seed(number)
    np.random.seed(number)
    ckpt = attached(built, root, plan)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    try:
        return _train(ckpt, built, plan, number, until) | {"said": said}
    finally:
        logging.getLogger("moe_ckpt").removeHandler(handler)
        ckpt.close()


def _train(ckpt: Any, built: Any, plan: Plan, number: int, until: int) -> dict[str, Any]:
    progress = ckpt.resume()
    for _ in range(number):  # as the making of data iterators does: in this life more than in that
        torch.rand(1)
        random.random()
        np.random.rand()
    if plan.begin == "call":
        ckpt.begin_training()
    consumed, losses, drawn, new = progress.consumed_samples, {}, {}, 0
    for iteration in range(progress.iteration + 1, until + 1):
        if plan.begin == "call":
            drawn[iteration] = float(torch.rand(1))
        consumed += 2
        counters = {"iterations": iteration, "life": number if plan.timed else 0}
        if iteration in plan.skipped:
            ckpt.skip(iteration, consumed, counters=counters)
            continue
        losses[iteration] = megatron_gpt.forward_backward(built, iteration - 1)
        megatron_gpt.update(built)
        new += not ckpt.after_step(iteration, consumed_samples=consumed, counters=counters).replayed
    ckpt.session.drain(until)
    found = {"progress": progress, "losses": losses, "drawn": drawn, "consumed": consumed, "digests": digests(built)}
    ckpt.metrics.catch_up()
    return found | {"new": new, "measured": int(ckpt.metrics["stall"].steps)}


def lives(
    rank: int, world_size: int, root: str, plans: Sequence[Plan], untils: Sequence[int]
) -> list[list[dict[str, Any]]]:
    """For each plan: lives of one run, then a life of another run that goes to the same end at once."""
    told = []
    for index, plan in enumerate(plans):
        failing, unbroken = (os.path.join(root, name, str(index)) for name in ("failing", "unbroken"))
        each = [life(failing, plan, number, until) for number, until in enumerate(untils)]
        told.append([*each, life(unbroken, plan, 0, untils[-1])])
    return told


def train(ckpt: Any, built: Any, iteration: int, **told: Any) -> Any:
    megatron_gpt.forward_backward(built, iteration - 1)
    megatron_gpt.update(built)
    return ckpt.after_step(iteration, consumed_samples=2 * iteration, **told)


def saving(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Complete checkpoints on demand, and the end of a run said twice."""
    from moe_ckpt import newest_step
    from moe_ckpt.errors import ConfigError

    store = os.path.join(root, "store")
    plan = Plan(("MoC", {"k": 1, "every_n_steps": 4}))
    found: dict[str, Any] = {"before": newest_step(store)}
    built = megatron_gpt.build(SETUP, 1)
    ckpt = attached(built, root, plan)
    found["opened"] = newest_step(store)
    ckpt.resume()
    for iteration in (1, 2, 3):
        train(ckpt, built, iteration, counters={"valid": 7})
    found["saved"] = (ckpt.save(), newest_step(store), digests(built))
    steps = len(os.listdir(store))
    found["saved again"] = (ckpt.save(), len(os.listdir(store)) - steps)
    train(ckpt, built, 4)
    found["partial"] = (ckpt.save(), newest_step(store), digests(built))
    ckpt.skip(5, 10)
    ckpt.finish()
    ckpt.finish()
    try:
        ckpt.skip(6, 12)
    except ConfigError as error:
        found["skipped late"] = str(error)
    found["finished"] = newest_step(store)
    found["wrapped"] = "step" in vars(built.optimizer)
    again = megatron_gpt.build(SETUP, 2)
    ckpt = attached(again, root, plan)
    progress = ckpt.resume()
    found["back"] = (progress, digests(again), ckpt.session.run_ledger.tokens.lost_tokens)
    ckpt.close()
    return found


def broken_off(rank: int, world_size: int, root: str) -> list[str]:
    """An error behind an update, before its iteration is counted; what is said of it."""
    from moe_ckpt import Memory

    memory = Memory(directory=os.path.join(root, "node"))
    os.mkdir(memory.directory)
    built = megatron_gpt.build(SETUP, 1)
    with contextlib.suppress(ZeroDivisionError), attached(built, root, Plan(), memory=memory) as ckpt:
        ckpt.resume()
        train(ckpt, built, 1)
        megatron_gpt.forward_backward(built, 1)
        megatron_gpt.update(built)
        with heard() as said:
            ckpt.close(10.0, ZeroDivisionError())
            raise ZeroDivisionError
    return said


LEFT = (
    ("Dense", {"every_n_steps": 100}),
    ("MoEvement", {"window": 2}),
    ("GradientLog", {}),
)


def left_in_between(rank: int, world_size: int, root: str) -> list[dict[str, Any]]:
    """The run ends, or is saved, between ``optimizer.step()`` and ``after_step``: what is refused, what is left."""
    from moe_ckpt import Memory
    from moe_ckpt.errors import ConfigError

    def refused(call: Callable[[], Any]) -> str:
        try:
            call()
        except ConfigError as error:
            return str(error)
        return ""

    def leave(ckpt: Any) -> None:
        with ckpt:
            pass

    told = []
    for number, policy in enumerate(LEFT):
        place, states = os.path.join(root, str(number)), {}
        memory = Memory(directory=os.path.join(place, "node"))
        os.makedirs(memory.directory)
        options = {"memory": memory} if policy[0] == "GradientLog" else {}

        def start(seed: int) -> tuple[Any, Any, int]:
            built = megatron_gpt.build(SETUP, seed)
            ckpt = attached(built, place, Plan(policy), **options)  # noqa: B023
            return built, ckpt, ckpt.resume().iteration

        def train_to(built: Any, ckpt: Any, begun: int, until: int) -> None:
            """Up to ``until``, of which only the update is made."""
            for iteration in range(begun + 1, until):
                train(ckpt, built, iteration)
                states[iteration] = digests(built)  # noqa: B023
            megatron_gpt.forward_backward(built, until - 1)
            megatron_gpt.update(built)

        built, ckpt, begun = start(1)
        train_to(built, ckpt, begun, 3)
        calls = {"finish": ckpt.finish, "save": ckpt.save, "skip": functools.partial(ckpt.skip, 3, 6)}
        found: dict[str, Any] = {name: refused(call) for name, call in calls.items()}
        ckpt.after_step(3, consumed_samples=6)
        states[3] = digests(built)
        found["counted"] = ckpt.save()
        train_to(built, ckpt, 3, 5)
        found["with"] = refused(functools.partial(leave, ckpt))
        built, ckpt, begun = start(2)
        for iteration in range(begun + 1, ckpt.restored_step + 1):  # of a window
            train(ckpt, built, iteration)
        found["back"] = ckpt.restored_step, states[ckpt.restored_step] == digests(built)
        ckpt.close()
        told.append(found)
    return told


def without_samples(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Iterations of which the loop does not say how far they came in the data."""
    built = megatron_gpt.build(SETUP, 1)
    found: dict[str, Any] = {}
    with heard() as said, attached(built, root, Plan()) as ckpt:
        ckpt.resume()
        train(ckpt, built, 1)
        found["given"] = [each for each in said if "consumed_samples" in each]
        for iteration in (2, 3):
            megatron_gpt.forward_backward(built, iteration - 1)
            megatron_gpt.update(built)
            ckpt.after_step(iteration)
        ckpt.skip(4)
    found["not given"] = [each for each in said if "consumed_samples" in each]
    with attached(built, root, Plan()) as ckpt:
        found["back"] = ckpt.resume()
    return found


def begun_elsewhere(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Nothing in the store, and the caller has loaded something itself."""
    from moe_ckpt.megatron import Progress

    found: dict[str, Any] = {}
    built = megatron_gpt.build(SETUP, 1)
    with attached(built, root, Plan()) as ckpt:
        found["progress"] = ckpt.resume(lambda: Progress(500, 8000, counters={"valid": 3}))
        train(ckpt, built, 501)
    with attached(built, root, Plan()) as ckpt:
        found["back"] = ckpt.resume(lambda: Progress(7, 7))
    return found


def replayed_otherwise(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """A window whose iterations are not skipped as they were, and a save while it is computed again."""
    from moe_ckpt.errors import ReplayDivergedError

    windows = Plan(("MoEvement", {"window": 3}), skipped=frozenset({6}))
    life(root, windows, 0, 8)
    found: dict[str, Any] = {}
    for name, skipped in (("skipped now", {6, 7}), ("skipped then", set())):
        try:
            life(root, replace(windows, skipped=frozenset(skipped)), 1, 9)
        except ReplayDivergedError as error:
            found[name] = str(error)
    built = megatron_gpt.build(SETUP, 1)
    ckpt = attached(built, os.path.join(root), windows)
    found["began"] = ckpt.resume().iteration
    found["saved"] = ckpt.save()
    ckpt.close()
    return found


def no_forward(rank: int, world_size: int, root: str) -> str:
    """An optimizer step though no forward pass of the model was seen."""
    life(root, Plan(), 0, 2)
    built = megatron_gpt.build(SETUP, 1)
    ckpt = attached(built, root, Plan())
    ckpt.resume()
    try:
        built.optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ckpt.close()
    return ""


def in_eval_mode(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Warnings of loops whose model is in eval mode, in an iteration with an update or without one."""
    found: dict[str, Any] = {}
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    lives = (
        ("training", SETUP, True, True),
        ("eval", SETUP, False, True),
        ("eval, no update", SETUP, False, False),
        ("eval, no MoE layer", replace(SETUP, experts=0), False, True),
    )
    for name, setup, trains, updated in lives:
        said.clear()
        built = megatron_gpt.build(setup, 1)
        for chunk in built.chunks:
            chunk.train(trains)
        with attached(built, os.path.join(root, name), Plan()) as ckpt:
            ckpt.resume()
            for iteration in (1, 2, 3):
                found["routed " + name] = train(ckpt, built, iteration, updated=updated).routed_tokens
        found[name] = [text for text in said if "training mode" in text]
    built = megatron_gpt.build(SETUP, 2)
    for chunk in built.chunks:
        chunk.eval()
    ckpt = attached(built, os.path.join(root, "training"), Plan())
    ckpt.resume()
    try:
        train(ckpt, built, 4)
    except Exception as error:
        found["back in eval"] = f"{type(error).__name__}: {error}"
    finally:
        ckpt.close()
    return found


def ending(rank: int, world_size: int, root: str) -> dict[str, list[str]]:
    """What lives of one run say: cut short, ended, started again, by a script with other settings, longer."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    found: dict[str, list[str]] = {}
    changed = replace(SETUP, lr=2e-2)
    for name, setup, until, ended in (
        ("cut short", SETUP, 2, False),
        ("ended", SETUP, 4, True),
        ("started again", SETUP, 4, True),
        ("other settings", changed, 5, False),
        ("other settings still", changed, 5, False),
        ("its own", SETUP, 5, False),
    ):
        said.clear()
        built = megatron_gpt.build(setup, 1)
        ckpt = attached(built, root, Plan())
        for iteration in range(ckpt.resume().iteration + 1, until + 1):
            train(ckpt, built, iteration)
        locked: list[bool] = []
        release = ckpt.session._release

        def releasing(release: Any = release, locked: list[bool] = locked) -> None:
            locked.append(os.path.exists(os.path.join(root, "store", "finished.json")))
            release()

        ckpt.session._release = releasing
        ckpt.finish(ended=ended)
        found[name] = [*said]
        found[f"{name}, noted when the store was let go of"] = [str(each) for each in locked]
        found[f"{name}, in force"] = [str(built.optimizer.param_groups[0]["max_lr"])]
    return found


def stalls(rank: int, world_size: int, root: str) -> dict[str, list[tuple[float, int]]]:
    """For each hook of the library: the stall of each iteration, by a clock that goes in this hook only, and how often
    the hook ran since the record before."""
    from moe_ckpt.driver.run import Driver
    from moe_ckpt.gradient_log.recording import RunLog
    from moe_ckpt.megatron.routing import RouterCounter
    from moe_ckpt.metrics import CheckpointMetrics

    found = {}
    for owner, name in (
        (RouterCounter, "_add"),  # in a hook of each router
        (Driver, "note"),  # in one of inner optimizers
        (RunLog, "consume"),
        (CheckpointMetrics, "note"),
    ):
        clock, calls = Clock(), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", clock.perf_counter)
            clock.slow(owner, name, lambda calls=calls: calls.append(None), patch.setattr)
            found[owner.__name__] = _stalls(os.path.join(root, owner.__name__), calls)
    return found


def _stalls(root: str, calls: list[None]) -> list[tuple[float, int]]:
    built = megatron_gpt.build(SETUP, 1)
    memory = os.path.join(root, "memory")
    os.makedirs(memory)
    ckpt = attached(built, root, Plan(("GradientLog", {"window": 2})), memory=Memory(memory))
    ckpt.resume()
    told = []

    def note(event: Any) -> None:
        if isinstance(event, StepEnded):
            told.append((event.record.stall_secs, len(calls)))
            calls.clear()

    tell = ckpt.session._run.tell
    object.__setattr__(ckpt.session._run, "tell", lambda event: (note(event), tell(event)))
    for iteration in range(1, 5):
        train(ckpt, built, iteration)
    ckpt.close()
    return told[1:]


def skipped_behind_a_pass(rank: int, world: int, root: str) -> dict[bool, int]:
    """Routed tokens of two iterations, between which one is skipped: before its pass, and behind it."""
    found = {}
    for passes in (False, True):
        built = megatron_gpt.build(SETUP, 1)
        directory = os.path.join(root, str(passes))
        os.makedirs(directory)
        ckpt = attached(built, directory, Plan(("MoC", {"k": 1})))
        ckpt.resume()
        train(ckpt, built, 1)
        if passes:
            megatron_gpt.forward_backward(built, 1)
        ckpt.skip(2, 4)
        train(ckpt, built, 3)
        ckpt.session.drain(3)
        found[passes] = ckpt.session.run_ledger.tokens.routed_tokens
        ckpt.close()
    return found


def epochs(rank: int, world_size: int, root: str, seed: int | None, workers: int, ends: Sequence[int]) -> list[Any]:
    """Batches, losses and norms of lives that go on to the end of an epoch, where data loaders draw the next one."""
    told = []
    for last in ends:
        built = megatron_gpt.build(SETUP, 1)
        loaders = []
        for _ in range(2):  # ranks in the middle of a pipeline iterate none
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            loaders.append(StatefulDataLoader(range(8), 2, shuffle=True, num_workers=workers, generator=generator))
        ckpt = attached(built, root, Plan(), stateful=dict(zip(("read", "unread"), loaders, strict=True)))
        iteration = ckpt.resume().iteration
        while iteration < last:
            for batch in loaders[0]:
                told.append((batch.tolist(), *megatron_gpt.train_step(built, iteration)))
                iteration += 1
                ckpt.after_step(iteration, consumed_samples=0)
                if iteration == last:
                    break
        ckpt.close()
    return told


def careless(rank: int, world_size: int, root: str) -> list[list[str]]:
    """What is said to a loop that does not count its steps, and to one whose batches have another size than before."""
    told = []
    for size in (2, 4):
        built = megatron_gpt.build(SETUP, 1)
        loader = StatefulDataLoader(range(24), size)
        with heard() as said:
            ckpt = attached(built, root, Plan(), stateful={"data": loader})
            iteration = ckpt.resume().iteration + 1
            next(iter(loader))
            train(ckpt, built, iteration)
            for _ in range(17 if size == 4 else 0):
                megatron_gpt.forward_backward(built, iteration)
                megatron_gpt.update(built)
            ckpt.close()
        told.append([*said])
    return told


class Pages:
    """A loader whose state is a list."""

    read = 0

    def state_dict(self) -> list[int]:
        return [self.read, 7]

    def load_state_dict(self, state: list[int]) -> None:
        [self.read, _] = state


def odd_values(rank: int, world_size: int, root: str) -> Any:
    """What comes back of counts that are no whole numbers of Python, and of state that is no dict."""
    for iteration in (1, 2):
        built, pages = megatron_gpt.build(SETUP, 1), Pages()
        ckpt = attached(built, root, Plan(), stateful={"pages": pages})
        progress = ckpt.resume()
        group = built.optimizer.param_groups[0]
        found = progress.iteration, progress.consumed_samples, progress.counters, pages.read, float(group["eps"])
        pages.read = 3
        megatron_gpt.forward_backward(built, iteration - 1)
        megatron_gpt.update(built)
        group["lr"] = group["eps"] = np.float32(0.5)
        ckpt.after_step(np.int64(iteration), consumed_samples=torch.tensor(16 * iteration), counters={0: iteration})
        ckpt.close()
    return found
