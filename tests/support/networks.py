"""Nodes with a network of their own each: what is sent between them can be cut off, and made slow.

Every node is a network namespace with one interface, which leads to a switch in another namespace; nothing outside of
these is touched. It takes root, iproute2 and a kernel with veth and bridge, for ``slow`` sch_tbf as well.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from types import TracebackType

import pytest

INTERFACE = "net0"
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class NoNetwork(Exception):
    """The machine cannot do it, for the reason in the text."""


class Network:
    """A switch and its nodes. Picklable: ranks get it as an argument, and call what they like.

    Args:
        nodes: How many.
    """

    def __init__(self, nodes: int) -> None:
        name = f"moe_ckpt_{os.getpid()}_{next(_numbers)}"
        self.switch = f"{name}_switch"
        self.nodes = [f"{name}_node_{node}" for node in range(nodes)]

    def __enter__(self) -> Network:
        try:
            self._make()
        except NoNetwork:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def _make(self) -> None:
        if shutil.which("ip") is None:
            raise NoNetwork("there is no command `ip`: install iproute2")
        _do("ip", "netns", "add", self.switch)
        _do("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        _do("ip", "-n", self.switch, "link", "set", "switch", "up")
        for number, node in enumerate(self.nodes):
            _do("ip", "netns", "add", node)
            _do("ip", "-n", node, "link", "set", "lo", "up")
            ends = ("peer", "name", INTERFACE, "netns", node)
            _do("ip", "-n", self.switch, "link", "add", f"port{number}", "type", "veth", *ends)
            _do("ip", "-n", self.switch, "link", "set", f"port{number}", "master", "switch", "up")
            _do("ip", "-n", node, "address", "add", f"10.77.0.{number + 1}/24", "dev", INTERFACE)
            _do("ip", "-n", node, "link", "set", INTERFACE, "up")

    def _remove(self) -> None:
        for name in (*self.nodes, self.switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def cut(self, node: int) -> None:
        """Its cable is drawn: nothing goes out of it or into it, and nobody is told."""
        _do("ip", "-n", self.switch, "link", "set", f"port{node}", "down")

    def heal(self, node: int) -> None:
        """It is put back."""
        _do("ip", "-n", self.switch, "link", "set", f"port{node}", "up")

    def slow(self, node: int, mbit_per_sec: float) -> None:
        """What is sent to the node takes its time; what the node sends does not."""
        at_once = ("64kb", "500ms") if mbit_per_sec >= 1 else ("4kb", "2s")
        rate = ("rate", f"{round(mbit_per_sec * 1e6)}bit", "burst", at_once[0], "latency", at_once[1])
        _do("tc", "-n", self.switch, "qdisc", "replace", "dev", f"port{node}", "root", "tbf", *rate)

    def enter(self, node: int) -> None:
        """This thread is on the node from here on, with all threads that it starts. What it had connected stays so."""
        enter(self.nodes[node])


def enter(name: str) -> None:
    """See ``Network.enter``. name: of the node, in ``Network.nodes``."""
    with open(f"/run/netns/{name}", "rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def network_or_skip(nodes: int, *, slow: bool = False) -> Network:
    """A network that can be had here; skips the test by name, with what to do, where it cannot. slow: Needs that."""
    network = Network(nodes)
    try:
        with network:
            if slow:
                network.slow(0, 100)
    except NoNetwork as error:
        pytest.skip(f"no nodes with networks of their own here: {error}; run this test as root")
    return network


def _do(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoNetwork(f"there is no command `{command[0]}`: install iproute2") from None
    if done.returncode:
        raise NoNetwork(f"`{' '.join(command)}`: {done.stderr.strip()}")
