"""Network interfaces of a node: the one that patterns choose, and the one that has an address."""

from __future__ import annotations

import os

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.errors import TransientInputError
from hetctl.runtime import interfaces
from hetctl.runtime.interfaces import (
    BYTES_OF_ADDRESS,
    addresses,
    choose,
    chosen_interface,
    control_address,
    gloo_over,
    interface_of,
)

NODE = {
    "lo": ["127.0.0.1", "::1"],
    "eno1": ["fe80::1%eno1", "192.0.2.1"],
    "hsn10": ["10.0.0.10"],
    "hsn1": ["2001:db8::1", "10.0.0.1"],
    "hsn0": ["fe80::2%hsn0", "169.254.1.1"],
    "ib0": ["fe80::3%ib0", "2001:db8::3"],
}


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["eno1"], ("eno1", "192.0.2.1")),
        (["hsn*"], ("hsn1", "10.0.0.1")),  # hsn0 has link-local addresses alone, and 1 comes before 10
        (["hsn1?", "hsn*"], ("hsn10", "10.0.0.10")),
        (["hsn0", "eth*", "ib[0-3]"], ("ib0", "2001:db8::3")),
        (["*"], ("lo", "127.0.0.1")),
    ],
)
def test_the_first_interface_that_fits_and_others_can_reach(patterns, chosen):
    assert choose("control", patterns, NODE) == chosen


@given(st.permutations(list(NODE)), st.lists(st.sampled_from(["*", "hsn*", "e*", "ib0", "lo"]), min_size=1))
def test_the_choice_does_not_depend_on_the_order_of_interfaces(names, patterns):
    assert choose("gloo", patterns, {name: NODE[name] for name in names}) == choose("gloo", patterns, NODE)


@pytest.mark.parametrize("pattern", ["eth*", "hsn0", "HSN*"])
def test_the_error_lists_interfaces_if_none_matches(pattern):
    with pytest.raises(
        TransientInputError, match=r"network.gloo of the site file names .* has lo, eno1, "
    ) as caught:
        choose("gloo", [pattern], NODE)
    assert "all compute nodes have" in caught.value.hint


def test_the_interfaces_of_this_machine():
    assert (control_address(()), chosen_interface(())) == ("", "")
    assert "127.0.0.1" in addresses()["lo"]
    assert (control_address(("none", "l?")), chosen_interface(("lo",))) == ("127.0.0.1", "lo")


def test_interfaces_are_those_that_psutil_knows_to_be_up():
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    known = {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in BYTES_OF_ADDRESS]
        for name, entries in psutil.net_if_addrs().items()
    }
    assert addresses() == {name: own for name, own in known.items() if name in up}


def test_an_interface_that_is_down_is_not_there(monkeypatch):
    monkeypatch.setattr(interfaces, "UP_AND_RUNNING", 1 << 30)
    assert addresses() == {}


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1", "lo"),
        ("::1", "lo"),
        ("::ffff:192.0.2.1", "eno1"),
        ("2001:0db8:0:0::3", "ib0"),
        ("fe80::2%hsn0", "hsn0"),
        ("fe80::2", "hsn0"),
        ("203.0.113.77", ""),
    ],
)
def test_an_interface_is_known_by_its_address(monkeypatch, address, name):
    monkeypatch.setattr(interfaces, "addresses", lambda: NODE)
    assert interface_of(address) == name


def test_gloo_gets_its_interface_while_a_group_is_formed(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with gloo_over("GLOO_SOCKET_IFNAME", "hsn0"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    with gloo_over("GLOO_SOCKET_IFNAME", ""):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    # The user's own is kept.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with gloo_over("GLOO_SOCKET_IFNAME", "hsn0"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
