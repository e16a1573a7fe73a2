"""Connections between two ranks for copies of memory slots: authenticated, blocking, bounded in time.

They do not use gloo, because a wait on gloo that times out closes the connections to all ranks of its group
("Application timeout caused pair closure"): one paused peer would cost the copies of all others. Bytes are sent
directly from mapped memory and received directly into it, and a call that moves 16 MiB releases the interpreter lock
once.

Addresses, and a new secret for every life of the run, come over the communicator, hence by the job's own rendezvous.
The holder sends a challenge, the source its hello, the holder its own hello, and the source confirms that. Thereby both
sides prove that they know the secret before anything else is read, and neither considers a peer connected that has
given up meanwhile. The listener closes when every expected source has connected.
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
"""Longest single system call, after which a thread checks whether it should end."""
_HANDSHAKE_SECS = 10.0
"""Longest time for which a stranger can occupy the listening thread."""
_RETRY_SECS = 0.2
_MAGIC = b"moeckpt2"
_CONFIRMED = b"\x01"
"""Last message of a source in the handshake: it has the holder's hello."""
_NONCE_NBYTES, _PROOF_NBYTES = 16, 32
_HELLO = struct.Struct(f"<8sQII{_NONCE_NBYTES}s{_PROOF_NBYTES}s")
_TIMEVAL = struct.Struct("ll")
_INTERFACE = struct.Struct("256s")
_SIOCGIFADDR = 0x8915
_TCP_RTO_MAX_MS, _MOST_RETRY_MS = 44, 1000
"""Longest time between two transmissions of a packet (Linux 6.15 and later). Otherwise it doubles up to 2 minutes, so
that a network that returns after half of the timeout may be noticed after the whole timeout."""
_LOOPBACKS = ("127.", "::1")

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""All open sockets. A forked data-loader worker closes them: it must not keep open what its dead parent had."""


def _close_in_child() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class StaleHelloError(ConnectionError):
    """A process of another life of the run wanted to connect."""


@dataclass(frozen=True)
class Link:
    """The two ends of a connection, in one life of the run.

    Attributes:
        generation: Of the life.
        source: Rank that sends copies.
        holder: Rank that keeps them.
    """

    generation: int
    source: int
    holder: int


class Wire:
    """One connection. Not safe for several threads, except for ``cut``.

    Args:
        connected: The socket.
        timeout_secs: Longest time without progress. Time in which this process itself was stopped does not count.
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
        """Changes the timeout.

        It is set by socket options, since Python's own timeouts make the socket non-blocking, with a call per few
        hundred KiB.
        """
        self._timeout_secs, self._tick_secs = timeout_secs, min(_TICK_SECS, timeout_secs / 4)
        whole = int(self._tick_secs)
        tick = _TIMEVAL.pack(whole, max(1, int((self._tick_secs - whole) * 1e6)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, tick)

    def send(self, data: memoryview | bytes) -> None:
        """Sends all of ``data``. Raises ``OSError`` if the connection broke, was cut, or made no progress for too
        long."""
        view = memoryview(data)
        self._move(len(view), lambda at: self._socket.send(view[at : at + CHUNK_NBYTES]), idle=False)

    def receive(self, nbytes: int) -> bytes:
        """Returns a message. For small messages, and for messages whose size was checked."""
        buffer = bytearray(nbytes)
        if not self.receive_into(memoryview(buffer)):
            raise ConnectionResetError("the peer ended the connection")
        return bytes(buffer)

    def receive_into(self, view: memoryview, *, idle: bool = False) -> bool:
        """Fills ``view``.

        Args:
            view: Memory to fill.
            idle: True to wait for the first byte without a timeout.

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
                # After a stop of this process hours may have passed, which say nothing about its peer.
                waited += min(time.monotonic() - began, 2 * self._tick_secs)
                if waited >= self._timeout_secs and not (idle and not at):
                    raise TimeoutError(f"no byte was transferred for {self._timeout_secs:g} s")

    def require_open(self) -> None:
        """Raises ``OSError`` if the peer has already ended the connection."""
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
    """Returns the peer's link and nonce. Raises ``ConnectionError`` unless the peer knows the secret."""
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
    """Connects as the source of a link. Tries again until the timeout.

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
        wire.require_open()  # if this process was stopped meanwhile, the holder has given up
    except OSError:
        wire.close()
        raise
    wire.limit(timeout_secs)
    return wire


class Listener:
    """Waits for the sources whose copies this rank holds. Bound at once, so that its address is known.

    Args:
        timeout_secs: As of ``Wire``.

    Attributes:
        address: Host and port to connect to.
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
        """Returns the next source that connects; None once ``is_over``.

        Args:
            secret: Secret of this life of the run.
            generation: Of this life.
            awaited: The links that are still expected, by source.
            is_over: Returns True when no connection is needed any more.

        Raises:
            ConnectionError: A process connected that may not.
            OSError: A process connected and then sent nothing; or this process has no file descriptor left.
        """
        while not is_over():
            try:
                connected, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # such as no descriptor left: the connection stays pending, and would fail again at once
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
    """Returns the address of this host by which the job's other hosts reach it.

    The address of the interface in GLOO_SOCKET_IFNAME; or of the interface that leads to MASTER_ADDR; or that of the
    host's own name, as gloo does.
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
    """Returns the IPv4 address of an interface; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, _INTERFACE.pack(name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _towards(target: str) -> str:
    """Returns this host's address on the route to another host; empty if there is no route. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except (OSError, ValueError):  # the latter: a name with a part of more than 63 characters
        return ""


class Cutter:
    """Cuts all wires of one rank at the end, including those that are added later."""

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
