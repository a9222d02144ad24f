"""What a process and all that it started hold at a moment, from Linux's /proc."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from fastaug.errors import ConfigError

PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm"
TAIL = 8192
"""Bytes from the end of metrics.jsonl that are sure to hold a whole record."""


@dataclass(frozen=True)
class Sample:
    """Memory is in MiB. All but rss is of the process and its children together."""

    seconds: float
    """Since the start of the process."""
    epoch: float
    """Of the last record in metrics.jsonl; whole at an epoch's end. 0 before the first record."""
    step: int
    processes: int
    """Alive, itself among them."""
    rss: float
    """Resident, of the process alone."""
    children_rss: float
    """Resident, of its children; a page that two of them share counts twice."""
    pss: float
    """A page that several processes share counts once, in parts; so mapped libraries weigh less
    while somebody else on the machine has them open."""
    uss: float
    """Pages that nobody else has."""
    own: float
    """Anonymous and shared memory, in parts as in pss, and what of it was swapped out. No files,
    so nothing that the rest of the machine does changes it."""
    threads: int
    fds: int
    files: int
    pipes: int
    sockets: int
    shm: int
    """Descriptors of memfd and of files in /dev/shm."""
    other: int
    """eventfd, epoll and the like."""
    dev_shm: float
    """What all of the machine has in /dev/shm."""
    zombies: int
    """Children that ended and were not waited for."""

    def row(self) -> dict[str, object]:
        """By column; KiB are the finest that Linux tells of memory."""
        values = {name: getattr(self, name) for name in COLUMNS}
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


COLUMNS = tuple(field.name for field in fields(Sample))


def from_row(row: Mapping[str, str]) -> Sample:
    values = {name: float(row[name]) for name in COLUMNS}
    whole = {field.name for field in fields(Sample) if field.type == "int"}
    return Sample(**{k: int(v) if k in whole else v for k, v in values.items()})  # type: ignore[arg-type]


def check_system() -> None:
    try:
        known = "Pss_Anon" in _memory(os.getpid())
    except OSError:
        known = False
    if not known:
        raise ConfigError("soak reads Pss_Anon in /proc/PID/smaps_rollup: needs Linux 5.4 or newer")


def take(pid: int, seconds: float, metrics: Path) -> Sample | None:
    """None if the process has ended."""
    states = family(pid)
    if states.get(pid, "Z") == "Z":
        return None
    memory: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    threads = rss = 0
    alive = [member for member, state in states.items() if state != "Z"]
    for member in alive:
        # One that ends between two readings drops out; a row is never of half a process.
        with contextlib.suppress(OSError):
            found, count, links = _memory(member), _threads(member), _fd_kinds(member)
            memory.update(found)
            kinds.update(links)
            threads += count
            rss = found["Rss"] if member == pid else rss
    if not rss:
        return None
    epoch, step = progress(metrics)
    mib = {name: kib / 1024 for name, kib in memory.items()}
    return Sample(
        seconds=seconds,
        epoch=epoch,
        step=step,
        processes=len(alive),
        rss=rss / 1024,
        children_rss=mib["Rss"] - rss / 1024,
        pss=mib["Pss"],
        uss=mib["Private_Clean"] + mib["Private_Dirty"],
        own=mib["Pss_Anon"] + mib["Pss_Shmem"] + mib["SwapPss"],
        threads=threads,
        fds=kinds.total(),
        **{kind: kinds[kind] for kind in ("files", "pipes", "sockets", "shm", "other")},
        dev_shm=_used(SHARED_MEMORY),
        zombies=len(states) - len(alive),
    )


def family(pid: int) -> dict[int, str]:
    """The process, its descendants and whatever else is in its session, each with its state.

    By session too: the child of a child that has ended belongs to init, and is the leak sought."""
    found: dict[int, tuple[str, int, int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in brackets, may itself hold brackets and blanks.
                fields_ = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = fields_[0], int(fields_[1]), int(fields_[3])
    members = {member for member, (_, _, session) in found.items() if session == pid}
    members |= {pid} & found.keys()
    while more := {m for m, (_, parent, _) in found.items() if parent in members} - members:
        members |= more
    return {member: found[member][0] for member in sorted(members)}


def progress(metrics: Path) -> tuple[float, int]:
    """Epoch and step of the last whole record; zeros before the first."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0.0, 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, another kind
            record = json.loads(line)
            return float(record["epoch"]), int(record["step"])
    return 0.0, 0


def _memory(pid: int) -> Counter[str]:
    """KiB by the names of smaps_rollup."""
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    return Counter({line.split(":")[0]: int(line.split()[1]) for line in lines})


def _threads(pid: int) -> int:
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


def _fd_kinds(pid: int) -> Counter[str]:
    return Counter(map(_kind, _links(PROC / str(pid) / "fd")))


def _links(folder: Path) -> Iterable[str]:
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            yield os.readlink(folder / name)


def _kind(link: str) -> str:
    if link.startswith(("/memfd:", SHARED_MEMORY + "/")):
        return "shm"
    if link.startswith("/"):
        return "files"
    return {"pipe": "pipes", "socket": "sockets"}.get(link.partition(":")[0], "other")


def _used(folder: str) -> float:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0.0
    return (found.f_blocks - found.f_bfree) * found.f_frsize / 2**20
