"""How a process comes into its run: on its own, or as one of those that torchrun has started."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fastaug.runtime.distributed import Group

# Longer than any wait of a sound run, as for a rank that looks at a million files: while training,
# the watchdog notices what hangs, and says where.
_TIMEOUT = timedelta(hours=12)
_LOOK_AGAIN = 0.05


@contextmanager
def join_process_group() -> Iterator[Group]:
    """This process in the group that torchrun has started it for; else on its own."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" not in os.environ or ranks == 1:
        yield Group()
        return
    store, rank, ranks = next(rendezvous("env://", timeout=_TIMEOUT))
    # Gradients go over NCCL where there are GPUs; what the hosts have to say, over gloo.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(
        backend, store=_own_store(store, rank, ranks), rank=rank, world_size=ranks, timeout=_TIMEOUT
    )
    group = Group(rank, ranks, int(os.environ.get("LOCAL_RANK", 0)))
    yield group
    # They leave together, so that none misses another; after an error there may be no one left. The
    # group is not destroyed: gloo's threads now and then abort the process then (seen once in 16
    # runs), and cli.run ends it without taking anything apart.
    group.gather(None)


def _own_store(store: Store, rank: int, ranks: int) -> Store:
    """A part of torchrun's store that no process before these has written to.

    torchrun (2.14) keeps one store over all restarts, and gloo then finds the addresses of the dead
    and waits for them. Nothing in the environment tells one start from the next on all machines
    alike, so the ranks find each other: rank 0 asks by a name of its own, each other rank answers
    every name that it finds with one of its own, and goes on when that one has been called.
    """
    name = uuid.uuid4().hex
    if rank == 0:
        store.set("fastaug/asks", name)
        for other in range(1, ranks):
            answer = store.get(f"fastaug/{name}/{other}").decode()  # waits for it
            store.set(f"fastaug/{name}/called/{answer}", "")
        return PrefixStore(f"fastaug/{name}", store)
    while True:
        asking = store.get("fastaug/asks").decode()
        store.set(f"fastaug/{asking}/{rank}", name)
        called = f"fastaug/{asking}/called/{name}"
        while store.get("fastaug/asks").decode() == asking:
            if store.check([called]):
                return PrefixStore(f"fastaug/{asking}", store)
            time.sleep(_LOOK_AGAIN)


def was_restarted() -> bool:
    """Whether torchrun has started this group anew, after one of its ranks ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def launch_name() -> str:
    """What all processes have in common that one torchrun starts, on all machines and whenever it
    does; "" if it has no name. A machine that leaves or joins is a new start, too, and not counted
    as a restart."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def launch_stamp() -> str:
    """DATE-TIME-PROCESS of the torchrun that started this process, else of this process itself: the
    same for all processes of one torchrun on this machine."""
    pid, started = os.getpid(), time.time()
    if "TORCHELASTIC_RUN_ID" in os.environ and os.path.exists("/proc/stat"):
        pid = os.getppid()
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = next(
            line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
        started = int(boot.split()[1]) + int(ticks) / os.sysconf("SC_CLK_TCK")
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}-{pid}"


def machines() -> int:
    """That take part in this run."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))
