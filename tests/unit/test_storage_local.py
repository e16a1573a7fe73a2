"""LocalStorage on a real directory; single system calls are made to fail where the kernel will not do it for us."""

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_ckpt.errors import ConfigError, DamagedError, StoreUnwritableError
from moe_ckpt.storage import LocalStorage, RemoteStorage, Storage, StoreLock, open_storage
from moe_ckpt.storage.local import PRIVATE, make_directories

PATH = "step_00000001/rank_00000_expert.safetensors"


def tree(root):
    """Every name below the root, relative to it."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


@pytest.fixture
def root(tmp_path):
    return tmp_path / "deep" / "store"


@pytest.fixture
def storage(root):
    return LocalStorage(root)


def test_it_is_a_storage(storage):
    assert isinstance(storage, Storage)


def test_write_then_read_whole_and_ranges(storage):
    payload = os.urandom(9 << 20)  # more than one write call
    chunks = [payload[:5], memoryview(bytearray(payload))[5:], b"", bytearray(b"end")]
    assert storage.write(PATH, chunks) == (9 << 20) + 3
    assert storage.read(PATH) == payload + b"end"
    assert storage.read(PATH, 7, 11) == payload[7:18]
    assert storage.read(PATH, (9 << 20) + 1, 1 << 60) == b"nd"
    assert storage.read(PATH, 1 << 40, 5) == b""
    assert storage.size(PATH) == (9 << 20) + 3


def test_write_takes_views_of_any_element_type(storage):
    import numpy as np

    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    storage.write(PATH, [memoryview(array), memoryview(array[:0])])
    assert storage.read(PATH) == array.tobytes()


def test_listing_existence_and_deletion(storage):
    assert storage.list() == []
    assert storage.list("nowhere") == []
    storage.write("b/2", [b"x"])
    storage.write("b/1", [b"x"])
    storage.write("a/1", [b"x"])
    assert storage.list() == ["a", "b"]
    assert storage.list("b") == ["1", "2"]
    assert storage.list("b/1") == []
    assert storage.exists("b")
    assert storage.exists("b/1")
    assert not storage.exists("b/3")
    storage.delete_dir("b")
    assert storage.list("b") == ["1", "2"]
    storage.delete("b/1")
    storage.delete("b/2")
    storage.delete("b/2")
    storage.delete_dir("b")
    storage.delete_dir("b")
    assert storage.list() == ["a"]


@pytest.mark.parametrize("verb", ["read", "size"])
def test_missing_files_raise(storage, verb):
    with pytest.raises(FileNotFoundError):
        getattr(storage, verb)("step_00000001/none")


def test_an_existing_file_is_never_overwritten(storage, root):
    storage.write(PATH, [b"first"])
    with pytest.raises(FileExistsError, match="never overwritten"):
        storage.write(PATH, [b"second"])
    assert storage.read(PATH) == b"first"
    assert files(root) == [PATH]


@pytest.mark.parametrize("hard_links", [True, False])
def test_losing_a_race_for_the_name_keeps_the_winner(storage, root, monkeypatch, hard_links):
    """Another writer takes the name after the first check, just before ours is given to the file."""
    if not hard_links:
        monkeypatch.setattr(os, "link", _failing(errno.EPERM))

    def on_phase(phase):
        if phase == "rename":
            (root / PATH).write_bytes(b"winner")

    with pytest.raises(FileExistsError):
        LocalStorage(root, on_phase).write(PATH, [b"loser"])
    assert storage.read(PATH) == b"winner"
    assert files(root) == [PATH]


def test_file_systems_without_hard_links_are_served_by_rename(storage, root, monkeypatch):
    monkeypatch.setattr(os, "link", _failing(errno.EOPNOTSUPP))
    storage.write(PATH, [b"x"])
    assert files(root) == [PATH]
    assert storage.read(PATH) == b"x"


def test_modes_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        LocalStorage(tmp_path / "a" / "store").write(PATH, [b"x"])
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a").rglob("*")}
    assert modes == {"store": 0o700, "step_00000001": 0o700, "rank_00000_expert.safetensors": 0o600}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


ACCESS_MODES = [
    ("private", 0o000, 0o600, 0o700),
    ("private", 0o077, 0o600, 0o700),
    ("group", 0o000, 0o640, 0o750),
    ("group", 0o022, 0o640, 0o750),
    ("group", 0o077, 0o640, 0o750),
    ("umask", 0o022, 0o644, 0o755),
    ("umask", 0o027, 0o640, 0o750),
    ("umask", 0o002, 0o664, 0o775),
]


@pytest.mark.parametrize(("access", "umask", "file_mode", "directory_mode"), ACCESS_MODES)
def test_access_says_who_may_read(tmp_path, access, umask, file_mode, directory_mode):
    """Of every file and directory that a store consists of: also those above it, the lock and half-written files."""
    seen = {}

    def on_phase(phase):
        seen.update({path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*.tmp")})

    before = os.umask(umask)
    try:
        root = tmp_path / "a" / "store"
        storage = open_storage(root, on_phase, access=access)
        storage.probe()
        with StoreLock(storage, "me", access=access):
            storage.write(PATH, [b"x"])
    finally:
        os.umask(before)
    directories = (tmp_path / "a", root, root / "step_00000001")
    assert [stat.S_IMODE(path.stat().st_mode) for path in directories] == [directory_mode] * 3
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
    assert set(found.values()) == {file_mode}
    assert {".lock", "rank_00000_expert.safetensors"} <= found.keys()
    assert set(seen.values()) == {file_mode}


def test_group_access_keeps_what_a_project_directory_hands_down(tmp_path):
    tmp_path.chmod(0o2770)
    open_storage(tmp_path / "store", access="group").write(PATH, [b"x"])
    for path in (tmp_path / "store", tmp_path / "store" / "step_00000001"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o2750


def test_a_store_that_was_private_before_is_said_to_be_closed(tmp_path, caplog):
    LocalStorage(tmp_path / "store").probe()
    LocalStorage(tmp_path / "store", access="group").probe()
    assert "closed to its group: chmod -R g+rX" in caplog.text


def test_access_has_no_effect_behind_a_url_and_that_is_said(caplog):
    assert isinstance(open_storage("memory://x", access="group"), RemoteStorage)
    assert "access='group' has no effect on memory://x" in caplog.text


def test_phases_come_before_their_action(root):
    seen = []
    storage = LocalStorage(root, lambda phase: seen.append((phase, files(root))))
    storage.write("d/MANIFEST.json", [b"x"])
    storage.delete("d/MANIFEST.json")
    assert [phase for phase, _ in seen] == ["manifest", "write", "fsync", "rename", "fsync", "gc"]
    named = ["d/MANIFEST.json" in names for _, names in seen]
    assert named == [False, False, False, False, True, True]
    assert seen[1][1] == []
    assert len(seen[2][1]) == len(seen[3][1]) == 1


def test_order_of_system_calls_survives_a_power_loss(root, monkeypatch):
    """file synced before it is named; then its directory; and every directory made on the way."""
    calls = []
    _trace(monkeypatch, calls)
    storage = LocalStorage(root)
    storage.write("step_00000001/f", [b"x"])
    top = str(root.parent.parent)
    assert calls == [
        ("fsync", top),
        ("fsync", str(root.parent)),
        ("fsync", str(root)),
        ("fsync", "TEMPORARY"),
        ("link", str(root / "step_00000001/f")),
        ("fsync", str(root / "step_00000001")),
    ]
    calls.clear()
    storage.write("step_00000001/g", [b"x"])
    assert [what for what, _ in calls] == ["fsync", "link", "fsync"]


def test_a_directory_made_by_another_rank_is_synced_too(root, monkeypatch):
    LocalStorage(root).write("step_00000001/f", [b"x"])
    calls = []
    _trace(monkeypatch, calls)
    LocalStorage(root).write("step_00000001/g", [b"x"])
    assert calls[0] == ("fsync", str(root))


def test_removal_of_a_commit_record_is_synced(root, monkeypatch):
    storage = LocalStorage(root)
    storage.write("d/MANIFEST.json", [b"x"])
    storage.write("d/other", [b"x"])
    calls = []
    _trace(monkeypatch, calls)
    storage.delete("d/other")
    assert calls == []
    storage.delete("d/MANIFEST.json")
    assert calls == [("fsync", str(root / "d"))]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_the_nth_system_call_fails_for_every_n(tmp_path, error):
    """Whichever call fails, nothing of the new file is left and the old one is whole; then the next write works."""
    survived = 0
    for n in range(1, 100):
        root = tmp_path / str(n)
        storage = LocalStorage(root)
        storage.write("step_00000001/old", [b"old"])
        with pytest.MonkeyPatch.context() as patch:
            count = _fail_nth(patch, n, error)
            raised = None
            try:
                storage.write("step_00000002/new", [b"a" * 100, b"b" * 100])
            except OSError as caught:
                raised = caught
        survived += raised is None
        if raised is not None:
            assert raised.errno == error
            assert files(root) == ["step_00000001/old"]
        if count["calls"] < n:
            break
        storage.clean_temporaries("step_00000002")
        if not storage.exists("step_00000002/new"):
            storage.write("step_00000002/new", [b"a"])
        assert files(root) == ["step_00000001/old", "step_00000002/new"]
    assert n > 8, "the loop must have met open, writes, fsyncs, link and directory syncs"
    assert survived >= 1


def test_a_failed_fsync_is_not_tried_again(root, monkeypatch):
    calls = []

    def fsync(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError(errno.EIO, "lost pages")

    LocalStorage(root).write("d/first", [b"x"])
    storage = LocalStorage(root)
    storage._durable = str(root / "d")  # so that the first fsync is the file's
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="lost pages"):
        storage.write("d/second", [b"x"])
    assert len(calls) == 1
    assert calls[0].endswith(".tmp")
    assert files(root) == ["d/first"]


def test_short_writes_are_continued(storage, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: real(descriptor, view[:3]))
    storage.write(PATH, [b"0123456789", b"abcd"])
    assert storage.read(PATH) == b"0123456789abcd"


def test_a_write_that_takes_nothing_does_not_hang(storage, root, monkeypatch):
    monkeypatch.setattr(os, "write", lambda descriptor, view: 0)
    with pytest.raises(OSError, match="took no bytes"):
        storage.write(PATH, [b"x"])
    assert files(root) == []


def test_an_error_of_the_callers_chunks_leaves_nothing(storage, root):
    def chunks():
        yield b"half"
        raise RuntimeError("the caller failed")

    with pytest.raises(RuntimeError, match="the caller failed"):
        storage.write(PATH, chunks())
    assert files(root) == []


def test_directories_that_cannot_be_synced_are_accepted(storage, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "cannot sync directories")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    storage.write(PATH, [b"x"])
    assert storage.read(PATH) == b"x"


def test_no_descriptor_is_left_open(storage):
    before = len(os.listdir("/proc/self/fd"))
    for i in range(3):
        storage.write(f"d/{i}", [b"x"])
        storage.read(f"d/{i}")
        with pytest.raises(FileExistsError):
            storage.write(f"d/{i}", [b"x"])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("bad", ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/", "a\\b", "a\0b", ".."])
@pytest.mark.parametrize("verb", ["read", "size", "exists", "delete", "delete_dir", "list", "clean_temporaries"])
def test_paths_that_lead_out_are_refused(storage, bad, verb):
    with pytest.raises(DamagedError, match="is not a path inside the store"):
        getattr(storage, verb)(bad)


def test_symbolic_links_that_lead_out_are_refused(storage, root, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"s")
    root.mkdir(parents=True)
    (root / "step_00000001").symlink_to(tmp_path / "outside")
    (root / "leak").symlink_to(tmp_path / "outside" / "secret")
    for verb in ("read", "size", "delete", "exists"):
        with pytest.raises(DamagedError, match="leads out of the store"):
            getattr(storage, verb)("step_00000001/secret")
    with pytest.raises(DamagedError, match="leads out of the store"):
        storage.write("step_00000001/new", [b"x"])
    with pytest.raises(DamagedError, match="leads out of the store"):
        storage.list("step_00000001")
    with pytest.raises(DamagedError, match="symbolic link"):
        storage.read("leak")
    with pytest.raises(DamagedError, match="not a regular file"):
        storage.size("leak")
    storage.delete("leak")  # removes the link, not what it points to
    assert tree(tmp_path / "outside") == ["secret"]


def test_symbolic_links_that_stay_inside_are_followed(storage, root, tmp_path):
    storage.write("moved/f", [b"x"])
    (root / "step_00000001").symlink_to(root / "moved")
    assert storage.read("step_00000001/f") == b"x"
    assert storage.list("step_00000001") == ["f"]
    (tmp_path / "outside").mkdir()
    (root / "moved" / "deeper").symlink_to(tmp_path / "outside")
    for verb in (storage.list, lambda path: storage.write(f"{path}/g", [b"x"])):
        with pytest.raises(DamagedError, match="leads out of the store"):
            verb("step_00000001/deeper")
    assert not tree(tmp_path / "outside")


def test_a_root_reached_through_a_link_works(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    LocalStorage(tmp_path / "link").write("d/f", [b"x"])
    assert files(tmp_path / "real") == ["d/f"]


def test_a_planted_fifo_does_not_hang_the_reader(storage, root):
    root.mkdir(parents=True)
    os.mkfifo(root / "pipe")
    with pytest.raises(DamagedError, match="not a regular file"):
        storage.read("pipe")


def test_clean_temporaries_takes_only_its_own(storage, root):
    storage.write("d/f", [b"x"])
    for name in (".f.17.0123abcd.tmp", "f.tmp", ".f.tmp", ".hidden", "notes.txt", ".f.17.0123abcd.tmp.bak"):
        (root / "d" / name).write_bytes(b"x")
    assert storage.clean_temporaries("d") == 1
    assert storage.list("d") == [".f.17.0123abcd.tmp.bak", ".f.tmp", ".hidden", "f", "f.tmp", "notes.txt"]
    assert storage.clean_temporaries("nowhere") == 0


def test_probe_creates_the_root_and_leaves_it_empty(storage, root):
    storage.probe()
    assert root.is_dir()
    assert tree(root) == []


def test_probe_names_the_directory_and_the_reason(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreUnwritableError, match=r"(?i)file.*cannot be written: (is a file, )?not a directory"):
            LocalStorage(root).probe()


@pytest.mark.timeout(60)
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc, where no directory can be made")
@pytest.mark.parametrize("root", ["/proc/x", "/proc/x/y", "/proc/x/y/z"])
def test_a_directory_that_the_kernel_will_not_make_is_an_error_and_no_endless_loop(root):
    with pytest.raises(StoreUnwritableError, match=f"{root}.*(No such file|not permitted|denied).*Choose another"):
        LocalStorage(root).probe()


def test_probe_reports_missing_rights(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "open", _failing(errno.EACCES))  # root may write everywhere
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(StoreUnwritableError, match=r"Permission denied.*Choose another dirpath"):
        LocalStorage(tmp_path).probe()


def test_temporaries_lie_next_to_the_target_whatever_tmpdir_says(tmp_path, monkeypatch):
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    seen = []
    root = tmp_path / "store"
    storage = LocalStorage(root, lambda phase: seen.extend(files(root)) if phase == "rename" else None)
    storage.write("d/f", [b"x"])
    assert seen[0].startswith("d/.f.")
    assert tree(elsewhere) == []


WRITER = """
    import os, sys
    from moe_ckpt.storage import LocalStorage
    from moe_ckpt.testing import crash_at
    root, phase, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
    storage = LocalStorage(root, crash_at(phase, n))
    storage.write("d/MANIFEST.json", [b"new" * 1000])
    storage.delete("d/MANIFEST.json")
