"""Bytes of a rank's share of a snapshot that its copies' holders need, and bytes that they already have.

MoEtion (arXiv 2412.15411 v1), Algorithm 2 and section 5.1. Data-parallel ranks hold the same state, so that what
a peer has in its own training state at the same step it copies from there into its memory, and no byte of it crosses
the network. Which state that is depends on how the framework divides it:

    none                                       weights and optimizer state: of non-experts in the whole group, of
                                               experts where they are data-parallel, too
    ZeRO-1, ZeRO-2, distributed optimizer      weights only
    ZeRO-3, FSDP2                              nothing

It is not enough that a peer's process holds the state, since all processes are gone after a failure: it must be in that
peer's memory, as of that step. A trainer uses the tensors that it really has (``MirroredShares``); this module is for
comparison with the paper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OperatorShare:
    """An operator's bytes in one rank's share of a snapshot.

    Attributes:
        operator: Its id.
        weights: Bytes of its weights.
        state: Bytes of master weights and optimizer state.
        weights_on: Ranks whose training state has these weights.
        state_on: Ranks whose training state has ``state``.
    """

    operator: str
    weights: int
    state: int
    weights_on: Collection[int] = ()
    state_on: Collection[int] = ()


@dataclass(frozen=True)
class Delivery:
    """The parts of one rank's share that go to one of its peers.

    Attributes:
        peer: The rank that receives them.
        weights: Operators whose weights are sent.
        state: Operators whose optimizer state is sent.
        nbytes: Bytes that are sent.
        saved: Bytes of the share that are not sent, because the peer has them.
    """

    peer: int
    weights: tuple[str, ...]
    state: tuple[str, ...]
    nbytes: int
    saved: int


def deliveries(share: Iterable[OperatorShare], peers: Sequence[int]) -> tuple[Delivery, ...]:
    """The parts of one rank's share that each peer is sent, because its own training state lacks them.

    Args:
        share: The rank's share.
        peers: Ranks that hold its copies (``peers.replica_placement``).
    """
    pieces = tuple(share)
    sent = []
    for peer in peers:
        weights = [piece for piece in pieces if piece.weights and peer not in piece.weights_on]
        state = [piece for piece in pieces if piece.state and peer not in piece.state_on]
        nbytes = sum(piece.weights for piece in weights) + sum(piece.state for piece in state)
        whole = sum(piece.weights + piece.state for piece in pieces)
        names = tuple(piece.operator for piece in weights), tuple(piece.operator for piece in state)
        sent.append(Delivery(peer, *names, nbytes, whole - nbytes))
    return tuple(sent)


def portion_saved(sent_parts: Iterable[Delivery]) -> float:
    """The portion of all copies' bytes that is not sent, 0 to 1; 0 if there are no copies. (Paper: up to 0.4.)"""
    sent, saved = 0, 0
    for delivery in sent_parts:
        sent, saved = sent + delivery.nbytes, saved + delivery.saved
    return saved / (sent + saved) if sent + saved else 0.0
