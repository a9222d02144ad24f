"""Two hosts on this machine: network namespaces (iproute2) joined by a link that a test can cut.

Each host has its own loopback device, address, host name and /etc/hosts; files are shared, as over
NFS. Usable from tests and from plain scripts:

    with two_hosts() as (first, second):
        process = first.start(["torchrun", "--nnodes", "2", ...])
        first.link.down()
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_PREFIX = "fastaug"
_DEVICE = "eth0"
"""The link's end in each namespace."""
_numbers = itertools.count()
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class HostsError(RuntimeError):
    """A command of iproute2 has failed."""


class Link:
    """The cable between two hosts."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._namespaces = namespaces

    def down(self) -> None:
        """Unplug it: both hosts see that, and have no route to each other."""
        _command("ip", "-n", self._namespaces[0], "link", "set", _DEVICE, "down")

    def up(self) -> None:
        """Plug it in, and lose no more packets."""
        for namespace in self._namespaces:
            _command("ip", "-n", namespace, "link", "set", _DEVICE, "up")
            _command("tc", "-n", namespace, "filter", "delete", "dev", _DEVICE, "egress")

    def drop(self, share: float) -> None:
        """Lose this share of the packets, in both directions and at random. 1 is a dead switch:
        neither host notices anything but silence."""
        # Classic BPF, which more kernels have than netem: compare a random number with a limit,
        # then return TC_ACT_SHOT (2) or TC_ACT_OK (0).
        limit = min(int(share * 2**32), 2**32 - 1)
        program = f"4,32 0 0 4294963256,37 1 0 {limit},6 0 0 2,6 0 0 0"
        for namespace in self._namespaces:
            arguments = ("dev", _DEVICE, "egress")
            _command("tc", "-n", namespace, "filter", "delete", *arguments)
            added = ("filter", "add", *arguments, "bpf", "da", "bytecode", program)
            _command("tc", "-n", namespace, *added)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Unplugged within the context."""
        self.down()
        try:
            yield
        finally:
            self.up()


class Host:
    """One of two hosts. Processes that run there have its network and its name."""

    def __init__(self, namespace: str, name: str, address: str, link: Link, hosts: Path) -> None:
        """hosts: its /etc/hosts."""
        self.namespace, self.name, self.address, self.link = namespace, name, address, link
        self._hosts = hosts

    def command(self, command: Sequence[str]) -> list[str]:
        """A command line that runs the command on this host, under the same process id."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", _ENTER, self.name, str(self._hosts), *command]

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """options: those of subprocess.Popen."""
        return subprocess.Popen(self.command(command), **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess:
        """options: those of subprocess.run."""
        return subprocess.run(self.command(command), **options)

    def pids(self) -> list[int]:
        """The processes that run there."""
        return [int(pid) for pid in _command("ip", "netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """A power failure: SIGKILL to all its processes. The link is down, so that the other host
        gets no packet that would end its connections."""
        self.link.down()
        self.kill_processes()

    def kill_processes(self) -> None:
        deadline = time.monotonic() + 10
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


@contextmanager
def two_hosts(*, own_name_is_loopback: bool = False) -> Iterator[tuple[Host, Host]]:
    """Two hosts and the link between them; raises HostsError where they cannot be made.

    own_name_is_loopback: each host resolves its own name to 127.0.1.1, as on a Debian that was
    installed without a fixed address.
    """
    _remove_leftovers()
    number = next(_numbers)
    namespaces = [f"{_PREFIX}-{os.getpid()}-{number}-{end}" for end in "ab"]
    names, addresses = ("host-a", "host-b"), ("10.213.0.1", "10.213.0.2")
    link, hosts = Link(namespaces), []
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="fastaug-hosts-")))
        for end, namespace in enumerate(namespaces):
            _command("ip", "netns", "add", namespace)
            undo.callback(_remove, namespace)
            known = dict(zip(names, addresses, strict=True))
            if own_name_is_loopback:
                known[names[end]] = "127.0.1.1"
            file = folder / f"hosts-{names[end]}"
            lines = [f"{address} {name}\n" for name, address in known.items()]
            file.write_text("127.0.0.1 localhost\n" + "".join(lines))
            hosts.append(Host(namespace, names[end], addresses[end], link, file))
        ends = [["name", _DEVICE, "netns", namespace] for namespace in namespaces]
        _command("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            _command("ip", "-n", host.namespace, "link", "set", "lo", "up")
            address = ("address", "add", f"{host.address}/24", "dev", _DEVICE)
            _command("ip", "-n", host.namespace, *address)
            _command("tc", "-n", host.namespace, "qdisc", "add", "dev", _DEVICE, "clsact")
        link.up()
        yield hosts[0], hosts[1]


def why_no_hosts() -> str:
    """Why two_hosts() cannot work here, "" if it can: for pytest.skip and for scripts."""
    for program in ("ip", "tc", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"needs the program {program} (Debian: iproute2, util-linux)"
    try:
        with two_hosts() as (host, _):
            host.run(["true"], check=True, capture_output=True)
    except (HostsError, OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or str(error)
        return f"network namespaces are not allowed here: {detail!r}"
    return ""


def _remove(namespace: str) -> None:
    Host(namespace, "", "", Link([namespace]), Path()).kill_processes()
    _command("ip", "netns", "delete", namespace)  # and with it its end of the link, and so the link


def _remove_leftovers() -> None:
    """Remove the namespaces of processes that were killed."""
    for line in _command("ip", "netns", "list").splitlines():
        namespace = line.split()[0]
        prefix, _, rest = namespace.partition("-")
        if prefix == _PREFIX and not Path(f"/proc/{rest.partition('-')[0]}").exists():
            with suppress(HostsError):  # another process removes it, too
                _remove(namespace)


def _command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise HostsError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