"""


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize(
    ("phase", "n", "visible"),
    [("manifest", 1, 0), ("write", 1, 0), ("fsync", 1, 0), ("rename", 1, 0), ("fsync", 2, 1), ("gc", 1, 1)],
)
def test_kill_minus_nine_at_every_phase_leaves_all_or_nothing(tmp_path, phase, n, visible):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), phase, str(n)], check=False, timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    storage = LocalStorage(tmp_path)
    assert storage.exists("d/MANIFEST.json") == bool(visible)
    if visible:
        assert storage.read("d/MANIFEST.json") == b"new" * 1000
    storage.clean_temporaries("d")
    assert storage.list("d") == ["MANIFEST.json"] * visible


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    mountpoint = tmp_path / "small"
    mountpoint.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mountpoint)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield mountpoint
    subprocess.run(["umount", str(mountpoint)], check=True)


def test_a_full_disk_keeps_the_old_file_and_leaves_no_temporary(small_disk):
    storage = LocalStorage(small_disk / "store")
    storage.write("d/old", [b"o" * 300_000])
    with pytest.raises(OSError, match="No space left") as raised:
        storage.write("d/new", [b"n" * 400_000, b"n" * 400_000])
    assert raised.value.errno == errno.ENOSPC
    assert storage.list("d") == ["old"]
    assert storage.read("d/old") == b"o" * 300_000
    storage.delete("d/old")
    assert storage.write("d/new", [b"n" * 800_000]) == 800_000


def test_open_storage_tells_local_from_remote(tmp_path):
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert isinstance(open_storage(str(tmp_path)), LocalStorage)
    assert open_storage(f"file://{tmp_path}/x").root == f"{os.path.realpath(tmp_path)}/x"
    assert open_storage((tmp_path / "my run").as_uri()).root == f"{os.path.realpath(tmp_path)}/my run"
    assert open_storage(f"file://localhost{tmp_path}/x").root == f"{os.path.realpath(tmp_path)}/x"
    for url in ("file://data/x", "file://x"):
        with pytest.raises(ConfigError, match="names a host"):
            open_storage(url)
    assert isinstance(open_storage("memory://bucket/x"), RemoteStorage)
    phases = []
    open_storage(tmp_path, phases.append).write("d/f", [b"x"])
    assert phases == ["write", "fsync", "rename", "fsync"]


def _failing(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


def _trace(monkeypatch, calls):
    """Record fsync and link, with the path they act on."""
    fsync, link = os.fsync, os.link

    def traced_fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(("fsync", "TEMPORARY" if path.endswith(".tmp") else path))
        fsync(descriptor)

    def traced_link(source, target, **kwargs):
        calls.append(("link", target))
        link(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)


def _fail_nth(monkeypatch, n, number):
    """The n-th of the system calls that a write makes fails; returns the count, which goes on."""
    count = {"calls": 0}

    def wrap(real):
        def call(*args, **kwargs):
            count["calls"] += 1
            if count["calls"] == n:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return call

    for name in ("mkdir", "open", "write", "fsync", "link"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return count


def test_many_make_the_same_directories_at_once(tmp_path):
    """A rank whose parent directory another one makes at that moment must not take that for a place without any."""
    with ThreadPoolExecutor(8) as pool:
        for number in range(300):
            paths = [str(tmp_path / str(number) / "run" / "000000" / f"rank_{rank}") for rank in range(8)]
            assert sorted(made[-1] for made in pool.map(make_directories, paths)) == paths


def test_a_directory_that_another_process_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    mkdir = os.mkdir

    def removed_then(path, mode):
        try:
            mkdir(path, mode)
        except FileExistsError:
            os.rmdir(path)
            raise

    monkeypatch.setattr(os, "mkdir", removed_then)
    assert make_directories(str(tmp_path / "shared")) == [str(tmp_path / "shared")]
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(NotADirectoryError, match="is a file, not a directory"):
        make_directories(str(tmp_path / "dangling"))


def test_no_file_is_made_through_a_link(tmp_path):
    """Another user may have put it there, in a directory that all may write to."""
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        PRIVATE.create(str(link), os.O_WRONLY)
    assert not target.exists()
