"""Plain state of a rank that died in an update which others ended, from what it left before (``format.foreseen``)."""

from __future__ import annotations

from moe_ckpt.core.memory_shares import Share
from moe_ckpt.engine.writing import state_file
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.foreseen import brought_on
from moe_ckpt.format.manifest import state_path
from moe_ckpt.format.sealed import unseal
from moe_ckpt.format.shard import decode_header
from moe_ckpt.recovery.slot_views import SlotFiles, SnapshotFacts


def state_after(part: SlotFiles, writer: int, share: Share, facts: SnapshotFacts) -> bytes:
    """Returns the file of the rank's plain state after the step. Alike on every rank.

    Args:
        part: Of the step.
        writer: The rank.
        share: What it left before the update.
        facts: What all slots of the step tell.

    Raises:
        DamagedError: Nobody knows that state; says why.
    """
    path = state_path(part.directory, writer)
    try:
        before, lent = (unseal(each[writer].told, path) for each in (facts.states, facts.writers))
        prefix = f"side/{writer}/"
        headers = [decode_header(raw, path) for _, _, raw in facts.states[writer].parts]
        sums = {each.key.removeprefix(prefix): each.checksum for header in headers for each in header.slices}
        state, ran = brought_on(before["state"], sums, lent["state"]), before
    except ValueError as error:
        why = f"rank {writer} died during an update, and its plain state after the update is not known: {error}"
        raise DamagedError(path, why, step=part.step, rank=writer) from None
    except (KeyError, TypeError) as error:
        raise DamagedError(path, f"no state before an update: {error!r}", step=part.step, rank=writer) from error
    return state_file(state, part.step, share.generation, ran["run_id"], writer, share.writers)
