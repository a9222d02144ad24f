"""The network interface through which the machines of a run reach each other.

gloo listens at the address that the machine's own name resolves to. On many machines that is a
loopback address (Debian writes 127.0.1.1 into /etc/hosts), at which no other machine finds it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from contextlib import suppress

from torch.distributed import Store

from fastaug.errors import ConfigError

_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_RESOLVE_SECONDS = 10.0


def check_resolves(name: str) -> None:
    """Raise ConfigError if the name of rank 0's machine is unknown here: torch would retry."""
    deadline = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{socket.gethostname()} cannot resolve {name}, the name of rank 0's machine "
                    f"({error.strerror}): make it known in /etc/hosts or DNS, or give each "
                    "torchrun its machine's address with --local-addr ADDRESS"
                ) from error
        time.sleep(0.5)


def use_reachable_interface(store: Store) -> None:
    """Let gloo use the interface that leads to the other machines, if this one's name does not.

    store: shared by all ranks of this start.
    """
    is_first_machine = os.environ.get("GROUP_RANK") == "0"
    key = "address"
    own = ""
    if not is_first_machine:
        own = _address_towards(os.environ["MASTER_ADDR"])
        store.set(key, own)
    if _VARIABLE in os.environ or not _is_loopback(_resolved(socket.gethostname())):
        return
    if is_first_machine:
        own = _address_towards(store.get(key).decode())
    if own and _is_loopback(own):  # two torchruns on one machine
        return
    for _, name in socket.if_nameindex():
        if own and _address_of(name) == own:
            os.environ[_VARIABLE] = name
            return
    names = ", ".join(name for _, name in socket.if_nameindex() if name != "lo")
    raise ConfigError(
        f"the name of this machine, {socket.gethostname()}, resolves to a loopback address, at "
        f"which other machines cannot reach it: set {_VARIABLE} to its network interface, one of "
        f"{names}"
    )


def _resolved(name: str) -> str:
    """The address that a name means here, "" if none."""
    with suppress(OSError):
        return str(socket.getaddrinfo(name, None)[0][4][0])
    return ""


def _is_loopback(address: str) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_towards(other: str) -> str:
    """This machine's address on the way to another one, "" if there is none. Sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 1))
        return str(probe.getsockname()[0])
    return ""


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface, "" if it has none."""
    import fcntl  # not on Windows

    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24])
    return ""
