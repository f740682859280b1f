"""Network interfaces of this node: choice of interfaces, and addresses at which other nodes reach them."""

from __future__ import annotations

import fnmatch
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hetctl.model.errors import BadInputError

IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def control_address(patterns: Sequence[str]) -> str:
    """Return this node's address for control connections; an empty string if `patterns` is empty.

    Raises
    ------
    BadInputError
        If no interface of this node matches.
    """
    return choose("control", patterns, addresses())[1] if patterns else ""


def chosen_interface(patterns: Sequence[str]) -> str:
    """Return this node's interface for Gloo; an empty string if `patterns` is empty.

    Raises
    ------
    BadInputError
        If no interface of this node matches.
    """
    return choose("gloo", patterns, addresses())[0] if patterns else ""


def interface_of(address: str) -> str:
    """Return the interface with an IPv4 or IPv6 address; an empty string if none has it."""
    wanted = plain_address(address)
    return next((name for name, own in addresses().items() if wanted in map(plain_address, own)), "")


def addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each interface that is up."""
    # Imported on use: an image with a framework need not have it.
    import psutil

    states = psutil.net_if_stats()
    return {
        name: [entry.address for entry in entries if entry.family in IP_FAMILIES]
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }


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
    BadInputError
        If no interface matches.
    """
    for pattern in patterns:
        # Shorter names first: hsn2 comes before hsn10.
        for name in sorted(fnmatch.filter(interfaces, pattern), key=lambda name: (len(name), name)):
            for address in sorted(interfaces[name], key=lambda one: ":" in one):
                if not ipaddress.ip_address(address).is_link_local:
                    return name, address
    named, found = ", ".join(patterns), ", ".join(interfaces)
    raise BadInputError(
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
