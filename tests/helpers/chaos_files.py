"""Faults of chaos.py that change files: checkpoints between two starts, images at any time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chaos_scene import Fault, Scene, Strike, checksum
from chaos_settings import Setting
from chaos_training import descendants

# --- checkpoints, between a kill and the resume ---


def _kill_and(damage: Callable[[Scene, random.Random], str | None]) -> Strike:
    def fault(scene: Scene, rng: random.Random) -> list[str]:
        if not scene.stop(signal.SIGKILL):
            return []
        done = damage(scene, rng)
        scene.resume()
        return [scene.killed, done] if done else [scene.killed]

    return fault


def _damage(alter: Callable[[bytearray, random.Random], None], kind: str) -> Strike:
    """Alter last.pt, or the newest step, or both, which are one file, or all there are."""

    def damage(scene: Scene, rng: random.Random) -> str | None:
        found = scene.checkpoints()
        last = scene.run / "last.pt"
        if not found or not last.exists():
            return None
        which = rng.choices(["both", "last", "step", "all"], [4, 3, 2, 1])[0]
        if which in ("last", "step"):  # no longer one file
            copy = last.with_name("copy")
            shutil.copyfile(last, copy)
            copy.replace(last)
        chosen = {"both": [last], "last": [last], "step": found[:1], "all": found}[which]
        for path in chosen:
            if checksum(path) in scene.damaged:  # by its other name
                continue
            content = bytearray(path.read_bytes())
            alter(content, rng)
            with open(path, "r+b") as file:  # in place, under all its names
                file.truncate()
                file.write(content)
                file.truncate()
            scene.damaged.add(checksum(path))
        return kind

    return _kill_and(damage)


def _cut(content: bytearray, rng: random.Random) -> None:
    del content[rng.choice([0, rng.randrange(len(content)), len(content) - 1]) :]


def _flip(content: bytearray, rng: random.Random) -> None:
    content[_place(content, rng)] ^= 1 << rng.randrange(8)


def _overwrite(content: bytearray, rng: random.Random) -> None:
    place = _place(content, rng)
    block = min(rng.choice([16, 512, 4096]), len(content) - place)
    content[place] ^= 0xFF
    content[place + 1 : place + block] = rng.randbytes(block - 1)


def _place(content: bytearray, rng: random.Random) -> int:
    """Anywhere but in the length of the checksum: that is known, and not read."""
    length = len(content) - 2 - len(b"fastaug sha256 ") - 64
    place = rng.randrange(len(content) - 2)
    return place if place < length else place + 2


def _delete_last(scene: Scene, rng: random.Random) -> str | None:
    if not (scene.run / "last.pt").exists():
        return None
    (scene.run / "last.pt").unlink()
    return "last.pt deleted"


def _leave_halves(scene: Scene, rng: random.Random) -> str | None:
    """What a process leaves that was killed while it wrote."""
    found = scene.checkpoints()
    if not found:
        return None
    content = found[0].read_bytes()
    pid = scene.training.pids()[0] if scene.training.pids() else 99999
    for name in ("last.pt", "checkpoints/step-000000999.pt", "best.pt", "metrics.jsonl"):
        half, path = content[: rng.randrange(len(content))], scene.run / name
        path.with_name(f".{path.name}.{pid}.tmp").write_bytes(half)
    return "half temporary files"


# --- images and shards ---


def _training_file(scene: Scene, rng: random.Random) -> Path:
    pattern = "*/*.jpg" if scene.setting.data == "folder" else "*.tar"
    root = Path(scene.surroundings.data(scene.setting))
    return rng.choice(sorted((root / "train").glob(pattern)))


def _data_fault(kind: str, strike: Callable[[Path, random.Random], Iterator[None]]) -> Strike:
    strikes = contextmanager(strike)

    def fault(scene: Scene, rng: random.Random) -> list[str]:
        file = _training_file(scene, rng)
        line = len(scene.training.log)
        with strikes(file, rng):
            time.sleep(rng.uniform(0.2, 0.6))
        what = "image" if scene.setting.data == "folder" else "shard"
        return [f"{what} {kind}"] if scene.is_logged(line, str(file), "retrying") else []

    return fault


def _gone(file: Path, _rng: random.Random) -> Iterator[None]:
    away = file.with_suffix(".away")
    file.rename(away)
    yield
    away.rename(file)


def _cut_short(file: Path, rng: random.Random) -> Iterator[None]:
    content = file.read_bytes()
    length = rng.randrange(len(content))
    os.truncate(file, length)
    yield
    with open(file, "r+b", buffering=0) as rest:  # one write: no reader sees a part of it
        rest.seek(length)
        rest.write(content[length:])


def _garbage(file: Path, rng: random.Random) -> Iterator[None]:
    away, garbage = file.with_suffix(".away"), file.with_suffix(".garbage")
    garbage.write_bytes(rng.randbytes(rng.randrange(1, 2000)))
    os.link(file, away)
    garbage.replace(file)
    yield
    away.replace(file)


def feed(scene: Scene, rng: random.Random) -> list[str]:
    """A FIFO in the place of an image, fed a second later: a storage that makes a reader wait."""
    file = _training_file(scene, rng)
    content, away, fifo = file.read_bytes(), file.with_suffix(".away"), file.with_suffix(".fifo")
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    inode = os.fstat(descriptor).st_ino
    os.link(file, away)
    fifo.replace(file)
    try:
        time.sleep(rng.uniform(0.5, 1.5))
    finally:
        away.replace(file)  # who comes now finds the file; who came before waits
    pids = scene.training.pids()
    read = any(_has_open(pid, inode) for one in pids for pid in (one, *descendants(one)))
    os.write(descriptor, content)
    os.close(descriptor)
    return ["image read after a wait"] if scene.training.reach(1) and read else []


def _has_open(pid: int, inode: int) -> bool:
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            if entry.stat().st_ino == inode:
                return True
    return False


def _has_files(setting: Setting) -> bool:
    return setting.data != "remote"


FILE_FAULTS: dict[str, Fault] = {
    "cut": Fault(_damage(_cut, "checkpoint cut short")),
    "flip": Fault(_damage(_flip, "bit of a checkpoint flipped")),
    "overwrite": Fault(_damage(_overwrite, "block of a checkpoint overwritten")),
    "delete-last": Fault(_kill_and(_delete_last)),
    "halves": Fault(_kill_and(_leave_halves)),
    "data-gone": Fault(_data_fault("gone for a moment", _gone), _has_files),
    "data-cut": Fault(_data_fault("cut short for a moment", _cut_short), _has_files),
    "data-garbage": Fault(_data_fault("garbage for a moment", _garbage), _has_files),
    "image-waits": Fault(feed, lambda setting: setting.data == "folder"),
}
