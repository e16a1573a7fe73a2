"""Errors keep message and facts when they travel between processes."""

from __future__ import annotations

import pickle

import pytest

from moe_ckpt import errors

EXAMPLES = [
    errors.DamagedError("a/b", "checksum mismatch", step=3, rank=1),
    errors.StoreUnreadableError("a/b", "[Errno 5] Input/output error", step=3, rank=1),
    errors.StoreForbiddenError("a/b", "[Errno 13] Permission denied", step=3, rank=1),
    errors.StepRemovedError("/store", ("step_00000003",), "a/b"),
    errors.CoverageError("checkpoint", ("x is missing", "y is missing")),
    errors.MissingPackageError("matplotlib", "plot()", "plot"),
    errors.FormatVersionError("store.json", 9, 1),
    errors.StoreInUseError("/store", "pid 7"),
    errors.SaveFailedError(3, ("disk full",)),
    errors.HostMemoryError(10, 5),
    errors.DeviceMemoryError("cuda:0", 10, 5, 20, 80),
    errors.PeerLostError(1, "all ranks", 60.0, "Timed out", "See there"),
    errors.UnencodableStateError("callbacks/x", "Thing"),
    errors.NoCheckpointError("nothing here"),
    errors.StoreUnwritableError("read-only"),
    errors.ConfigError("k"),
    errors.OtherLayoutError("step_00000009", "that 4 ranks computed, and this run has 2", "Start 4 ranks."),
    errors.ReplayDivergedError(8, "the next optimizer step was step 9"),
    errors.ReplayDivergedError(8, "step of head.weight is 7.0, recorded was 3.0", logged=True),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_pickled_errors_say_the_same(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(("free", "lacks_files"), [(99, False), (100, True)])
def test_a_file_system_that_has_bytes_lacks_files(free, lacks_files):
    assert ("no file left (df -i)" in str(errors.MemoryFullError("/dev/shm", 100, free))) is lacks_files


@pytest.mark.parametrize(
    "cause",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:49152",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: Connection reset by peer",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_a_lost_connection_is_no_timeout(cause):
    said = str(errors.PeerLostError(1, "all ranks", 60.0, cause, "See there"))
    assert said.startswith(f"rank 1 lost the connection to a peer while waiting for all ranks: {cause}. ")
    assert "timeout_secs" not in said
    assert said.endswith("The first error in the other ranks' output shows the cause. See there")


@pytest.mark.parametrize("cause", ["Timed out waiting 5000ms for recv operation", "TimeoutError: timed out"])
def test_a_timeout_names_its_setting(cause):
    said = str(errors.PeerLostError(1, "all ranks", 60.0, cause))
    assert said.startswith(f"rank 1 timed out waiting for all ranks: {cause}. ")
    assert said.endswith("raise timeout_secs=60")


def test_a_torn_snapshot_of_an_adapted_stack_names_peft():
    plain, adapted = "model/net.layers.0.experts.down_proj", "model/net.layers.0.experts.base_layer.down_proj"
    assert "PEFT" not in str(errors.torn_snapshot(3, (plain,)))
    assert "LoraConfig(target_parameters=...)" in str(errors.torn_snapshot(3, (plain, adapted)))
