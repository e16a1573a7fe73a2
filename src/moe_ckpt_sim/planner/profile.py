"""A run's own profile as input of the simulator: its model, machines, speed and restarts.

A figure that the run did not measure raises an error that says how to give it. For figures that no run measures
(network, detection, repair, spares) the defaults of ``Cluster`` are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.storage.local import read_whole
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout, Parallel
from moe_ckpt_sim.failures.failures import Failures
from moe_ckpt_sim.planner.lives import Restarts, RunPace
from moe_ckpt_sim.planner.profile_document import (
    MAX_PROFILE_BYTES,
    Life,
    OperatorRow,
    Profile,
    ProfiledModel,
    decode_profile,
)
from moe_ckpt_sim.run.scenario import Scenario
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.workload.load import ExpertLoad
from moe_ckpt_sim.workload.model import Precision, SimModel
from moe_ckpt_sim.workload.training import Batch, Iteration

_T = TypeVar("_T")
_KINDS = {kind.value: kind for kind in OperatorKind}
_MOST_SKEWED = 0.999


def read_profile(path: str | os.PathLike[str]) -> RunProfile:
    """Read the profile that ``MoECheckpoint(profile=path)`` or ``megatron.attach(profile=path)`` wrote.

    Raises:
        ConfigError: the file is not there, or cannot be read.
        FormatVersionError: a newer moe_ckpt wrote it.
        DamagedError: the file is damaged; the message names the field.
    """
    name = os.fspath(path)
    try:
        raw = read_whole(name, MAX_PROFILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the profile {name} cannot be read: {error.strerror or error}. A run writes one that is given "
            "MoECheckpoint(profile=...) or megatron.attach(profile=...)"
        ) from error
    return RunProfile(name, decode_profile(raw, name))


@dataclass(frozen=True)
class RunProfile:
    """The parts of a simulation that a profile has measured.

    Figures that change between lives are of the newest life that recorded them.

    Attributes:
        path: The profile's path, for messages.
    """

    path: str
    profile: Profile

    # --- measurements ---

    @cached_property
    def pace(self) -> RunPace:
        """The run's training speed."""
        return RunPace(self.path, self.lives)

    @cached_property
    def restarts(self) -> Restarts:
        """The costs of the run's restarts."""
        return Restarts(self.lives, self.pace)

    @property
    def lives(self) -> tuple[Life, ...]:
        """The lives of the run, oldest first."""
        return self.profile.lives

    @cached_property
    def life(self) -> Life:
        """The newest life in which a step was done."""
        trained = [life for life in self.lives if life.steps]
        if not trained:
            raise ConfigError(f"the profile {self.path} has no life in which a step was done: train for a while first")
        return trained[-1]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one iteration trains, before top-k: the assignments of all lives per step, layer and k."""
        steps, assigned = sum(life.steps for life in self.lives), sum(life.assignments for life in self.lives)
        chosen = sum(layer.top_k or 0 for layer in self._model.layers)
        if not (steps and assigned and chosen) or any(layer.top_k is None for layer in self._model.layers):
            raise ConfigError(
                f"the profile {self.path} does not tell tokens per step: it needs steps, routed tokens and the top_k "
                "of every MoE layer. Give tokens_per_step"
            )
        return max(1, round(assigned / steps / chosen))

    # --- inputs of the simulator ---

    @cached_property
    def _model(self) -> ProfiledModel:
        return self._require_measured(
            self.profile.model, "model", "train for some more steps, so that its tensors are weighed"
        )

    @cached_property
    def sizes(self) -> Mapping[str, OperatorBytes]:
        """Bytes of each operator, all ranks together."""
        return {op: row.size for row in self._model.operators for op in row.ids}

    @cached_property
    def sim_model(self) -> SimModel:
        """The model with the run's own operators and bytes.

        A profile has no layers of the network and no sequences: the layers are the run's pipeline stages, and each
        sequence has one token.
        """
        rows = self._model.operators
        layers = tuple(
            MoELayer(at, layer.name, layer.experts, layer.top_k) for at, layer in enumerate(self._model.layers)
        )
        operators = tuple(_operator(op) for row in rows for op in row.ids)
        catalog = Catalog(operators, layers, {op.id: (1,) for op in operators})
        return SimModel(
            os.path.basename(self.path),
            catalog,
            _spread(rows, "elements"),
            _spread(rows, "stage"),
            max((row.stage for row in rows), default=0) + 1,
            max((layer.top_k or 1 for layer in layers), default=1),
            seq=1,
            exact_bytes=self.sizes,
        )

    @property
    def precision(self) -> Precision:
        """Mean bytes per parameter. Only the sum of masters and moments is known; ``sim_model`` has the exact sizes."""
        parameters = max(1, sum(row.elements * row.count for row in self._model.operators))
        full = sum(row.full_bytes * row.count for row in self._model.operators) / parameters
        compute = sum(row.compute_bytes * row.count for row in self._model.operators) / parameters
        return Precision(compute, full / 3, full * 2 / 3, "as profiled")

    @property
    def parallel(self) -> Parallel:
        return Parallel(self.life.pp, self.life.dp, self.life.ep)

    def cluster(self, *, restart_secs: float | None = None, **others: Any) -> Cluster:
        """The machines of the newest life that trained.

        Args:
            restart_secs: ``Restarts.set_up_secs`` if None.
            **others: Fields of ``Cluster``, above all those that a run does not measure: ``detect_secs``,
                ``repair_secs``, ``spare_nodes``, and ``nic_bytes_per_sec`` if no peers had copies.

        Raises:
            ConfigError: a rate was not measured and is not given.
        """
        life = self.life
        if restart_secs is None:
            restart_secs = self._require_measured(self.restarts.set_up_secs, "restart_secs", "give restart_secs")
        if others.get("pcie_bytes_per_sec") is None:
            others["pcie_bytes_per_sec"] = self._rate("copy_bytes_per_sec", "pcie_bytes_per_sec")
        if others.get("storage_bytes_per_sec") is None:
            rate = self._rate("persist_bytes_per_sec", "storage_bytes_per_sec")
            others["storage_bytes_per_sec"] = rate * life.ranks
        sent = self.pace.newest("send_bytes_per_sec")
        if sent and others.get("nic_bytes_per_sec") is None:
            others["nic_bytes_per_sec"] = sent * max(1, life.replicas) * life.ranks_per_node
        measured: dict[str, Any] = {
            "name": f"the cluster of {os.path.basename(self.path)}",
            "nodes": -(-life.ranks // life.ranks_per_node),
            "gpus_per_node": life.ranks_per_node,
            "host_memory_bytes": float(life.host_memory_bytes * life.ranks_per_node),
        }
        return Cluster(**{**measured, "restart_secs": restart_secs, **others})

    def _rate(self, name: str, field: str) -> float:
        return self._require_measured(self.pace.newest(name), name, f"let a checkpoint be committed, or give {field}")

    def layout(self, cluster: Cluster | None = None, parallel: Parallel | None = None) -> ClusterLayout:
        """The run's own layout, or its model on another cluster."""
        sharded = self.pace.newest("held_alike") is False
        return ClusterLayout(self.sim_model, cluster or self.cluster(), parallel or self.parallel, sharded)

    def iteration(self) -> Iteration:
        pace = self.pace
        return Iteration(pace.clean_iteration_secs, pace.update_secs, drag_secs_per_byte=pace.drag_secs_per_byte)

    def batch(self, tokens_per_step: int | None = None) -> Batch:
        """The batch, in sequences of one token (``sim_model.seq``)."""
        tokens, dp = tokens_per_step or self.tokens_per_step, self.life.dp
        return Batch(max(1, round(tokens / dp)) * dp, 1)

    def load(self) -> ExpertLoad:
        """A load as skewed as the run's, with the default drift, since drift is not recorded."""
        skewness = self.pace.newest("skewness")
        return ExpertLoad() if skewness is None else ExpertLoad(min(skewness, _MOST_SKEWED))

    def _require_measured(self, value: _T | None, name: str, remedy: str) -> _T:
        if value is None:
            raise ConfigError(f"the profile {self.path} does not tell {name}: {remedy}")
        return value


def scenario_from(
    profile: RunProfile,
    failures: Failures,
    system: System,
    duration_secs: float = 12 * 3600.0,
    seed: int = 0,
    *,
    cluster: Cluster | None = None,
    tokens_per_step: int | None = None,
) -> Scenario:
    """The scenario of the profiled run under ``failures`` and with ``system``.

    Args:
        cluster: None for the run's own.

    Raises:
        ConfigError: neither the profile nor the arguments have a needed figure, or settings contradict each other.
    """
    return Scenario(
        layout=profile.layout(cluster),
        precision=profile.precision,
        batch=profile.batch(tokens_per_step),
        iteration=profile.iteration(),
        failures=failures,
        system=system,
        load=profile.load(),
        duration_secs=duration_secs,
        seed=seed,
    )


def _operator(op: str) -> Operator:
    kind, _, rest = op.partition("/")
    numbers = [] if kind == OperatorKind.NON_EXPERT.value else [int(part) for part in rest.split("/")]
    return Operator(op, _KINDS[kind], (Span(op),), *numbers)


def _spread(rows: Iterable[OperatorRow], name: str) -> dict[str, int]:
    """A field of the rows, by operator."""
    return {op: getattr(row, name) for row in rows for op in row.ids}
