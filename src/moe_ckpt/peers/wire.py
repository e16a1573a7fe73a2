"""Connections between two ranks for copies of memory slots: authenticated, blocking, bounded in time.

They are sockets of our own and not gloo's, because a wait on gloo that times out closes the connections to all ranks of
its group ("Application timeout caused pair closure"): one paused peer would cost the copies of all others. Bytes go
straight out of mapped memory and straight into it, and a call that moves 16 MiB gives the interpreter lock away once.

Addresses, and a secret that is drawn for every life of the run, come over the communicator, hence by the job's own
rendezvous. The holder sends a challenge, the source its hello, the holder its own, and the source confirms that. Both
sides thereby prove that they know the secret before anything else is read, and neither takes the other for connected
that has given up meanwhile. Listening ends when everybody who may connect has done so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SECRET_NBYTES = 32
CHUNK_NBYTES = 16 << 20
_TICK_SECS = 1.0
"""Longest single system call; also how often a thread looks whether it is to end."""
_HANDSHAKE_SECS = 10.0
"""A stranger may keep the listening thread for so long."""
_RETRY_SECS = 0.2
_MAGIC = b"moeckpt2"
_CONFIRMED = b"\x01"
"""A source's last word: it has the holder's hello."""
_NONCE_NBYTES, _PROOF_NBYTES = 16, 32
_HELLO = struct.Struct(f"<8sQII{_NONCE_NBYTES}s{_PROOF_NBYTES}s")
_TIMEVAL = struct.Struct("ll")
_INTERFACE = struct.Struct("256s")
_SIOCGIFADDR = 0x8915
_TCP_RTO_MAX_MS, _MOST_RETRY_MS = 44, 1000
"""Longest time between two tries to get a packet through (Linux 6.15 and later). It doubles up to 2 minutes otherwise,
so that a network that comes back after half of the timeout may be noticed after the whole of it."""
_LOOPBACKS = ("127.", "::1")

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""A forked data-loader worker must not keep a connection open whose owner is dead."""


def _close_in_child() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class StaleHelloError(ConnectionError):
    """A process of another life of the run wanted to connect."""


@dataclass(frozen=True)
class Link:
    """The two ends of a connection, and in which life of the run.

    Attributes:
        source: Whose copies go over it.
        holder: To whom.
    """

    generation: int
    source: int
    holder: int


