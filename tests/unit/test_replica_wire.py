"""Connections for copies, over real sockets: who may connect, what ends a wait, and what a forked child keeps."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_ckpt.peers import wire as replica_wire
from moe_ckpt.peers.wire import Cutter, Link, Listener, StaleHelloError, Wire, connect, own_address

SECRET = bytes(range(32))
LINK = Link(generation=5, source=1, holder=0)
TIMEOUT_SECS = 20.0


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture
def listener():
    made = Listener(TIMEOUT_SECS)
    yield made
    made.close()


def shake(listener: Listener, link: Link = LINK, secret: bytes = SECRET, timeout_secs: float = TIMEOUT_SECS):
    """Both ends of one attempt: (holder's, source's), each a wire or an error."""

    def attempt(call):
        try:
            return call()
        except OSError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(attempt, lambda: listener.accept(SECRET, 5, {1: LINK}, lambda: False))
        connected = pool.submit(attempt, lambda: connect(listener.address, secret, link, timeout_secs, lambda: True))
        return accepted.result(), connected.result()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def test_both_ends_know_each_other(listener):
    (theirs, link), mine = shake(listener)
    assert link == LINK
    mine.send(b"some bytes")
    assert theirs.receive(10) == b"some bytes"
    mine.close()
    assert theirs.receive_into(memoryview(bytearray(1)), idle=True) is False
    with pytest.raises(ConnectionResetError):
        theirs.receive(1)
    theirs.close()


@pytest.mark.parametrize(
    ("link", "secret", "error", "said"),
    [
        (Link(4, 1, 0), SECRET, StaleHelloError, "rank 1 of generation 4 of the run; this is generation 5"),
        (LINK, bytes(32), ConnectionRefusedError, "does not know the run's secret"),
        (Link(5, 2, 0), SECRET, ConnectionRefusedError, "rank 2, whose copies do not lie here"),
        (Link(5, 1, 7), SECRET, ConnectionRefusedError, "rank 1, whose copies do not lie here"),
    ],
)
def test_nobody_else_may_connect(listener, link, secret, error, said):
    refused, mine = shake(listener, link, secret)
    assert isinstance(refused, error)
    assert said in str(refused)
    assert isinstance(mine, OSError)
    (theirs, found), mine = shake(listener)
    assert found == LINK, "whoever may still can"
    for each in (theirs, mine):
        each.close()


def test_a_source_trusts_nobody_who_does_not_know_the_secret_either():
    with socket.create_server(("127.0.0.1", 0)) as pretender, ThreadPoolExecutor(1) as pool:
        mine = pool.submit(connect, pretender.getsockname(), SECRET, LINK, TIMEOUT_SECS, lambda: True)
        accepted, _ = pretender.accept()
        accepted.sendall(bytes(16))
        hello = accepted.recv(1000)
        accepted.sendall(hello)  # the only thing it could know
        with pytest.raises(ConnectionRefusedError, match="does not know the run's secret"):
            mine.result()
        accepted.close()


def held_up(monkeypatch, role: bytes) -> threading.Event:
    """Whoever reads the first hello of ``role`` stands still before that, until the event is set."""
    read, goes_on, first = replica_wire._read_hello, threading.Event(), threading.Lock()

    def late(raw, secret, whose, *more):
        if whose == role and first.acquire(blocking=False):
            assert goes_on.wait(TIMEOUT_SECS)
        return read(raw, secret, whose, *more)

    monkeypatch.setattr(replica_wire, "_read_hello", late)
    return goes_on


def test_a_source_that_has_given_up_a_holder_that_stood_still_is_still_awaited(listener, monkeypatch):
    goes_on = held_up(monkeypatch, b"source")
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, SECRET, 5, {1: LINK}, lambda: False)
        with pytest.raises(TimeoutError):
            connect(listener.address, SECRET, LINK, 0.4, lambda: True)
        goes_on.set()
        with pytest.raises(ConnectionError):
            accepted.result(TIMEOUT_SECS)
    (theirs, found), mine = shake(listener)
    assert found == LINK
    for each in (theirs, mine):
        each.close()


def test_a_source_that_stood_still_tries_again_where_the_holder_has_given_it_up(listener, monkeypatch):
    goes_on = held_up(monkeypatch, b"holder")
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(replica_wire, "_HANDSHAKE_SECS", 0.4)
            accepted = pool.submit(connect, listener.address, SECRET, LINK, TIMEOUT_SECS, lambda: False)
            with pytest.raises(TimeoutError):
                listener.accept(SECRET, 5, {1: LINK}, lambda: False)
        goes_on.set()
        theirs, found = listener.accept(SECRET, 5, {1: LINK}, lambda: False)
        mine = accepted.result(TIMEOUT_SECS)
    assert found == LINK
    mine.send(b"some bytes")
    assert theirs.receive(10) == b"some bytes"
    for each in (theirs, mine):
        each.close()


def test_silence_in_the_middle_of_a_message_ends_at_the_timeout_and_between_two_never():
    one, other = tcp_pair()
    wire = Wire(one, 0.4)
    other.sendall(b"half")
    with pytest.raises(TimeoutError, match=r"no byte was transferred for 0\.4 s"):
        wire.receive(8)
    patient = threading.Thread(target=wire.receive_into, args=(memoryview(bytearray(1)),), kwargs={"idle": True})
    patient.start()
    patient.join(1.5)
    assert patient.is_alive()
    other.sendall(b"x")
    patient.join(TIMEOUT_SECS)
    assert not patient.is_alive()
    with pytest.raises(TimeoutError):
        wire.send(bytes(64 << 20))  # nobody reads
    wire.close()
    other.close()


def test_time_in_which_this_process_stood_still_says_nothing_of_a_peer(monkeypatch):
    """As after SIGSTOP: a wait of a tenth of a second took an hour by the clock."""
    one, other = tcp_pair()
    wire = Wire(one, 10.0)
    hours = iter([3600.0 * at for at in range(1000)])
    monkeypatch.setattr(replica_wire, "time", type("Clock", (), {"monotonic": lambda: next(hours)}))
    wire.limit(0.4)
    wire._timeout_secs = 10.0
    late = threading.Timer(0.3, other.sendall, [b"here"])
    late.start()
    assert wire.receive(4) == b"here"
    wire.close()
    other.close()


def test_a_cut_ends_a_wait_at_once_and_a_wire_that_comes_later_too():
    one, other = tcp_pair()
    cutter, wire = Cutter(), Wire(one, 600.0)
    cutter.add(wire)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wire.receive, 1)
        time.sleep(0.2)
        cutter.cut_all()
        with pytest.raises(ConnectionError):
            waiting.result(TIMEOUT_SECS)
    late = cutter.add(Wire(other, 600.0))
    with pytest.raises(ConnectionAbortedError):
        late.send(b"x")
    wire.close()
    late.close()


def test_a_forked_child_keeps_no_connection_open():
    one, other = tcp_pair()
    wire = Wire(one, TIMEOUT_SECS)
    read, write = os.pipe()
    child = os.fork()
    if not child:  # a data-loader worker that lives on for a while
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    other.settimeout(TIMEOUT_SECS)
    wire.close()
    assert other.recv(1) == b"", "the peer sees the end although the child lives"
    os.close(write)
    os.close(read)
    os.waitpid(child, 0)
    other.close()


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "192.0.2.7"}, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"MASTER_ADDR": "::1"}, "::1"),
    ],
)
def test_the_address_is_that_of_the_jobs_own_network(monkeypatch, environment, address):
    monkeypatch.delenv("MASTER_ADDR")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert own_address() == address


def test_a_master_elsewhere_is_reached_from_an_address_that_others_reach(monkeypatch):
    """Not from a loopback address, even if this host's own name is one (Debian's 127.0.1.1)."""
    ways = {"master": "127.0.1.1", "192.0.2.1": "10.1.2.3"}
    monkeypatch.setattr(replica_wire, "_towards", lambda target: ways.get(target, "127.0.1.1"))
    monkeypatch.setenv("MASTER_ADDR", "master")
    assert own_address() == "10.1.2.3"


def test_a_host_whose_name_no_resolver_takes_has_an_address(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    assert socket.inet_aton(own_address())


def test_without_descriptors_the_listening_thread_does_not_ask_without_a_pause(listener):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(listener.address), contextlib.ExitStack() as taken:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.callback(os.close, os.dup(0))
            began = time.monotonic()
            for _ in range(3):
                with pytest.raises(OSError, match="Too many open files"):
                    listener.accept(SECRET, 5, {1: LINK}, lambda: False)
            assert time.monotonic() - began >= 0.5
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
