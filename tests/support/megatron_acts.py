"""A run whose loop does something of its own, stopped and started again; body of ``run_ranks``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.support import megatron_gpt
from tests.support.megatron_gpt import Built, Setup
from tests.support.megatron_move import whole_tensors

Act = Callable[[Built, int, bool], None]
"""(model, iteration, whether its update is made): before each iteration's forward pass, and after the schedule."""
LAST = 8


def goes_on(
    rank: int,
    world_size: int,
    place: str,
    setup: Setup,
    policy: tuple[str, dict[str, Any]],
    act: Act,
    stops: Sequence[int],
) -> None:
    """Raises unless a run that stops after each of these iterations ends as one that does not stop."""
    whole = _train(f"{place}/whole", setup, policy, act, 1, LAST)
    for stop in stops:
        store = f"{place}/{stop}"
        _train(store, setup, policy, act, 1, stop)
        assert _train(store, setup, policy, act, 2, LAST) == whole, f"stopped at {stop}"


def _train(store: str, setup: Setup, policy: tuple[str, dict[str, Any]], act: Act, seed: int, last: int) -> Any:
    """All lives have other initial weights, of which the first is not resumed."""
    import moe_ckpt.policies
    from moe_ckpt import megatron

    built = megatron_gpt.build(setup, seed)
    chosen = getattr(moe_ckpt.policies, policy[0])(**policy[1])
    training = built.chunks, built.optimizer, built.scheduler
    ckpt = megatron.attach(*training, policy=chosen, dirpath=store, when_busy="wait", timeout_secs=60.0)
    progress = ckpt.resume()
    assert progress.restored == (seed > 1)
    for iteration in range(progress.iteration + 1, last + 1):
        act(built, iteration, False)
        megatron_gpt.forward_backward(built, iteration)
        made, _ = megatron_gpt.update(built)
        act(built, iteration, True)
        ckpt.after_step(iteration, updated=made)
    found = whole_tensors(ckpt._host.state), ckpt._host.state.plain()["optimizer"], built.scheduler.state_dict()
    ckpt.session.drain(last)
    ckpt.close()
    return found