class Wire:
    """One connection. Not safe for several threads, but for ``cut``.

    Args:
        connected: The socket.
        timeout_secs: Longest time without progress. Time in which this process itself stood still does not count.
    """

    def __init__(self, connected: socket.socket, timeout_secs: float) -> None:
        self._socket = connected
        self._is_cut = False
        _open.add(connected)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # older kernels, which try again at ever longer intervals
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _MOST_RETRY_MS)
        connected.setblocking(True)
        self.limit(timeout_secs)

    def limit(self, timeout_secs: float) -> None:
        """Change the timeout.

        By options of the socket: Python's own timeouts make it non-blocking, with a call per few hundred KiB.
        """
        self._timeout_secs, self._tick_secs = timeout_secs, min(_TICK_SECS, timeout_secs / 4)
        whole = int(self._tick_secs)
        tick = _TIMEVAL.pack(whole, max(1, int((self._tick_secs - whole) * 1e6)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, tick)

    def send(self, data: memoryview | bytes) -> None:
        """Raises ``OSError``: the connection broke, was cut, or nothing of ``data`` went on for too long."""
        view = memoryview(data)
        self._move(len(view), lambda at: self._socket.send(view[at : at + CHUNK_NBYTES]), idle=False)

    def receive(self, nbytes: int) -> bytes:
        """Receives small messages, and messages whose size was checked."""
        buffer = bytearray(nbytes)
        if not self.receive_into(memoryview(buffer)):
            raise ConnectionResetError("the peer ended the connection")
        return bytes(buffer)

    def receive_into(self, view: memoryview, *, idle: bool = False) -> bool:
        """Fill ``view``.

        Args:
            view: Of bytes.
            idle: Wait for the first byte for as long as it takes.

        Returns:
            False if the peer ended the connection before the first byte.

        Raises:
            OSError: The connection broke, was cut, or nothing came for too long.
        """

        def receive(at: int) -> int:
            size = min(CHUNK_NBYTES, len(view) - at)
            got = self._socket.recv_into(view[at:], size, socket.MSG_WAITALL)
            if not got:
                raise EOFError if not at else ConnectionResetError("the connection ended in the middle of a message")
            return got

        try:
            self._move(len(view), receive, idle=idle)
        except EOFError:
            return False
        return True

    def _move(self, nbytes: int, move: Callable[[int], int], *, idle: bool) -> None:
        at, waited = 0, 0.0
        while at < nbytes:
            if self._is_cut:
                raise ConnectionAbortedError("the connection was given up")
            began = time.monotonic()
            try:
                moved = move(at)
            except BlockingIOError:  # a tick passed
                moved = 0
            at, waited = at + moved, 0.0 if moved or (idle and not at) else waited
            if not moved:
                # A process that was stopped comes back to find hours gone: they say nothing of its peer.
                waited += min(time.monotonic() - began, 2 * self._tick_secs)
                if waited >= self._timeout_secs and not (idle and not at):
                    raise TimeoutError(f"no byte was transferred for {self._timeout_secs:g} s")

    def require_open(self) -> None:
        """Raises ``OSError`` if the peer has ended the connection by now."""
        try:
            ended = not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if ended:
            raise ConnectionResetError("the peer ended the connection")

    def cut(self) -> None:
        """Makes every send and receive fail at once. On any thread, at any time."""
        self._is_cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection, on the thread that uses it."""
        _open.discard(self._socket)
        self._socket.close()


def _hello(secret: bytes, role: bytes, link: Link, nonce: bytes, theirs: bytes) -> bytes:
    fields = struct.pack("<QII", link.generation, link.source, link.holder)
    proof = hmac.digest(secret, role + theirs + nonce + fields, "sha256")
    return _HELLO.pack(_MAGIC, link.generation, link.source, link.holder, nonce, proof)


def _read_hello(raw: bytes, secret: bytes, role: bytes, nonce: bytes, generation: int) -> tuple[Link, bytes]:
    """Returns who speaks, and its nonce. Raises ``ConnectionError`` unless it knows the secret."""
    magic, their_generation, source, holder, theirs, proof = _HELLO.unpack(raw)
    link = Link(their_generation, source, holder)
    if magic != _MAGIC:
        raise ConnectionRefusedError("a process that does not belong to this run")
    if their_generation != generation:
        raise StaleHelloError(
            f"rank {source} of generation {their_generation} of the run; this is generation {generation}"
        )
    fields = struct.pack("<QII", their_generation, source, holder)
    if not hmac.compare_digest(proof, hmac.digest(secret, role + nonce + theirs + fields, "sha256")):
        raise ConnectionRefusedError(f"a process that claims to be rank {source}, but does not know the run's secret")
    return link, theirs


def connect(
    address: tuple[str, int], secret: bytes, link: Link, timeout_secs: float, is_over: Callable[[], bool]
) -> Wire:
    """Connects as the source of a link, again and again until the timeout.

    Raises:
        OSError: The holder did not answer, or does not know the secret.
    """
    waited = 0.0
    while True:
        began = time.monotonic()
        try:
            return _connect_once(address, secret, link, timeout_secs)
        except OSError:
            time.sleep(_RETRY_SECS)
            waited += min(time.monotonic() - began, 2 * _HANDSHAKE_SECS)
            if waited >= timeout_secs or is_over():
                raise


def _connect_once(address: tuple[str, int], secret: bytes, link: Link, timeout_secs: float) -> Wire:
    shaking = min(_HANDSHAKE_SECS, timeout_secs)
    connected = socket.create_connection(address, timeout=shaking)
    wire = Wire(connected, shaking)
    try:
        challenge = wire.receive(_NONCE_NBYTES)
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        wire.send(_hello(secret, b"source", link, nonce, challenge))
        answered, _ = _read_hello(wire.receive(_HELLO.size), secret, b"holder", nonce, link.generation)
        if answered != link:
            raise ConnectionRefusedError(f"rank {answered.holder} answered for rank {link.holder}")
        wire.send(_CONFIRMED)
        wire.require_open()  # else this process stood still, and the holder no longer waits for the word
    except OSError:
        wire.close()
        raise
    wire.limit(timeout_secs)
    return wire


class Listener:
    """Waits for the sources whose copies this rank holds. Bound from the beginning on, so that its address is known.

    Args:
        timeout_secs: As of ``Wire``.

    Attributes:
        address: To connect to.
    """

    def __init__(self, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=64)
        self._socket.settimeout(min(_TICK_SECS, timeout_secs / 4))
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        _open.add(self._socket)

    def accept(
        self, secret: bytes, generation: int, awaited: Mapping[int, Link], is_over: Callable[[], bool]
    ) -> tuple[Wire, Link] | None:
        """The next source that connects; None once ``is_over``.

        Args:
            secret: Of this life of the run.
            generation: Likewise.
            awaited: The links that are still to come, by source.
            is_over: Nobody waits any more.

        Raises:
            ConnectionError: Somebody connected who may not.
            OSError: Somebody connected who then said nothing; or this process has no descriptor left, and some time
                has passed since.
        """
        while not is_over():
            try:
                connected, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # no descriptor is left, for instance: the connection waits, and would be asked for at once
                time.sleep(_RETRY_SECS)
                raise
            wire = Wire(connected, min(_HANDSHAKE_SECS, self._timeout_secs))
            try:
                nonce = secrets.token_bytes(_NONCE_NBYTES)
                wire.send(nonce)
                link, theirs = _read_hello(wire.receive(_HELLO.size), secret, b"source", nonce, generation)
                if awaited.get(link.source) != link:
                    raise ConnectionRefusedError(f"rank {link.source}, whose copies do not lie here or come already")
                wire.send(_hello(secret, b"holder", link, secrets.token_bytes(_NONCE_NBYTES), theirs))
                if wire.receive(len(_CONFIRMED)) != _CONFIRMED:
                    raise ConnectionRefusedError(f"rank {link.source} does not confirm that it is connected")
            except OSError:
                wire.close()
                raise
            wire.limit(self._timeout_secs)
            return wire, link
        return None

    def close(self) -> None:
        """Closes the listener, on the thread that accepts, or before there is one."""
        _open.discard(self._socket)
        self._socket.close()


def own_address() -> str:
    """The address of this host by which the job's other hosts reach it.

    That of the interface in GLOO_SOCKET_IFNAME; or of the one that leads to MASTER_ADDR; or the host's own name's, as
    gloo takes it.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip()
    if interface and (chosen := _of_interface(interface)):
        return chosen
    master = os.environ.get("MASTER_ADDR", "")
    if master in ("localhost", "127.0.0.1", "::1"):
        return "::1" if master == "::1" else "127.0.0.1"
    targets = filter(None, (master, socket.gethostname(), "192.0.2.1"))  # the last, of no network: the default route
    addresses = map(_towards, targets)
    return next((one for one in addresses if one and not one.startswith(_LOOPBACKS)), "127.0.0.1")


def _of_interface(name: str) -> str:
    """Its IPv4 address; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, _INTERFACE.pack(name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _towards(target: str) -> str:
    """This host's address on the way to another; empty if there is no way. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except (OSError, ValueError):  # the latter: a name with a part of more than 63 characters
        return ""


class Cutter:
    """Knows the wires of one rank, and cuts them all, also those that come too late."""

    def __init__(self) -> None:
        self._wires: list[Wire] = []
        self._lock = threading.Lock()
        self.is_over = False

    def add(self, wire: Wire) -> Wire:
        with self._lock:
            self._wires.append(wire)
            if self.is_over:
                wire.cut()
        return wire

    def cut_all(self) -> None:
        with self._lock:
            self.is_over = True
            for wire in self._wires:
                wire.cut()
