"""RemoteStorage on fsspec's in-memory object store."""

import errno
import uuid

import fsspec
import pytest
from fsspec.registry import known_implementations

from moe_ckpt.errors import ConfigError, DamagedError, MissingPackageError, StoreUnwritableError
from moe_ckpt.storage import RemoteStorage, Storage, open_storage


@pytest.fixture
def url():
    url = f"memory://bucket-{uuid.uuid4().hex}/run"
    yield url
    fs, base = fsspec.core.url_to_fs(url)
    if fs.exists(base):
        fs.rm(base, recursive=True)


@pytest.fixture
def storage(url):
    return RemoteStorage(url)


def test_it_is_a_storage(storage, url):
    assert isinstance(storage, Storage)
    assert storage.root == url


def test_write_then_read_whole_and_ranges(storage, url):
    assert storage.write("d/f", [b"0123", memoryview(b"4567"), bytearray(b"89")]) == 10
    assert storage.read("d/f") == b"0123456789"
    assert storage.read("d/f", 3, 4) == b"3456"
    assert storage.read("d/f", 8) == b"89"
    assert storage.read("d/f", 8, 1 << 40) == b"89"
    assert storage.read("d/f", 50, 3) == b""
    assert storage.read("d/f", 3, 0) == b""
    assert storage.size("d/f") == 10
    assert RemoteStorage(url + "/").read("d/f") == b"0123456789"


def test_listing_existence_and_deletion(storage):
    assert storage.list() == []
    assert storage.list("nowhere") == []
    for path in ("b/2", "b/1", "a/1", "top"):
        storage.write(path, [b"x"])
    assert storage.list() == ["a", "b", "top"]
    assert storage.list("b") == ["1", "2"]
    assert storage.exists("b")
    assert storage.exists("b/1")
    assert not storage.exists("b/3")
    storage.delete_dir("b")
    assert storage.list("b") == ["1", "2"]
    for path in ("b/1", "b/2", "b/2"):
        storage.delete(path)
    storage.delete_dir("b")
    storage.delete_dir("b")
    assert storage.list() == ["a", "top"]
    assert storage.clean_temporaries("a") == 0


@pytest.mark.parametrize(("verb", "arguments"), [("read", ()), ("read", (1, 2)), ("size", ())])
def test_missing_files_raise(storage, verb, arguments):
    with pytest.raises(FileNotFoundError):
        getattr(storage, verb)("d/none", *arguments)


def test_an_existing_object_is_never_overwritten(storage):
    storage.write("d/f", [b"first"])
    with pytest.raises(FileExistsError, match="never overwritten"):
        storage.write("d/f", [b"second"])
    assert storage.read("d/f") == b"first"


def test_an_error_of_the_callers_chunks_uploads_nothing(storage):
    def chunks():
        yield b"half"
        raise RuntimeError("the caller failed")

    with pytest.raises(RuntimeError, match="the caller failed"):
        storage.write("d/f", chunks())
    assert not storage.exists("d/f")


@pytest.mark.parametrize("bad", ["../x", "/x", "a//b", "a/.."])
def test_paths_that_lead_out_are_refused(storage, bad):
    with pytest.raises(DamagedError, match="is not a path inside the store"):
        storage.write(bad, [b"x"])
    with pytest.raises(DamagedError, match="is not a path inside the store"):
        storage.read(bad)


def test_phases(url):
    phases = []
    storage = open_storage(url, phases.append)
    storage.write("d/MANIFEST.json", [b"x"])
    storage.delete("d/MANIFEST.json")
    assert phases == ["manifest", "write", "gc"]


def test_errors_of_the_client_library_become_os_errors(storage, monkeypatch):
    class ClientError(Exception):
        """What botocore and its like raise."""

    def fail(*args, **kwargs):
        raise ClientError("token expired")

    storage.write("d/f", [b"x"])
    monkeypatch.setattr(type(storage._fs), "cat_file", fail)
    monkeypatch.setattr(type(storage._fs), "pipe_file", fail)
    with pytest.raises(OSError, match="ClientError: token expired") as raised:
        storage.read("d/f")
    assert raised.value.errno == errno.EIO
    assert isinstance(raised.value.__cause__, ClientError)
    with pytest.raises(OSError, match="d/g"):
        storage.write("d/g", [b"x"])
    with pytest.raises(StoreUnwritableError, match=r"cannot be written: .*token expired"):
        storage.probe()


def test_probe_leaves_nothing(storage):
    storage.probe()
    assert storage.list() == []


def test_an_unknown_protocol_is_named():
    with pytest.raises(ConfigError, match=r"'nosuch://bucket/x' cannot be opened.*nosuch"):
        open_storage("nosuch://bucket/x")


def test_a_missing_backend_names_its_package(monkeypatch):
    entry = {"class": "absentfs.FileSystem", "err": "Install absentfs"}
    monkeypatch.setitem(known_implementations, "absent", entry)
    with pytest.raises(MissingPackageError, match="absentfs"):
        open_storage("absent://bucket/x")


def test_storage_options_reach_the_file_system(url):
    storage = open_storage(url, skip_instance_cache=True, marker=1)
    assert storage._fs.storage_options["marker"] == 1
