"""Faults of chaos.py in what surrounds a training: its clock, cache, storage, network, loader; and
SIGKILL at a chosen file operation."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chaos_scene import Fault, Scene, Strike, send
from chaos_settings import STALL_TIMEOUT, Setting
from chaos_training import descendants

# --- frozen processes, the clock ---


def freeze(scene: Scene, rng: random.Random) -> list[str]:
    """SIGSTOP and SIGCONT: of the process, or of one rank, for which the others wait."""
    training = scene.training
    if training.ranks == 1 or rng.random() < 0.7:
        with _frozen(rng.choice(training.pids())):
            time.sleep(rng.uniform(0.5, 3))
        what = "process" if training.ranks == 1 else "rank"
        return [f"{what} frozen, then thawed"] if training.progress() else []
    with _may_restart(scene) as restarted, _frozen(rng.choice(training.pids())):
        time.sleep(STALL_TIMEOUT + rng.uniform(1, 3))
    return ["rank frozen until the others gave up"] if restarted() else []


@contextmanager
def _frozen(pid: int) -> Iterator[None]:
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


@contextmanager
def _may_restart(scene: Scene) -> Iterator[Callable[[], bool]]:
    """A launcher may restart the ranks meanwhile. Yields a function that waits until the training
    continues, and returns whether they were restarted."""
    training = scene.training
    training.bound(scene.next_start() or 0)
    before = set(training.pids())

    def restarted() -> bool:
        begun = len(training.steps())

        def is_settled() -> bool:
            if not before & set(training.pids()):
                return bool(training.steps())
            return len(training.steps()) >= begun + 8  # parts: no rank is behind by that many

        return training.until(is_settled) and not before & set(training.pids())

    yield restarted


_HOUR, _YEAR = 3600, 365 * 24 * 3600


def set_clock(scene: Scene, rng: random.Random) -> list[str]:
    """The time of day jumps, and stays wrong until the next jump."""
    shim, training = scene.surroundings.shim, scene.training
    before = shim.clock_offset
    jumps = (-10 * _YEAR, -25 * _HOUR, -_HOUR, -40, 40, _HOUR, 25 * _HOUR, 10 * _YEAR)
    shim.clock_offset = rng.choice([jump for jump in jumps if jump != before])
    jumped = shim.clock_offset - before

    def is_seen() -> bool:
        clocks = [note["clock"] for note in training.journal[-8:] if "clock" in note]
        return any(abs(clock - time.time() - shim.clock_offset) < abs(jumped) / 2 for clock in clocks)

    if not training.until(is_seen):
        return []
    return ["clock set forward" if jumped > 0 else "clock set back"]


# --- the cache ---


def delete_cache(scene: Scene, rng: random.Random) -> list[str]:
    """While the training runs; its next start finds none."""
    cache = scene.surroundings.cache
    if not cache.delete() or not scene.stop(signal.SIGKILL):
        return []
    scene.resume()
    return ["cache deleted while running", scene.killed]


def fill_cache(scene: Scene, rng: random.Random) -> list[str]:
    """While the training runs; the next start finds a full disk, often with an empty cache."""
    cache = scene.surroundings.cache
    if rng.random() < 0.7:
        cache.delete()
    cache.fill()
    try:
        if not scene.stop(signal.SIGKILL):
            return []
        scene.resume()
        scene.training.progress()
    finally:
        cache.empty()
    return ["cache filled while running", scene.killed]


# --- remote storage ---


def _storage_fault(kind: str, **faults: float) -> Strike:
    """Requests fail for a moment. The cache is emptied, so that images are requested."""

    def strike(scene: Scene, rng: random.Random) -> list[str]:
        store = scene.surroundings.store
        with store.faults.lock:
            before = sum(n for fault, n in store.faults.injected.items() if fault)
            requests = len(store.faults.requests)
        vars(store.faults).update(faults)
        scene.surroundings.cache.delete()
        try:
            time.sleep(rng.uniform(0.5, 1.5))
        finally:
            vars(store.faults).update(dict.fromkeys(faults, 0))
        after = sum(n for fault, n in store.faults.injected.items() if fault)
        is_hit = after > before or ("latency" in faults and len(store.faults.requests) > requests)
        return [f"storage: {kind}"] if scene.training.progress() and is_hit else []

    return strike


def start_without_storage(scene: Scene, rng: random.Random) -> list[str]:
    """The object store is down when the training starts again."""
    faults = scene.surroundings.store.faults
    if not scene.stop(signal.SIGKILL):
        return []
    scene.surroundings.cache.delete()
    before = faults.injected.get("unavailable", 0)
    faults.down = True
    try:
        scene.resume()
        time.sleep(rng.uniform(1, 3))
    finally:
        faults.down = False
    is_hit = faults.injected.get("unavailable", 0) > before
    return [scene.killed, *(["storage: down at the start"] if is_hit else [])]


# --- the network between hosts ---


def cut_network(scene: Scene, rng: random.Random) -> list[str]:
    """For a moment, or until the ranks give up and are started again."""
    link = scene.surroundings.hosts[0].link
    if rng.random() < 0.6:
        with _may_restart(scene) as restarted:  # packets that are lost are sent again ever later
            with link.cut():
                time.sleep(rng.uniform(0.3, 3))
            restarted()
        return ["network cut for a moment"]
    with _may_restart(scene) as restarted, link.cut():
        time.sleep(STALL_TIMEOUT + rng.uniform(1, 3))
    return ["network cut until the ranks gave up"] if restarted() else []


def lose_packets(scene: Scene, rng: random.Random) -> list[str]:
    link = scene.surroundings.hosts[0].link
    with _may_restart(scene) as restarted:
        link.drop(rng.uniform(0.05, 0.3))
        try:
            time.sleep(rng.uniform(1, 3))
        finally:
            link.up()
        restarted()
    return ["network loses packets"]


# --- the loader ---


def kill_worker(scene: Scene, rng: random.Random) -> list[str]:
    """SIGKILL of a loader process, as by a kernel that is out of memory."""
    training, line = scene.training, len(scene.training.log)
    workers = [child for pid in training.pids() for child in descendants(pid)]
    if not workers:
        return []
    send(rng.choice(workers), signal.SIGKILL)
    told = "a worker process of the loader has died"
    return ["loader process killed"] if training.until(lambda: training.logged(line, told)) else []


def kill_thread(scene: Scene, rng: random.Random) -> list[str]:
    """End a thread of the DALI loader. Its work is lost, the training waits for it, and ends by
    --stall-timeout."""
    training, first = scene.training, len(scene.training.journal)
    least = scene.next_start() or 0
    send(rng.choice(training.pids()), signal.SIGUSR2)
    killed: list[str] = []

    def is_killed() -> bool:
        notes = training.journal[first:]
        killed[:] = [note["thread_killed"] for note in notes if "thread_killed" in note]
        return bool(killed)

    if not training.until(is_killed) or not killed[0]:
        return []
    if training.ranks > 1:
        training.bound(least)
        training.progress()
    elif training.ends_or_continues():
        scene.resume_after(75)
    return ["loader thread killed"]


# --- SIGKILL at a file operation ---

OPERATIONS = (
    *("open step.tmp", "fsync step.tmp 1", "rename to step", "fsync checkpoints 1"),
    *("link last.pt.tmp", "fsync last.pt.tmp 1", "rename to last.pt", "unlink last.pt.tmp"),
    *("unlink step.tmp", "unlink step", "fsync run folder 1", "open best.pt.tmp"),
    *("rename to best.pt", "open best.safetensors.tmp", "rename to best.safetensors"),
)
_WRITES = ("step.tmp", "best.pt.tmp")


def kill_at_operation(scene: Scene, rng: random.Random) -> list[str]:
    operation = rng.choice(OPERATIONS)
    if rng.random() < 0.4:
        half = rng.choice(["", "half of "])
        operation = f"{half}write {rng.choice(_WRITES)} {rng.randint(1, 40)}"
    return ["SIGKILL at a file operation"] if kill_at(scene, operation, seconds=3) else []


def kill_at(scene: Scene, operation: str, seconds: float) -> bool:
    """Kill the process that begins a file operation within so many seconds, and resume."""
    training, shim = scene.training, scene.surroundings.shim
    before, give_up = shim.killed, time.monotonic() + seconds
    with _may_restart(scene) as restarted:
        shim.kill_before(operation)
        while shim.killed == before and time.monotonic() < give_up:
            if training.exit_code is not None:
                break
            time.sleep(0.005)
        shim.kill_before("")
        if shim.killed == before:
            return False
        if training.ranks > 1:
            return restarted()
    scene.resume_after(-signal.SIGKILL)
    return True


def _has_ranks(setting: Setting) -> bool:
    return setting.ranks > 1


def _is_remote(setting: Setting) -> bool:
    return setting.data == "remote"


def _has_hosts(setting: Setting) -> bool:
    return setting.has_hosts


def _has_workers(setting: Setting) -> bool:
    return bool(setting.flags.get("workers"))


def _has_threads(setting: Setting) -> bool:
    return setting.loader == "dali"


AROUND: dict[str, Fault] = {
    "freeze": Fault(freeze),
    "freeze-rank": Fault(freeze, _has_ranks),
    "clock": Fault(set_clock, weight=2),
    "cache-delete": Fault(delete_cache),
    "cache-fill": Fault(fill_cache),
    "storage-503": Fault(_storage_fault("HTTP status 503", unavailable=2), _is_remote, 2),
    "storage-429": Fault(_storage_fault("HTTP status 429", throttled=2), _is_remote, 2),
    "storage-drops": Fault(_storage_fault("connection closed", dropped=2), _is_remote, 2),
    "storage-cuts": Fault(_storage_fault("answer cut short", cut=2), _is_remote, 2),
    "storage-slow": Fault(_storage_fault("slow", latency=0.2), _is_remote),
    "storage-down": Fault(start_without_storage, _is_remote),
    "network": Fault(cut_network, _has_hosts, 5),
    "packets": Fault(lose_packets, _has_hosts, 3),
    "worker": Fault(kill_worker, _has_workers, 8),
    "thread": Fault(kill_thread, _has_threads, 0.5),
    "kill-operation": Fault(kill_at_operation, weight=2),
}
