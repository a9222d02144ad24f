"""Launchers of several ranks whose processes are forked with all modules loaded.

torchrun is torch's own, except that it forks its ranks instead of executing Python. The launcher of
two hosts is what a job scheduler does: a rank on each host, all of them started again if one fails.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import chaos_driver
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import main as torchrun_main

MAX_RESTARTS = 100
_POLL_SECONDS = 0.05
_CLONE_NEWNET = 0x40000000


def torchrun_flags(ranks: int) -> list[str]:
    restarts = ["--max-restarts", str(MAX_RESTARTS), "--monitor-interval", "0.1"]
    return ["--standalone", "--nproc-per-node", str(ranks), *restarts]


class ForkedProcess:
    """As much of subprocess.Popen as torchrun uses."""

    def __init__(
        self, journal: str, flags: Sequence[str], environment: Mapping[str, str], network: str = ""
    ) -> None:
        """network: file of the network namespace; "": this one."""
        self.args = ["chaos_driver", *flags]
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(journal, flags, environment, network)

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int | None:
        give_up = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < give_up:
            time.sleep(_POLL_SECONDS)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


def _become_rank(
    journal: str, flags: Sequence[str], environment: Mapping[str, str], network: str
) -> NoReturn:
    code = 1
    try:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_DFL)  # torchrun has its own
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        if network:
            _enter(network)
        code = chaos_driver.drive(journal, flags)
    finally:
        os._exit(code)


def _enter(network: str) -> None:
    descriptor = os.open(network, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), network)
    os.close(descriptor)


def torchrun(
    journal: str, log: str, flags: Sequence[str], environment: Mapping[str, str], ranks: int
) -> None:
    """torch's torchrun, in a forked process."""
    chaos_driver.detach(log, environment)

    def start(_handler: Any, _command: tuple[str, ...], env: dict[str, str]) -> ForkedProcess:
        return ForkedProcess(journal, flags, env)

    SubprocessHandler._popen = start  # type: ignore[method-assign, assignment]
    torchrun_main([*torchrun_flags(ranks), chaos_driver.__file__])


def on_hosts(
    journal: str,
    log: str,
    flags: Sequence[str],
    environment: Mapping[str, str],
    networks: Sequence[str],
    address: str,
) -> None:
    """A rank on each host. networks: files of their namespaces; address: of the first one."""
    chaos_driver.detach(log, environment)
    stop: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _frame: stop.append(number))
    for restart in range(MAX_RESTARTS):
        places = {"WORLD_SIZE": str(len(networks)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        places |= {"MASTER_ADDR": address, "MASTER_PORT": str(29500 + restart)}
        ranks = [
            ForkedProcess(journal, flags, {**os.environ, **places, "RANK": str(rank)}, network)
            for rank, network in enumerate(networks)
        ]
        codes = _wait_for(ranks, stop)
        if not any(codes):
            sys.exit(0)
        if stop:
            sys.exit(128 + stop[0])
    sys.exit(1)


def _wait_for(ranks: Sequence[ForkedProcess], stop: Sequence[int]) -> list[int | None]:
    """Exit codes of all ranks; if one fails, the others are asked to end, then killed."""
    passed_on = False
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        if stop and not passed_on:
            passed_on = True
            for rank in ranks:
                rank.send_signal(stop[0])
        time.sleep(_POLL_SECONDS)
    if not passed_on:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
    give_up = time.monotonic() + 30
    for rank in ranks:
        if rank.wait(max(0.0, give_up - time.monotonic())) is None:
            rank.send_signal(signal.SIGKILL)
    return [rank.wait() for rank in ranks]
