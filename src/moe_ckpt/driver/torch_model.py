"""Opens the store of a run that trains a torch module, and loads the module's state, whichever loop trains it."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.operators import grid_of
from moe_ckpt.driver.changes import Change, groups_of, optimizer_changes, trainable_changes
from moe_ckpt.driver.host import Host, loading_state
from moe_ckpt.driver.run import Driver
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.interop.handover import Handover, load_handover
from moe_ckpt.interop.weights import LoadedWeights, load_module_weights
from moe_ckpt.modeling.discover import build_catalog, find_moe_layers
from moe_ckpt.modeling.module_state import FrozenExperts
from moe_ckpt.modeling.names import tied_aliases
from moe_ckpt.modeling.rng import Generators, capture_rng, restore_rng
from moe_ckpt.modeling.routing import RoutingCounter, TrainingPasses
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.policies.base import GATE_WEIGHTS
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.replay import Repeated


def open_torch(
    driver: Driver,
    module: nn.Module,
    state: TorchTrainingState,
    passes: TrainingPasses,
    *,
    on_device: bool,
    no_boost: str | None = None,
    **rest: Any,
) -> RoutingCounter:
    """Opens the store of a run that trains ``module``, and returns the counter of its tokens.

    Args:
        driver: Of the run.
        module: The model, without wrappers of data parallelism.
        state: Of the model and its optimizers.
        passes: Tells which forward passes are training's.
        on_device: Training runs on a GPU.
        no_boost: Why no layer can take a capacity boost; None if layers can.
        **rest: Further arguments of ``Driver.open``.

    Raises:
        ConfigError: The policy does not suit the model; else as ``CheckpointSession.open``.
    """
    options, needs, stopwatch = driver.options, driver.options.needs, driver.stopwatch
    if options.memory is not None and options.memory.upstream_bytes is not None:
        raise ConfigError("Memory(upstream_bytes=...): only stages of a Megatron pipeline go back alone. Leave it out")
    layers = find_moe_layers(module)
    catalog = build_catalog(module, layers)
    options.policy.check(catalog)
    # Costs time at every update, so only if experts may be restored older.
    frozen = FrozenExperts(catalog, state.frozen) if needs.partial else None
    soft = needs.popularity == GATE_WEIGHTS
    counter = RoutingCounter(module, layers, soft=soft, frozen=frozen, passes=passes, stopwatch=stopwatch)
    try:
        comm = make_communicator(options.timeout_secs, late=on_device)
        boost = None
        if needs.boost is not None:
            from moe_ckpt.boost.life import Boosting
            from moe_ckpt.boost.ports import boost_ports

            ports = boost_ports(layers, no_boost, passes)
            boost = Boosting(needs.boost, ports, grid_of(catalog.layers), comm, stopwatch)
        driver.open(comm, catalog, state, aliases=tied_aliases(module), boost=boost, pinned=on_device, **rest)
    except BaseException:
        counter.close()  # a caller may catch this and train without checkpoints
        driver.close(0.0)
        raise
    return counter


class TorchHost(Host):
    """The host of a torch model: loads the state of model, optimizers and random numbers.

    Args:
        module: The model, without wrappers of data parallelism.
        optimizers: All that update it.

    Attributes:
        module: As given.
        state: Of the model and its optimizers.
        generators: The random numbers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.module = module
        self.state = TorchTrainingState(module, optimizers)
        self.generators = Generators(capture_rng, restore_rng)
        frozen = hashlib.sha256("\n".join(sorted(self.state.frozen())).encode()).hexdigest()[:16]
        self._configured: Mapping[str, Any] = {"optimizers": groups_of(optimizers), "frozen": frozen}

    @property
    @abstractmethod
    def _scheduled(self) -> Iterable[Any]:
        """Returns objects, among them the learning rate schedules and gradient scalers."""

    @abstractmethod
    def _count_from(self, step: int) -> None:
        """Sets the loop's count to ``step``, the steps that another host has done."""

    def admits(self, manifest: Manifest, plain: Mapping[str, Any]) -> None:
        began = [len(groups) for groups in plain["configured"]["optimizers"]]
        self.state.add_stored_groups(plain["plain"], began)

    def advance_counts(self, missed: Mapping[str, int]) -> None:
        self.state.advance_counts(missed)

    def load_weights(self, path: str, comm: Communicator) -> LoadedWeights:
        # An attribute of LightningModule: if False, names may be missing on either side.
        strict = bool(getattr(self.module, "strict_loading", True))
        return load_module_weights(path, self.state, comm, self.module, strict=strict)

    def load_state(self, path: str, comm: Communicator, experts: Sequence[int]) -> tuple[Handover, Sequence[Change]]:
        handover = load_handover(path, self.state, comm, experts)
        differences = self._load_model(handover.plain, handover.path)
        with loading_state("a learning rate schedule or a gradient scaler", handover.path):
            handover.hand_out(self._scheduled)
        differences += optimizer_changes(handover.groups, self._configured["optimizers"])
        if handover.groups:
            self._configured = {**self._configured, "optimizers": handover.groups}
        self._count_from(handover.manifest.step)
        return handover, differences

    def _load_model(self, plain: Mapping[str, Any], path: str) -> list[Change]:
        """Loads the plain state of model and optimizers, and takes the random numbers.

        Args:
            plain: This rank's plain state.
            path: Of its file, for messages.

        Returns:
            Parameters that the script freezes or thaws, and the script of the checkpoint did not.
        """
        now = self.state.frozen()
        with loading_state("the model and its optimizers", path):
            self.state.load_plain(plain["plain"])
        self.generators.schedule(plain["rng"])
        same = plain["configured"].get("frozen") == self._configured["frozen"]  # else training froze or thawed them
        return [] if same else trainable_changes(plain["plain"]["frozen"], now)

    def repeated(self, before: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterable[Repeated]:
        return _REPEATED


_REPEATED: tuple[Repeated, ...] = (
    ("the state of the random number generators", lambda state: state["rng"]),
    (
        "the hyperparameters of the optimizers",
        lambda state: [optimizer["param_groups"] for optimizer in state["plain"]["optimizers"]],
    ),
)
