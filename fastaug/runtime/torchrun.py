"""Starting as a single process or as a rank that torchrun has started."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fastaug.runtime.distributed import TIMEOUT, Group, lost_rank
from fastaug.runtime.interfaces import check_resolves, use_reachable_interface

_POLL_SECONDS = 0.05

# Until all ranks have found each other: they may still be importing torch, from a slow disk.
START_TIMEOUT = timedelta(minutes=10)


@contextmanager
def join_process_group() -> Iterator[Group]:
    """Initialize torch.distributed if torchrun has started several ranks; yield the group."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" not in os.environ or ranks == 1:
        yield Group()
        return
    with _one_line_errors():
        group = _join()
        yield group
    # Ranks leave together, so that none loses another. Not after an error: others may be gone.
    # The group is not destroyed: gloo's threads sometimes abort the process then (once in 16 runs),
    # and cli.run exits without cleanup.
    _ignore_late_signals()
    with suppress(RuntimeError):  # another rank is gone already, and nothing is left to do
        group.gather(None)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """An error that means that another rank cannot be reached is a RankLostError."""
    try:
        yield
    except Exception as error:
        if lost := lost_rank(error):
            raise lost from error
        raise


def _join() -> Group:
    check_resolves(os.environ["MASTER_ADDR"])
    store, rank, ranks = next(rendezvous("env://", timeout=START_TIMEOUT))
    store = _own_store(store, rank, ranks)
    if num_nodes() > 1:
        use_reachable_interface(store)
    # For messages between hosts; Group.on adds NCCL when the device is known.
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=START_TIMEOUT
    )
    torch.distributed.set_timeout(TIMEOUT)
    return Group(rank, ranks, int(os.environ.get("LOCAL_RANK", 0)))


def _ignore_late_signals() -> None:
    """A signal for all ranks may reach this one when it has saved and waits for the others."""
    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):  # not on Windows
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _own_store(store: Store, rank: int, ranks: int) -> Store:
    """A part of torchrun's store that no earlier process has written to.

    torchrun (2.14) keeps one store over all restarts, in which gloo would find the addresses of
    dead processes and wait for them. No environment variable identifies a start on all machines, so
    the ranks agree on a random name: rank 0 publishes one, each other rank answers with a name of
    its own until rank 0 confirms that.
    """
    name = uuid.uuid4().hex
    if rank == 0:
        store.set("fastaug/start", name)
        for other in range(1, ranks):
            answer = store.get(f"fastaug/{name}/{other}").decode()  # waits for it
            store.set(f"fastaug/{name}/confirmed/{answer}", "")
        return PrefixStore(f"fastaug/{name}", store)
    while True:
        start = store.get("fastaug/start").decode()
        store.set(f"fastaug/{start}/{rank}", name)
        confirmed = f"fastaug/{start}/confirmed/{name}"
        while store.get("fastaug/start").decode() == start:
            if store.check([confirmed]):
                return PrefixStore(f"fastaug/{start}", store)
            time.sleep(_POLL_SECONDS)


def was_restarted() -> bool:
    """Whether torchrun has restarted the ranks after one of them ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def torchrun_id() -> str:
    """torchrun's --rdzv-id, "" if none: the same for all its processes, on all machines and after
    all restarts, also those that are not counted because a machine left or joined."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def launch_timestamp() -> str:
    """DATE-TIME-PID of the torchrun that started this process, else of this process: the same for
    all processes of one torchrun on this machine."""
    pid, started = os.getpid(), time.time()
    if "TORCHELASTIC_RUN_ID" in os.environ and os.path.exists("/proc/stat"):
        pid = os.getppid()
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = next(
            line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
        started = int(boot.split()[1]) + int(ticks) / os.sysconf("SC_CLK_TCK")
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}-{pid}"


def num_nodes() -> int:
    """Number of machines in this run."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))
