"""The settings of chaos.py's trainings, and what surrounds them: data, cache, clock, network."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from chaos_shim import Shim
from chaos_training import Launch, start_forkserver
from hosts import Host, two_hosts, why_no_hosts
from object_store import ObjectStore, object_store
from PIL import Image
from shard_writers import write_tar

from fastaug import pack

CLASSES, PER_CLASS = 3, 14
PER_STEP = 8
STEPS = CLASSES * PER_CLASS // PER_STEP
"""Steps in an epoch."""
EPOCHS = 40
BASE: Mapping[str, Any] = {
    "workers": 0,
    "model": "wrn-10-1",
    "size": 16,
    "views": 2,
    "batch-size": 2 * PER_STEP,
    "lr": 0.01,
    "kernel": "reference",
    "device": "cpu",
    "seed": 3,
    "eval-every": 2,
    "tta": 2,
    # Not a divisor of epochs or checkpoints: most of these hold means that are not logged yet.
    "log-every": 7,
    "checkpoint-minutes": 0,
    "stall-timeout": 150,
}
"""Flags of every training: a run of some seconds that repeats to the last bit."""
STALL_TIMEOUT = 15
"""Seconds, for runs that faults make wait for longer."""


@dataclass(frozen=True)
class Setting:
    """What is trained, on what, and by how many processes."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    data: Literal["folder", "shards", "remote"] = "folder"
    ranks: int = 1
    is_command: bool = False
    """Ranks are started by the command torchrun."""
    has_hosts: bool = False
    """Each rank is on a host of its own: a network namespace."""

    @property
    def loader(self) -> str:
        return self.flags.get("loader", "torch")


_MORE = {"accumulate": 2, "ema": 0.9}
_RANDAUGMENT = {"augment": "randaugment", "ema": 0.9}
_BF16 = {"precision": "bf16", "optimizer": "adamw", "lr": 0.001, "accumulate": 2}
_DALI = {"loader": "dali", "stall-timeout": STALL_TIMEOUT}
_RANKS = {"stall-timeout": STALL_TIMEOUT}
SETTINGS: dict[str, Setting] = {
    "plain": Setting(_MORE),
    "dali": Setting(_DALI | _MORE),
    "randaugment-ema": Setting(_RANDAUGMENT),
    "accumulate-bf16-adamw": Setting(_BF16),
    "workers": Setting(_MORE | {"workers": 2}),
    "dali-randaugment-ema": Setting(_DALI | _RANDAUGMENT),
    "shards": Setting(_MORE, "shards"),
    "shards-dali-bf16-adamw": Setting(_DALI | _BF16, "shards"),
    "remote": Setting(_MORE, "remote"),
    "remote-dali": Setting(_DALI | _RANDAUGMENT, "remote"),
    "2-ranks": Setting(_MORE | _RANKS, ranks=2),
    "2-ranks-dali": Setting(_DALI | _RANDAUGMENT | _RANKS, ranks=2),
    "4-ranks": Setting(_RANDAUGMENT | _RANKS, ranks=4),
    "4-ranks-dali-shards": Setting(_DALI | _MORE | _RANKS, "shards", ranks=4),
    "2-ranks-torchrun": Setting(_MORE | _RANKS, ranks=2, is_command=True),
    "2-hosts": Setting(_MORE | _RANKS, ranks=2, has_hosts=True),
}


class Surroundings:
    """What the trainings of one job share. Everything is made when it is first needed."""

    def __init__(self, folder: Path, *, own_mounts: bool = False) -> None:
        """own_mounts: this process gets its own mounts, so that its cache can be a small disk."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._undo = ExitStack()
        self.cache = Cache(folder / "cache", own_mount=own_mounts)
        self.shim = Shim(folder)
        common = {"FASTAUG_CACHE": str(self.cache.folder), "OMP_NUM_THREADS": "1"}
        self._environment = common | self.shim.environment
        start_forkserver(self._environment)

    def close(self) -> None:
        self._undo.close()

    @cached_property
    def images(self) -> Path:
        """Class folders."""
        return write_images(self.folder / "data" / "folder")

    @cached_property
    def shards(self) -> Path:
        """The same images in tar shards."""
        root = self.folder / "data" / "shards"
        for split in ("train", "test"):
            files = sorted(self.images.glob(f"{split}/*/*.jpg"))
            samples = [(file.read_bytes(), "abc".index(file.parent.name)) for file in files]
            for number in range(3):
                write_tar(root / split / f"{number:05}.tar", samples[number::3])
        return root

    @cached_property
    def store(self) -> ObjectStore:
        """An S3 server on loopback, with the same images packed by fastaug.pack."""
        packed = self.folder / "data" / "packed"
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            pack.main([str(self.images), str(packed)])
        store = self._undo.enter_context(object_store())
        self.url = store.upload(packed, "set")
        return store

    @cached_property
    def hosts(self) -> tuple[Host, Host]:
        return self._undo.enter_context(two_hosts())

    def data(self, setting: Setting) -> str:
        """--data of a setting."""
        if setting.data == "remote":
            return self.url if self.store else ""
        return str(self.shards if setting.data == "shards" else self.images)

    def launch(self, setting: Setting) -> Launch:
        environment: dict[str, str] = {}
        if setting.data == "remote":
            environment |= self.store.environment
        if setting.is_command:
            environment |= self._environment
        networks: tuple[str, ...] = ()
        if setting.has_hosts:
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
            networks = tuple(f"/run/netns/{host.namespace}" for host in self.hosts)
        address = self.hosts[0].address if setting.has_hosts else ""
        return Launch(setting.ranks, setting.is_command, environment, networks, address)


class Cache:
    """fastaug's cache folder: a disk of some megabytes, where this process may mount one."""

    MEGABYTES = 16

    def __init__(self, folder: Path, *, own_mount: bool) -> None:
        self.folder, self._filler = folder, folder / "filler"
        folder.mkdir(exist_ok=True)
        self.has_disk = own_mount and _unshare_mounts() and self._mount()

    def _mount(self) -> bool:
        size = f"size={self.MEGABYTES}m"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.folder)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def delete(self) -> int:
        """Delete all files, also while they are used; returns how many there were."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        for path in self.folder.iterdir():
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return len(files)

    def fill(self) -> None:
        """Leave no byte of its disk."""
        assert self.has_disk, "this would fill the machine's disk"
        with open(self._filler, "wb", buffering=0) as file:
            with suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            with suppress(OSError):
                while file.write(b"\0"):
                    pass

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


def _unshare_mounts() -> bool:
    new_mounts = 0x00020000  # CLONE_NEWNS
    if ctypes.CDLL(None, use_errno=True).unshare(new_mounts):
        return False
    private = ["mount", "--make-rprivate", "/"]
    return subprocess.run(private, capture_output=True).returncode == 0


def why_not(setting: Setting) -> str:
    """Why a setting cannot be played here, "" if it can."""
    return why_no_hosts() if setting.has_hosts else ""


def write_images(root: Path) -> Path:
    """Noise with one channel raised a little: classes that take some epochs to be learned."""
    rng = np.random.default_rng(0)
    for split, count in (("train", PER_CLASS), ("test", 6)):
        for label in range(CLASSES):
            folder = root / split / "abc"[label]
            folder.mkdir(parents=True)
            for number in range(count):
                image = rng.integers(0, 200, (20, 20, 3))
                image[..., label] += 12
                Image.fromarray(image.astype(np.uint8)).save(folder / f"{number:02}.jpg")
    return root
