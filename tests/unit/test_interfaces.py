"""Which network interface the ranks of several machines use."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from torch.distributed import HashStore

from fastaug.errors import ConfigError
from fastaug.runtime import interfaces

NAMES = {"ours": "127.0.1.1", "known": "192.0.2.7", "other": "192.0.2.9"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The second machine of a run: lo and eth1, and a name that resolves to a loopback address."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is unset again after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "other")
    monkeypatch.setattr(socket, "gethostname", lambda: "ours")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    addresses = {"lo": "127.0.0.1", "eth0": "", "eth1": "192.0.2.8"}
    monkeypatch.setattr(interfaces, "_address_of", addresses.__getitem__)
    monkeypatch.setattr(interfaces, "_resolved", lambda name: NAMES.get(name, ""))
    towards = {"other": "192.0.2.8", "192.0.2.9": "192.0.2.8", "ours": "127.0.0.1"}
    monkeypatch.setattr(interfaces, "_address_towards", lambda name: towards.get(name, ""))
    return monkeypatch


def chosen(store: HashStore | None = None) -> str | None:
    interfaces.use_reachable_interface(store or HashStore())
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_the_interface_that_leads_to_the_first_machine(machine: pytest.MonkeyPatch) -> None:
    store = HashStore()
    assert chosen(store) == "eth1"
    assert store.get("address") == b"192.0.2.8"  # where the first machine finds this one


def test_the_first_machine_asks_another(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("GROUP_RANK", "0")
    machine.setenv("MASTER_ADDR", "ours")
    store = HashStore()
    store.set("address", "192.0.2.9")
    assert chosen(store) == "eth1"


def test_a_name_that_others_can_reach(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(socket, "gethostname", lambda: "known")
    assert chosen() is None


def test_two_launchers_on_one_machine(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("MASTER_ADDR", "ours")
    assert chosen() is None


def test_a_given_interface_stays(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert chosen() == "ib0"


def test_no_way_to_the_others(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("MASTER_ADDR", "unknown")
    with pytest.raises(ConfigError, match=r"ours.*GLOO_SOCKET_IFNAME.*eth0, eth1"):
        chosen()


def test_an_unknown_first_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_RESOLVE_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid.*--local-addr"):
        interfaces.check_resolves("no-such-host.invalid")
    interfaces.check_resolves("localhost")


def test_addresses_of_this_machine() -> None:
    if not Path("/sys/class/net/lo").exists():
        pytest.skip("needs Linux")
    assert interfaces._address_of("lo") == "127.0.0.1"
    assert interfaces._address_of("no-such-interface") == ""
    assert interfaces._address_towards("127.0.0.1") == "127.0.0.1"
    assert interfaces._resolved("no-such-host.invalid") == ""
