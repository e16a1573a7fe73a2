"""A run's own profile as input of the simulator: what it trained, on what, how fast, and what its restarts took.

What the run did not measure is an error that says how to give it; of what no run measures (network, detection, repair,
spares) the defaults of ``Cluster`` hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Any, TypeVar

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.profile import MAX_PROFILE_BYTES, Life, OperatorRow, Profile, ProfiledModel, decode_profile
from moe_ckpt.sim.cluster import Cluster, Layout, Parallel
from moe_ckpt.sim.failures import Failures
from moe_ckpt.sim.load import ExpertLoad
from moe_ckpt.sim.model import Precision, SimModel
from moe_ckpt.sim.scenario import Scenario
from moe_ckpt.sim.system import System
from moe_ckpt.sim.training import Batch, Iteration
from moe_ckpt.storage.local import read_whole

_T = TypeVar("_T")
_KINDS = {kind.value: kind for kind in OperatorKind}
_MOST_SKEWED = 0.999
_ENOUGH_LAPS = 20
_LONGEST_UPDATE = 0.95
"""Portion of an iteration. Where the optimizer takes nearly all of it, its median and the iteration's may cross."""


def read_profile(path: str | os.PathLike[str]) -> RunProfile:
    """The profile that ``MoECheckpoint(profile=path)`` or ``megatron.attach(profile=path)`` wrote.

    Raises:
        ConfigError: the file is not there, or cannot be read.
        FormatVersionError: a newer moe_ckpt wrote it.
        DamagedError: names file and field.
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
    """What a profile tells a simulation. What changes between lives is that of the newest life that tells it.

    Attributes:
        path: For messages.
    """

    path: str
    profile: Profile

    # --- what was measured ---

    @property
    def lives(self) -> tuple[Life, ...]:
        """Oldest first."""
        return self.profile.lives

    @cached_property
    def life(self) -> Life:
        """The newest in which a step was done."""
        trained = [life for life in self.lives if life.steps]
        if not trained:
            raise ConfigError(f"the profile {self.path} has no life in which a step was done: train for a while first")
        return trained[-1]

    @property
    def iteration_secs(self) -> float:
        """Without checkpoints. The lesser of two medians: of iterations that had no checkpoint work beside them, which
        may have waited for some, and of all, less what they waited, which may have been slowed down.
        """
        known = [secs for secs in map(self._newest, ("iteration_secs", "recent_iteration_secs")) if secs is not None]
        return self._known(min(known, default=None), "iteration_secs", "train for some more steps")

    @property
    def mean_lap_secs(self) -> float | None:
        """From step to step, all in: stalls, validation, epochs' ends. The newest life with two steps or more."""
        for life in reversed(self.lives):
            took = _between(life.training_unix_secs, life.last_step_unix_secs)
            if life.steps > 1 and took is not None:
                return max(0.0, took - (life.first_step_secs or 0.0)) / (life.steps - 1)
        return None

    @cached_property
    def clean_iteration_secs(self) -> float:
        """Mean of all iterations that had no checkpoint work beside them, those that are slow for other reasons
        included; where hardly any had none, of all, less what they waited. What the simulator takes: of a sum of many
        iterations the mean tells more than the median.
        """
        steps, secs = sum(life.clean_steps for life in self.lives), sum(life.clean_secs for life in self.lives)
        (laps, took), usual = self._laps(), self.iteration_secs
        if secs and steps >= min(_ENOUGH_LAPS, laps):
            return secs / steps
        waited = self.stall_secs_per_step * laps
        return (took - waited) / laps if took > waited else usual

    @property
    def drag_secs_per_byte(self) -> float:
        """What iterations took longer than clean ones, over the bytes of the snapshots, rank 0's; without waits for a
        free buffer, or for copies that need longer than the time between two updates, which the simulator adds itself.
        """
        laps, took = self._laps()
        steps = sum(life.steps for life in self.lives)
        nbytes = sum(life.snapshot_bytes for life in self.lives)
        if not (laps and nbytes):
            return 0.0
        waited = sum(life.waited_secs for life in self.lives)
        copy_rate, secs = self._newest("copy_bytes_per_sec"), self.clean_iteration_secs
        if copy_rate:
            copy_secs = self.mean_snapshot_bytes / copy_rate
            waited += max(0.0, copy_secs - (secs - self._update_secs(secs))) * sum(life.begun for life in self.lives)
        return max(0.0, (took / laps - secs) * steps - waited) / nbytes

    def _laps(self) -> tuple[int, float]:
        """From step to step, of all lives, all in: how many, and seconds. A life's first step is none."""
        told = [
            (life.steps - 1, took - (life.first_step_secs or 0.0))
            for life in self.lives
            if life.steps > 1 and (took := _between(life.training_unix_secs, life.last_step_unix_secs)) is not None
        ]
        return sum(laps for laps, _ in told), sum(max(0.0, secs) for _, secs in told)

    @property
    def stall_secs_per_step(self) -> float:
        return sum(life.stall_secs for life in self.lives) / max(1, sum(life.steps for life in self.lives))

    @property
    def stall_secs_per_snapshot(self) -> float:
        return sum(life.stall_secs for life in self.lives) / max(1, sum(life.begun for life in self.lives))

    @property
    def mean_snapshot_bytes(self) -> float:
        """Of rank 0."""
        return sum(life.snapshot_bytes for life in self.lives) / max(1, sum(life.begun for life in self.lives))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one iteration trains, before top-k. Of all lives; the router's assignments over layers and k."""
        steps, assigned = sum(life.steps for life in self.lives), sum(life.assignments for life in self.lives)
        chosen = sum(layer.top_k or 0 for layer in self._model.layers)
        if not (steps and assigned and chosen) or any(layer.top_k is None for layer in self._model.layers):
            raise ConfigError(
                f"the profile {self.path} does not tell tokens per step: it needs steps, routed tokens and the top_k "
                "of every MoE layer. Give tokens_per_step"
            )
        return max(1, round(assigned / steps / chosen))

    # --- what failures cost ---

    @property
    def restart_secs(self) -> float | None:
        """Median from the start of the process to training: imports, building, loading, and steps computed again."""
        return _middle(_between(life.started_unix_secs, life.training_unix_secs) for life in self.lives)

    @property
    def load_secs(self) -> float | None:
        """Median, of lives that loaded something: part of ``restart_secs``."""
        return _middle(life.load_secs for life in self.lives)

    @property
    def replay_secs(self) -> float | None:
        """Median of computing a sparse window again, of lives that did: part of ``restart_secs``."""
        again = (_between(life.ready_unix_secs, life.training_unix_secs) for life in self.lives)
        return _middle(secs for secs in again if secs)

    @property
    def warm_up_secs(self) -> float | None:
        """Mean of what a restart's first step took longer than an iteration: loaders and kernels start."""
        if all(self._newest(name) is None for name in ("iteration_secs", "recent_iteration_secs")):
            return None
        found = [life.first_step_secs for life in self._restarted if life.first_step_secs is not None]
        return max(0.0, fmean(found) - self.clean_iteration_secs) if found else None

    @property
    def _restarted(self) -> Sequence[Life]:
        return [later for _, later in self._restarts()] or self.lives

    @property
    def set_up_secs(self) -> float | None:
        """What a restart takes besides loading and computing steps again: up to a process that can load, from a loaded
        one to its loop, and the warm-up. This is ``Cluster.restart_secs``. Mean of the restarts, since it is their sum
        that a run pays for; of the first start where there was none, which may be slower, its files not being cached.
        """
        found = [secs for life in self._restarted if (secs := self._set_up(life)) is not None]
        return fmean(found) + (self.warm_up_secs or 0.0) if found else None

    @staticmethod
    def _set_up(life: Life) -> float | None:
        secs = _between(life.started_unix_secs, life.ready_unix_secs)
        return None if secs is None else max(0.0, secs - (life.load_secs or 0.0))

    @property
    def gap_secs(self) -> tuple[float, ...]:
        """From what was last heard of a life to the start of the next one's process, lives of one store."""
        return tuple(_between(a.last_unix_secs, b.started_unix_secs) or 0.0 for a, b in self._restarts())

    @property
    def downtime_secs(self) -> tuple[float, ...]:
        """From what was last heard of a life to the next one's training; of one that never trained, left out."""
        found = (_between(a.last_unix_secs, b.training_unix_secs) for a, b in self._restarts())
        return tuple(secs for secs in found if secs is not None)

    def _restarts(self) -> Iterable[tuple[Life, Life]]:
        return ((a, b) for a, b in pairwise(self.lives) if a.run_id == b.run_id and not a.finished)

    # --- what the simulator takes ---

    @cached_property
    def _model(self) -> ProfiledModel:
        return self._known(self.profile.model, "model", "train for some more steps, so that its tensors are weighed")

    @cached_property
    def sizes(self) -> Mapping[str, OperatorBytes]:
        """What each operator weighs, all ranks together."""
        return {op: row.size for row in self._model.operators for op in row.ids}

    @cached_property
    def sim_model(self) -> SimModel:
        """With the run's own bytes, and its operators in their order. Its "layers of the network" are the run's
        pipeline stages, and its sequences are of one token, since a profile knows no others.
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
        """Mean bytes per parameter. Of masters and moments only the sum is known; ``sim_model`` has the exact sizes."""
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
            restart_secs: ``set_up_secs`` if None.
            **others: Fields of ``Cluster``, above all what a run does not measure: ``detect_secs``, ``repair_secs``,
                ``spare_nodes``, and ``nic_bytes_per_sec`` where no peers had copies.

        Raises:
            ConfigError: a rate was not measured and is not given.
        """
        life = self.life
        if restart_secs is None:
            restart_secs = self._known(self.set_up_secs, "restart_secs", "give restart_secs")
        if others.get("pcie_bytes_per_sec") is None:
            others["pcie_bytes_per_sec"] = self._rate("copy_bytes_per_sec", "pcie_bytes_per_sec")
        if others.get("storage_bytes_per_sec") is None:
            rate = self._rate("persist_bytes_per_sec", "storage_bytes_per_sec")
            others["storage_bytes_per_sec"] = rate * life.ranks
        sent = self._newest("send_bytes_per_sec")
        if sent and others.get("nic_bytes_per_sec") is None:
            others["nic_bytes_per_sec"] = sent * max(1, life.replicas) * life.ranks_per_node
        known: dict[str, Any] = {
            "name": f"as profiled in {os.path.basename(self.path)}",
            "nodes": -(-life.ranks // life.ranks_per_node),
            "gpus_per_node": life.ranks_per_node,
            "host_memory_bytes": float(life.host_memory_bytes * life.ranks_per_node),
        }
        return Cluster(**{**known, "restart_secs": restart_secs, **others})

    def _rate(self, name: str, field: str) -> float:
        return self._known(self._newest(name), name, f"let a checkpoint be committed, or give {field}")

    def layout(self, cluster: Cluster | None = None, parallel: Parallel | None = None) -> Layout:
        """The run's own, or its model elsewhere."""
        return Layout(self.sim_model, cluster or self.cluster(), parallel or self.parallel)

    def iteration(self) -> Iteration:
        secs = self.clean_iteration_secs
        return Iteration(secs, self._update_secs(secs), drag_secs_per_byte=self.drag_secs_per_byte)

    def _update_secs(self, iteration_secs: float) -> float:
        return min(self._newest("update_secs") or 0.0, _LONGEST_UPDATE * iteration_secs)

    def batch(self, tokens_per_step: int | None = None) -> Batch:
        """In sequences of one token, ``sim_model.seq``."""
        tokens, dp = tokens_per_step or self.tokens_per_step, self.life.dp
        return Batch(max(1, round(tokens / dp)) * dp, 1)

    def load(self) -> ExpertLoad:
        """As skewed as the run's; its drift is not recorded, and is the default."""
        skewness = self._newest("skewness")
        return ExpertLoad() if skewness is None else ExpertLoad(min(skewness, _MOST_SKEWED))

    def _newest(self, name: str) -> float | None:
        """The field, of the newest life that tells it."""
        told = (getattr(life, name) for life in reversed(self.lives))
        found: float | None = next((value for value in told if value is not None), None)
        return found

    def _known(self, value: _T | None, name: str, remedy: str) -> _T:
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
    """The profiled run again, under ``failures`` and with ``system``.

    Args:
        cluster: None for the run's own.

    Raises:
        ConfigError: the profile lacks something that is not given, or the settings contradict each other.
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
    """Operator -> a field of its row."""
    return {op: getattr(row, name) for row in rows for op in row.ids}


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
