"""Network interfaces of this node: choice of interfaces, and addresses at which other nodes reach them."""

from __future__ import annotations

import ctypes
import fnmatch
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hetctl.model.errors import TransientInputError


def control_address(patterns: Sequence[str]) -> str:
    """Return this node's address for control connections; an empty string if `patterns` is empty.

    Raises
    ------
    TransientInputError
        If no interface of this node matches.
    """
    return choose("control", patterns, addresses())[1] if patterns else ""


def chosen_interface(patterns: Sequence[str]) -> str:
    """Return this node's interface for Gloo; an empty string if `patterns` is empty.

    Raises
    ------
    TransientInputError
        If no interface of this node matches.
    """
    return choose("gloo", patterns, addresses())[0] if patterns else ""


def interface_of(address: str) -> str:
    """Return the interface with an IPv4 or IPv6 address; an empty string if none has it."""
    wanted = plain_address(address)
    return next((name for name, own in addresses().items() if wanted in map(plain_address, own)), "")


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _InterfaceAddress(ctypes.Structure):
    """``struct ifaddrs`` of getifaddrs(3)."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)
UP_AND_RUNNING = 0x1 | 0x40
"""Flags of an interface that is up, with its cable connected (netdevice(7))."""
BYTES_OF_ADDRESS = {socket.AF_INET: slice(2, 6), socket.AF_INET6: slice(6, 22)}
"""Place of the address behind the family in ``struct sockaddr_in`` and ``sockaddr_in6`` (ip(7), ipv6(7))."""


def addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each interface that is up."""
    # Not by psutil, which an image with a framework need not have.
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: dict[str, list[str]] = {}
    try:
        entry = first
        while entry:
            one = entry.contents
            if one.flags & UP_AND_RUNNING == UP_AND_RUNNING and one.address:
                own, address = found.setdefault(os.fsdecode(one.name), []), one.address.contents
                if place := BYTES_OF_ADDRESS.get(address.family):
                    own.append(socket.inet_ntop(address.family, bytes(address.data)[place]))
            entry = one.next
    finally:
        libc.freeifaddrs(first)
    return found


def choose(key: str, patterns: Sequence[str], interfaces: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Return the first matching interface, by order of patterns and then of names, and its address.

    Parameters
    ----------
    key : str
        Key in ``network`` of the site file, for the error message.
    interfaces : mapping of str to sequence of str
        Addresses by name of interface. IPv4 is preferred; link-local addresses are ignored, since other
        nodes cannot use them.

    Raises
    ------
    TransientInputError
        If no interface matches.
    """
    for pattern in patterns:
        # Shorter names first: hsn2 comes before hsn10.
        for name in sorted(fnmatch.filter(interfaces, pattern), key=lambda name: (len(name), name)):
            for address in sorted(interfaces[name], key=lambda one: ":" in one):
                if not ipaddress.ip_address(address).is_link_local:
                    return name, address
    named, found = ", ".join(patterns), ", ".join(interfaces)
    raise TransientInputError(
        f"network.{key} of the site file names {named}, but {socket.gethostname()} has {found}",
        "name an interface that all compute nodes have; it must be up, with an address other nodes can reach",
    )


@contextmanager
def gloo_over(variable: str, interface: str) -> Iterator[None]:
    """Set Gloo's variable to an interface while a group is formed, unless the user has set it."""
    if not interface or variable in os.environ:
        yield
        return
    os.environ[variable] = interface
    try:
        yield
    finally:
        del os.environ[variable]


def plain_address(address: str) -> str:
    """Return an address without its zone; for ``::ffff:a.b.c.d`` (dual-stack sockets) the IPv4 address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str((parsed.version == 6 and parsed.ipv4_mapped) or parsed)
