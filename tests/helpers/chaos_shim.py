"""The control of chaos_shim.c: the clock of a training, and the file operation that ends it."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("chaos_shim.c")


class _Layout(ctypes.Structure):
    """As `struct control` in chaos_shim.c."""

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("is_logged", ctypes.c_int64),
        ("folder", ctypes.c_char * 1024),
        ("target", ctypes.c_char * 128),
        ("killed", ctypes.c_int64),
    )


class Shim:
    """A library for LD_PRELOAD, and the memory that it shares with this process."""

    def __init__(self, folder: Path) -> None:
        library, control = folder / "chaos_shim.so", folder / "control"
        command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run([*command, str(SOURCE), "-ldl", "-lpthread"], check=True)
        control.write_bytes(bytes(ctypes.sizeof(_Layout)))
        with open(control, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._control = _Layout.from_buffer(self._memory)
        self._log = folder / "control.log"
        self.environment = {"LD_PRELOAD": str(library), "FASTAUG_CHAOS_CONTROL": str(control)}

    def reset(self) -> None:
        """The machine's clock, and no operation to kill at."""
        self._control.offset = 0
        self._control.target = b""

    # --- the clock ---

    @property
    def clock_offset(self) -> int:
        """Seconds that the training's clock is ahead of the machine's."""
        return self._control.offset

    @clock_offset.setter
    def clock_offset(self, seconds: int) -> None:
        self._control.offset = seconds

    # --- file operations ---

    def watch(self, run: Path) -> None:
        """Look at the operations in this run folder."""
        self._control.folder = os.fsencode(run)

    def kill_before(self, operation: str) -> None:
        """Kill the process that next begins this operation, in the middle of it for "half of".
        "": none."""
        self._control.target = operation.encode()

    @property
    def killed(self) -> int:
        """Processes that were killed so far."""
        return self._control.killed

    def start_log(self) -> None:
        """Note operations from now on."""
        if self._log.exists():
            os.truncate(self._log, 0)
        self._control.is_logged = 1

    def stop_log(self) -> list[str]:
        """The operations since start_log, in order."""
        self._control.is_logged = 0
        return self._log.read_text().splitlines()
