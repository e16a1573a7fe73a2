"""Runs the capacity boost: it begins after a failure that left experts stale, and ends by itself.

Each rank makes up a part of the lost tokens with the tokens that it routes, without messages: the decision of a router
in a pass depends only on that pass and on this rank's part. The parts are in each rank's plain state of every
checkpoint, as of its step, so that a resume repeats what the run did, or would have done. Ranks only agree on the sum
of remaining tokens, along with the tokens of a step: for metrics, and to end the boost at the same step on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from moe_ckpt.boost.layer import BoostPort, LayerBoost, deal, parts_of
from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.driver.host import CapacityBoost
from moe_ckpt.errors import MoECheckpointError, StoreError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.modeling.routing import counts_on_host
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.run.agreement import Deferred, StepTokens, Updated
from moe_ckpt.run.run_ledger import RunLedger
from moe_ckpt.stopwatch import Stopwatch

log = logging.getLogger("moe_ckpt")

_KEY = "boost"


class Boosting(CapacityBoost):
    """The capacity boost of one run, on this rank. For the training thread only.

    Args:
        boost: As of the policy's needs.
        ports: Number of an MoE layer that this rank routes -> its port.
        shape: L and E of the whole model.
        comm: The ranks.
        stopwatch: Counts the time of calls by routers.
    """

    def __init__(
        self,
        boost: float,
        ports: Mapping[int, BoostPort],
        shape: tuple[int, int],
        comm: Communicator,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._boost, self._stopwatch = boost, stopwatch
        self._ports = ports
        self._shape = shape
        self._comm = comm
        self._layers: dict[int, LayerBoost] = {}
        self._run_ledger: RunLedger | None = None

    # --- once, after a resume ---

    def begin(
        self,
        plain: Mapping[str, Any],
        fault: FaultRecord,
        run_ledger: RunLedger,
        manifest: Manifest,
        reader: StoreReader | None,
    ) -> None:
        lacking, ranks = fault.lacking, manifest.world_size
        stored = plain.get(_KEY, {})
        moved = ranks != self._comm.world_size or not stored.get("left", {}).keys() <= {str(at) for at in self._ports}
        fresh = np.zeros(self._shape, dtype=np.int64) if lacking is None else lacking.copy()
        here, elsewhere = largest(self._comm, [bool(stored), moved])
        if not here and not fresh.any():
            return
        if here and elsewhere:  # other ranks route these layers now: their backlog is divided anew
            fresh += self._summed(self._stored_elsewhere(stored, manifest, reader))
            stored = {}
        self._set_up(stored, fresh)
        outstanding = self._summed([self._state()])
        if not outstanding.any():  # the checkpoint is of the step that made up for the last token
            self._end()
        else:
            self._run_ledger, run_ledger.deficit = run_ledger, outstanding
            if self._comm.rank == 0:
                experts = int((outstanding > 0).sum())
                announce(
                    "capacity boost: %s get %g %% more tokens until %s lost ones are made up",
                    *(f"{experts} experts" if experts > 1 else "1 expert", 100 * self._boost),
                    f"{int(outstanding.sum()):,}",
                )

    def _stored_elsewhere(
        self, stored: Mapping[str, Any], manifest: Manifest, reader: StoreReader | None
    ) -> Iterable[Mapping[str, Any]]:
        """Yields the stored boosts that this rank continues: its own, and those of ranks that no longer exist."""
        for rank in range(self._comm.rank, manifest.world_size, self._comm.world_size):
            try:
                yield stored if rank == self._comm.rank else _state(rank, manifest, reader).get(_KEY, {})
            except MoECheckpointError as error:  # the start must not fail because of it
                log.warning(
                    "the capacity boost continues without the tokens that rank %d of the checkpoint still had to make "
                    "up: %s",
                    *(rank, error),
                )

    def _set_up(self, stored: Mapping[str, Any], fresh: Counts) -> None:
        """Begins with this rank's stored backlog, and its part of ``fresh`` ``[L, E]`` lost tokens."""
        boosted = {at for at in self._ports if fresh[at].any() or str(at) in stored.get("left", {})}
        refused = {at: why for at in boosted if (why := self._ports[at].refusal()) is not None}
        able_and_refusing = np.zeros((2, self._shape[0], self._comm.world_size), dtype=np.int64)
        for kind, layers in enumerate((boosted - refused.keys(), refused)):
            able_and_refusing[kind, sorted(layers), self._comm.rank] = 1
        counts, _nothing = self._comm.agree(able_and_refusing, np.zeros(0, dtype=np.int64))
        for at, why in refused.items():
            if not counts[1, at, : self._comm.rank].any():
                self._say_refused(at, why)
        parts = parts_of(self._boost)
        for at in sorted(boosted - refused.keys()):
            part = deal(fresh[at], int(counts[0, at].sum()), int(counts[0, at, : self._comm.rank].sum()))
            outstanding = torch.from_numpy(part[: self._ports[at].experts])
            carried = torch.zeros_like(outstanding)
            if str(at) in stored.get("left", {}):
                outstanding, carried = outstanding + stored["left"][str(at)], stored["carried"][str(at)]
            self._layers[at] = LayerBoost(outstanding, carried, parts, self._stopwatch)
            self._ports[at].attach(self._layers[at])

    def _say_refused(self, at: int, why: str) -> None:
        log.warning(
            "no capacity boost in MoE layer %s, whose stale experts continue without it: its router, %s, does not "
            "support it: %s",
            *(self._ports[at].layer, self._ports[at].router, why),
        )

    # --- every step ---

    def step_ends(self, tokens: Deferred[StepTokens], *, updated: Updated) -> Deferred[StepTokens]:
        if self._run_ledger is None:
            return tokens
        # Waits for a device only after a fused optimizer's step with a gradient scaler: the checkpoint must be right.
        applied = updated.result() if isinstance(updated, Deferred) else updated
        for at, layer in list(self._layers.items()):
            if applied:
                layer.commit()
            else:
                layer.discard()
            why = self._ports[at].refusal()
            if why is None and applied and not layer.asked:
                why = "it ran a training step without reading moe_boost, as compiled modules do"
            if why is not None:
                self._give_up(at, why)
        if self._run_ledger.deficit is None or not self._run_ledger.deficit.any():
            self._end()
            return tokens
        tables = {at: torch.cat([layer.backlog, layer.backlog.new_zeros(1)]) for at, layer in self._layers.items()}
        outstanding = counts_on_host(tables, self._shape)
        return tokens.then(lambda step_tokens: replace(step_tokens, deficit=outstanding.result()))

    def _give_up(self, at: int, why: str) -> None:
        """Ends the boost of a layer whose router turned out not to support it, on every rank alike."""
        if self._comm.rank == 0:
            self._say_refused(at, why)
        self._ports[at].detach()
        del self._layers[at]

    def discard(self) -> None:
        for layer in self._layers.values():
            layer.discard()

    def captured(self) -> dict[str, Any]:
        return {_KEY: self._state()} if self._layers else {}

    def _state(self) -> dict[str, Any]:
        return {
            "left": {str(at): layer.backlog for at, layer in self._layers.items()},
            "carried": {str(at): layer.carried for at, layer in self._layers.items()},
        }

    def close(self) -> None:
        for at in self._layers:
            self._ports[at].detach()
        self._run_ledger = None

    def _end(self) -> None:
        self.close()
        self._layers = {}

    def _summed(self, stored: Iterable[Mapping[str, Any]]) -> Counts:
        """Returns ``[L, E]`` remaining tokens in ``stored``, summed over all ranks. A collective."""
        table = np.zeros(self._shape, dtype=np.int64)
        for plain in stored:
            for at, outstanding in plain.get("left", {}).items():
                table[int(at), : len(outstanding)] += outstanding.cpu().numpy()
        total, _ = self._comm.agree(table, np.zeros(0, dtype=np.int64))
        return total


def _state(rank: int, manifest: Manifest, reader: StoreReader | None) -> Mapping[str, Any]:
    if reader is None:
        raise StoreError(f"the state of rank {rank} is not in this node's memory")
    return reader.state(manifest, rank)
